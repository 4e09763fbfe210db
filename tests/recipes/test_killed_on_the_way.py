"""A recipe that dies at any moment, in the middle of a line of its ledger too, ends the same."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from dptrain.engine import release_ledger as ledger
from recipes.runfolder import CHECKPOINT, LEDGER, METRICS
from tests.helpers.tiny_vision import PLAIN, run
from tests.recipes.test_resume import _assert_like

FILES = (CHECKPOINT, LEDGER, METRICS)
ARGUMENTS = [*PLAIN, "threads=1"]  # those of OpenMP do not survive a fork


def in_a_child(work):
    """The signal that ended a process which did the work, or 0."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return -status


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before_file_change(number):
    """Dies before the so-manieth time that one of the run's files is opened or renamed."""
    seen = 0

    def count(event, arguments):
        nonlocal seen
        if event not in ("open", "os.rename"):
            return
        seen += any(name in str(arguments[0]) for name in FILES)
        if seen == number:
            die()

    sys.addaudithook(count)


def within_a_line(number):
    """Dies when half of the so-manieth line of the ledger is written."""
    seen, write = 0, ledger._write

    def half(file, data):
        nonlocal seen
        seen += 1
        if seen < number:
            return write(file, data)
        file.write(data[: len(data) // 2])
        file.flush()
        die()

    ledger._write = half


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    output = tmp_path_factory.mktemp("plain") / "run"
    assert in_a_child(lambda: run(config, output, *ARGUMENTS)) == 0
    return output


@pytest.mark.followed  # as the uninterrupted run, which is made before one is chosen
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "numbers"),
    [
        pytest.param(before_file_change, (4, 9, 13, 17), marks=pytest.mark.slow),
        (before_file_change, (4,)),
        (within_a_line, (2, 4)),
    ],
)
def test_killed_and_resumed_it_ends_in_the_same_model(
    config, uninterrupted, tmp_path, arm, numbers
):
    kills = []
    for number in numbers:
        output = tmp_path / str(number)

        def go(output=output, number=number, *, armed=True):
            if armed:
                arm(number)
            resume = ["--resume"] if (output / CHECKPOINT).exists() else []
            return run(config, output, *resume, *ARGUMENTS)

        for armed in (True, True, False):  # and killed once more on its way from the checkpoint
            kills.append(in_a_child(lambda go=go, armed=armed: go(armed=armed)))
        _assert_like(output, uninterrupted)
    assert kills[0::3] == [signal.SIGKILL] * len(numbers)
    assert signal.SIGKILL in kills[1::3]
    assert not any(kills[2::3])
