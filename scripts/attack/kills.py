"""Kill points: a recipe is killed at random moments and resumed, and has to end bit for bit."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from dptrain.reporting import STATEMENT
from recipes.runfolder import CHECKPOINT, LEDGER, METRICS, load_checkpoint
from scripts.attack.harness import Finding, Part
from tests.helpers.tiny_vision import PLAIN
from tests.recipes.test_resume import _same

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 40
ARGUMENTS = (*PLAIN, f"steps={STEPS}", "checkpoint_every=3")
_LONGEST = 300  # seconds that a run may take
_TRAINING = 2.0  # seconds within which kills fall once a run has begun


def start(output: pathlib.Path, *more: str) -> subprocess.Popen[str]:
    """The recipe in a process group of its own."""
    config = output.parent / "empty.yaml"
    config.touch()
    command = [sys.executable, "-m", "recipes.vision", "--config", str(config)]
    return subprocess.Popen(
        [*command, "--output", str(output), *ARGUMENTS, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Its output, once it has ended well.

    Raises:
        Finding: if it did not.
    """
    try:
        said, _ = process.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Finding(f"still running after {_LONGEST} s: {process.args}") from None
    if process.returncode:
        raise Finding(f"ended with {process.returncode}: {said[-1500:]}")
    return said


def outcome(output: pathlib.Path) -> dict[str, Any]:
    """All that a run leaves behind and that must not depend on kills."""
    state = load_checkpoint(output)["run"]
    if state["steps_executed"] != STEPS:
        raise Finding(f"ended after {state['steps_executed']} of {STEPS} steps")
    parts = {part: state[part] for part in ("module", "optimizer", "schedulers", "ledger")}
    parts |= {part: state["private"][part] for part in ("noise", "loader")}
    for name in (METRICS, STATEMENT):
        parts[name] = (output / name).read_text()
    parts["releases"] = (output / LEDGER).read_text().splitlines()[1:]
    return parts


@functools.cache
def uninterrupted() -> dict[str, Any]:
    """The same of a run that nobody kills."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        output = pathlib.Path(folder, "run")
        ended(start(output))
        return outcome(output)


def kill(process: subprocess.Popen[str], output: pathlib.Path, rng: random.Random) -> None:
    """SIGKILL at a random moment, most of them after the run has begun; it may end before."""
    before = (output / LEDGER).stat().st_mtime_ns if (output / LEDGER).exists() else None
    early = rng.random() < 0.2
    end = time.monotonic() + (rng.uniform(0, 8) if early else 60.0)
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if not early and (output / LEDGER).stat().st_mtime_ns != before:
                break
        time.sleep(0.01)
    time.sleep(0 if early else rng.uniform(0, _TRAINING))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def case(seed: int) -> int:
    """A run that is killed up to three times; how many kills there were."""
    rng = random.Random(seed)
    kills = rng.randint(1, 3)
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        output = pathlib.Path(folder, "run")
        for left in range(kills, -1, -1):
            resume = ["--resume"] if (output / CHECKPOINT).exists() else []
            process = start(output, *resume)
            if left:
                kill(process, output, rng)
            else:
                ended(process)
        found, expected = outcome(output), uninterrupted()
    different = [part for part in expected if not _same(found[part], expected[part])]
    if different:
        raise Finding(f"after {kills} kills the run has another {', '.join(different)}")
    return kills


PART = Part("kills", "kills", case, share=2.0)
