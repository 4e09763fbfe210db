"""Learning rates over the steps of a run: public functions."""

from __future__ import annotations

import dataclasses
import math

SCHEDULES = ("constant", "linear", "cosine", "late_linear")
_FLOOR = 1 / 20  # of late_linear


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Factor of the learning rate after ``step`` of ``steps`` steps.

    ``linear`` and ``cosine`` fall to 0 over the whole run. ``late_linear`` stays at 1 for a
    quarter, falls linearly to 1/20 over the two middle quarters, and stays there (Dong & Ganesh
    2026, section 7.2).
    """

    name: str
    steps: int

    def __call__(self, step: int) -> float:
        """The factor, between 0 and 1."""
        done = min(1.0, step / self.steps)
        if self.name == "linear":
            return 1 - done
        if self.name == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        if self.name == "late_linear":
            return 1 - (1 - _FLOOR) * min(1.0, max(0.0, 2 * done - 0.5))
        return 1.0
