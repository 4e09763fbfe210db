"""Checks of the fields of a scheme: each returns the value in its one canonical type."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dptrain.core import checks


def check_microbatches(
    max_physical_batch_size: Any, microbatches: Any, group_size: int | None = None
) -> None:
    """Refuse sizes and numbers of microbatches that are none, both at once, and too small ones.

    Args:
        max_physical_batch_size: most rows of a microbatch, or ``None``.
        microbatches: of every batch, or ``None``.
        group_size: most rows that have to be in one microbatch, or ``None``.

    Raises:
        TypeError, ValueError: naming the argument and the value.
    """
    for name, value in (
        ("max_physical_batch_size", max_physical_batch_size),
        ("microbatches", microbatches),
    ):
        if value is not None:
            checks.integer(name, value, owner="PrivateLoader")
    if max_physical_batch_size is not None and microbatches is not None:
        raise ValueError(
            f"PrivateLoader: max_physical_batch_size={max_physical_batch_size} and "
            f"microbatches={microbatches} are both given: give either the largest number of rows "
            "of a part (the number of parts is then random), or the number of parts of every batch"
        )
    if None not in (group_size, max_physical_batch_size) and max_physical_batch_size < group_size:
        raise ValueError(
            f"PrivateLoader: max_physical_batch_size={max_physical_batch_size} is below "
            f"group_size={group_size}: the gradients of a user's examples are averaged before "
            "clipping, so all of them must be in one part. Raise it, or lower group_size"
        )


def settle(
    value: object, *, integers: Sequence[str] = (), probabilities: Sequence[str] = ()
) -> None:
    """Check fields of a frozen dataclass and leave them in their canonical types.

    ``min_sep`` may be any integer from 1; ``steps`` is limited as everywhere; ``max_batch_size``
    may be ``None``.
    """
    owner = type(value).__name__
    assert dataclasses.is_dataclass(value)
    for name in probabilities:
        found = checks.probability(name, getattr(value, name), owner=owner)
        object.__setattr__(value, name, found)
    for name in integers:
        if name == "max_batch_size" and getattr(value, name) is None:
            continue
        most = checks.MOST_STEPS if name == "steps" else None
        whole = checks.integer(name, getattr(value, name), maximum=most, owner=owner)
        object.__setattr__(value, name, whole)


def check_steps(value: Any, *names: str) -> None:
    """Refuse a scheme of more steps than a run may have, where they follow from other fields."""
    if value.steps > checks.MOST_STEPS:
        said = ", ".join(f"{name}={getattr(value, name)}" for name in names)
        raise ValueError(
            f"{type(value).__name__}: {said} make {value.steps} steps, but a run has at most "
            f"{checks.MOST_STEPS}: lower them"
        )


def expected_batch_size(owner: str, value: Any, *, largest: float, why: str) -> float:
    """``value`` as a float in (0, largest]; it need not be an integer, it is an expectation.

    Raises:
        TypeError: if it is no number.
        ValueError: naming the largest possible batch size, and ``why`` that is the limit.
    """
    number = checks.number("batch_size", value, above=0, owner=owner)
    if number > largest:
        raise ValueError(
            f"{owner}: batch_size={number:.10g} is not reachable; the largest possible batch size "
            f"is {largest:.10g} ({why})"
        )
    return number


def public_size(owner: str, dataset_size: Any, nominal_size: Any = None) -> int:
    """N, or ``nominal_size``, which settings are worked out with where N is private.

    Raises:
        TypeError, ValueError: as ``integer``, for either of them.
    """
    n_examples = checks.integer("dataset_size", dataset_size, owner=owner)
    if nominal_size is None:
        return n_examples
    return checks.integer("nominal_size", nominal_size, owner=owner)


def whole_epochs(owner: str, epoch: int, *, epochs: Any, steps: Any) -> int:
    """The number of epochs of ``epoch`` steps, stated as such or by the steps of all."""
    if (epochs is None) == (steps is None):
        raise ValueError(f"{owner}: give exactly one of epochs and steps (got {epochs=}, {steps=})")
    if steps is None:
        return checks.integer("epochs", epochs, owner=owner)
    count, rest = divmod(checks.steps(steps, owner=owner), epoch)
    if rest:
        near = [epoch * each for each in (count, count + 1) if each]
        raise ValueError(
            f"{owner}: steps={steps} is not a whole number of epochs of {epoch} steps: use "
            f"{' or '.join(map(str, near))}, or another batch_size"
        )
    return count


def batch_of_dataset(
    owner: str, batch_size: Any, dataset_size: Any, nominal_size: Any = None
) -> tuple[float, int]:
    """B̄ in (0, N] and N, where nothing but the number of examples limits the batch.

    N is ``nominal_size``, if that is given.
    """
    public = public_size(owner, dataset_size, nominal_size)
    why = f"the dataset has {public} examples"
    return expected_batch_size(owner, batch_size, largest=public, why=why), public
