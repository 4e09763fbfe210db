"""Checks of a declaration, of the steps it is bound to and of participations."""

from __future__ import annotations

import numpy as np

from dptrain.core import Array, checks


def steps_of(owner: str, bound_to: int | None) -> int:
    """The n that a strategy is bound to."""
    if bound_to is None:
        raise ValueError(
            f"this {owner} is not bound to a number of steps, on which its bands depend: "
            "use bind(steps) first"
        )
    return bound_to


def check_bound(owner: str, bound_to: int | None, steps: int) -> int:
    """``steps`` if the strategy is bound to that many."""
    steps = checks.steps(steps)
    if bound_to is None:
        raise ValueError(f"this {owner} is not bound to a number of steps: use bind({steps}) first")
    if bound_to != steps:
        raise ValueError(
            f"this {owner} is bound to {bound_to} steps, not {steps}: start again from a "
            f"declaration without steps and bind that to {steps}"
        )
    return steps


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
