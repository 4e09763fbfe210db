"""Stopping a recipe in the middle of its run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from recipes.runfolder import RunFolder


def ctrl_c() -> None:
    """What the terminal sends."""
    os.kill(os.getpid(), signal.SIGINT)


def hear_ctrl_c() -> None:
    """For a new process: what runs in a shell's background is started deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, stop: Callable[[], None]) -> None:
    """Call ``stop`` when the training metrics of ``step`` have been recorded."""
    log = RunFolder.log

    def log_then_stop(self, record, *, private):
        log(self, record, private=private)
        if record["step"] == step and record["split"] == "train":
            stop()

    monkeypatch.setattr(RunFolder, "log", log_then_stop)
