"""The progress of runs; at exit, a message on those that ended before their planned steps."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os

from dptrain.core import remember_globals
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import FlatStream

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Progress:
    """The progress of a run in this process.

    Attributes:
        planned: steps that its guarantee is about, and its noise was chosen for.
        executed: most steps that any continuation of it has reached.
        meant: whether it was said that it ends early.
    """

    planned: int
    executed: int = 0
    meant: bool = False
    process: int = dataclasses.field(default_factory=os.getpid)

    @property
    def early(self) -> bool:
        """True if it was begun and left before its end, and nobody said that it would be."""
        return 0 < self.executed < self.planned and not self.meant and self.process == os.getpid()


_runs: dict[tuple[str, int], Progress] = {}


class Boundary:
    """The last moment between two logical steps: the generators then, and how far the run came.

    A checkpoint that is taken within a step restarts the step, so it needs the generators as they
    were when its first batch was handed out: an evaluation before may have used them.

    Args:
        noise: its stream, by whose seed a run that goes on from a checkpoint is known.
        first: whether this process speaks for all ranks.
    """

    def __init__(self, mechanism: MatrixMechanism, noise: FlatStream, *, first: bool) -> None:
        self._mechanism, self._noise, self._first = mechanism, noise, first
        self.restart()

    def begin_step(self) -> None:
        """Remember the generators: a step begins."""
        self.rng = remember_globals()

    def passed(self, steps_executed: int) -> None:
        """Count the steps that have been completed."""
        if self._first:
            self.progress.executed = max(self.progress.executed, steps_executed)

    def restart(self) -> None:
        """Begin, or go on from a checkpoint, with its generators and noise of maybe another seed.

        A run that goes on from a checkpoint is the same run.
        """
        self.begin_step()
        key = (self._mechanism.hash, self._noise.normals.seed)
        self.progress = _runs.setdefault(key, Progress(self._mechanism.steps))


def forget() -> None:
    """Say nothing at exit of the runs so far, as after tests that stop many on purpose."""
    _runs.clear()


@atexit.register
def tell() -> None:
    """One line for all runs that ended early."""
    early = [run for run in _runs.values() if run.early]
    if not early:
        return
    counts = ", ".join(f"{run.executed} of {run.planned} planned steps" for run in early[:3])
    more = f" and {len(early) - 3} more" if len(early) > 3 else ""
    logger.warning(
        "private training ended early, after %s%s, although the noise was calibrated for all "
        "planned steps. Check that the trainer's epochs and batches match len(loader), resume "
        "from a checkpoint, or call private.end_early() if this is intended",
        counts,
        more,
    )
