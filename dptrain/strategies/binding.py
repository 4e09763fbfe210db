"""Checks of a declaration, of the steps it is bound to and of participations."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, checks


class Bindable:
    """Mixin, named before the base: a declaration until ``bind`` says n, which ``steps`` holds."""

    steps: int | None

    def bind(self, steps: int) -> Self:
        """The value for n = ``steps``, with what is optimized for that n.

        Raises:
            ValueError: if it does not fit n steps (more bands, a workload for another n, C or C^-1
                that blows up) or is bound to another n.
        """
        steps = checks.steps(steps)
        if self.steps is not None:
            self.check_bound(steps)
            return self
        return dataclasses.replace(self, **self._optimized(steps), steps=steps)  # type: ignore[type-var]

    def _optimized(self, steps: int) -> dict[str, Any]:
        """The fields that depend on n, by name; none unless a family says so."""
        return {}

    @property
    def bound_steps(self) -> int:
        """The n that the strategy is bound to.

        Raises:
            ValueError: if it is not bound.
        """
        if self.steps is None:
            raise ValueError(
                f"this {type(self).__name__} is not bound to a number of steps, on which its bands "
                "depend: use bind(steps) first"
            )
        return self.steps

    def check_bound(self, steps: int) -> int:
        """``steps`` if the strategy is bound to that many.

        Raises:
            ValueError: if it is not bound, or bound to another n.
        """
        steps, owner = checks.steps(steps), type(self).__name__
        if self.steps is None:
            raise ValueError(
                f"this {owner} is not bound to a number of steps: use bind({steps}) first"
            )
        if self.steps != steps:
            raise ValueError(
                f"this {owner} is bound to {self.steps} steps, not {steps}: start again from a "
                f"declaration without steps and bind that to {steps}"
            )
        return steps


def checked_columns(steps: int, indices: npt.ArrayLike) -> npt.NDArray[np.integer]:
    """Numbers of columns of C for n = ``steps``, as one row.

    Raises:
        ValueError: if there is no such column.
    """
    j = np.atleast_1d(np.asarray(indices))
    if j.ndim != 1 or not np.issubdtype(j.dtype, np.integer):
        raise ValueError(f"indices={indices!r}: must be a list of integers")
    if j.size and (j.min() < 0 or j.max() >= steps):
        raise ValueError(f"indices reach from {j.min()} to {j.max()}: C has {steps} columns")
    return j


def check_bands_fit(bands: int, steps: int, *, name: str = "bands") -> None:
    """Refuse more bands than steps.

    Args:
        bands: of C, or of C^-1.
        steps: n.
        name: of the field, for the message.

    Raises:
        ValueError: if ``bands > steps``.
    """
    if bands > steps:
        raise ValueError(
            f"{name}={bands} exceeds the {steps} steps of the run: use at most {name}={steps}"
        )


def unoptimized(steps: int, missing: str) -> ValueError:
    """The error for a declaration that states n but not what ``bind`` would find for it."""
    return ValueError(
        f"steps={steps} without {missing}: leave steps out and call bind({steps}), which optimizes"
    )


def participations(steps: int, max_participations: int, min_sep: int) -> tuple[int, int]:
    """(m, b), with m cut to the ceil(n/b) participations that fit.

    Raises:
        TypeError, ValueError: if one of the three is not a positive integer.
    """
    steps = checks.steps(steps)
    b = checks.integer("min_sep", min_sep)
    return min(checks.integer("max_participations", max_participations), -(-steps // b)), b


def regular_pattern(steps: int, m: int, b: int) -> Array:
    """x in {0, 1}^n with ones at 0, b, …, (m-1)b, shape (steps,)."""
    x = np.zeros(steps)
    x[: m * b : b] = 1.0
    return x
