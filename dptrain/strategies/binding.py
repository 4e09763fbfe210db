"""What families check of a declaration, and of the number of steps that they are bound to."""

from __future__ import annotations

from dptrain.core import checks


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


def unoptimised(steps: int, missing: str) -> ValueError:
    """The error for a declaration that states n but not what ``bind`` would find for it.

    Args:
        steps: the field.
        missing: the fields that only a bound value has, such as "coefficients".
    """
    return ValueError(
        f"steps={steps} without {missing}: leave steps out and call bind({steps}), which optimises"
    )
