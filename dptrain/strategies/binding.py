"""Run lengths of closed-form strategies whose C is dense: nothing to store but n."""

from __future__ import annotations

from dptrain.strategies.patterns import positive_int


def steps_of(owner: str, bound_to: int | None) -> int:
    """The n that a strategy is bound to.

    Args:
        owner: the strategy's class, for the message.
        bound_to: its ``steps`` field.

    Raises:
        ValueError: if it is not bound.
    """
    if bound_to is None:
        raise ValueError(
            f"this {owner} is not bound to a number of steps, on which its bands depend: "
            "use bind(steps) first"
        )
    return bound_to


def check_bound(owner: str, bound_to: int | None, steps: int) -> int:
    """``steps`` if the strategy is bound to that many.

    Raises:
        ValueError: if it is not bound, or is bound to another n.
    """
    steps = positive_int("steps", steps)
    if bound_to is None:
        raise ValueError(f"this {owner} is not bound to a number of steps: use bind({steps}) first")
    if bound_to != steps:
        raise ValueError(
            f"this {owner} is bound to {bound_to} steps, not {steps}: start again from a "
            f"declaration without steps and bind that to {steps}"
        )
    return steps
