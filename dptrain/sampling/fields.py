"""Checks of the fields of a scheme: each returns the value in its one canonical type."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any


def integer(owner: str, name: str, value: Any, *, minimum: int = 1) -> int:
    """``value`` as a Python int.

    Raises:
        ValueError: if it is a bool, not an integer, or below ``minimum``.
    """
    # bool is an int to Python; steps=True is a mistake, and its JSON would not equal that of 1.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(
            f"{owner}: {name}={value!r} must be an integer, not {type(value).__name__}"
        )
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{owner}: {name}={number} must be at least {minimum}")
    return number


def optional_integer(owner: str, name: str, value: Any) -> int | None:
    """``None``, or ``value`` as :func:`integer` takes it."""
    return None if value is None else integer(owner, name, value)


def check_microbatches(max_physical_batch_size: Any, microbatches: Any) -> None:
    """Refuse sizes and numbers of microbatches that are none, and both at once.

    Raises:
        ValueError: naming the argument and the value.
    """
    optional_integer("PrivateLoader", "max_physical_batch_size", max_physical_batch_size)
    optional_integer("PrivateLoader", "microbatches", microbatches)
    if max_physical_batch_size is not None and microbatches is not None:
        raise ValueError(
            f"PrivateLoader: max_physical_batch_size={max_physical_batch_size} with microbatches="
            f"{microbatches}: give the most rows of a part, of which there is then a random "
            "number, or how many parts every batch comes in"
        )


def _real(owner: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{owner}: {name}={value!r} must be a number, not {type(value).__name__}")
    return float(value)


def probability(owner: str, name: str, value: Any) -> float:
    """``value`` as a float in (0, 1].

    Raises:
        ValueError: if it is no number or outside (0, 1].
    """
    number = _real(owner, name, value)
    if not 0.0 < number <= 1.0:
        raise ValueError(f"{owner}: {name}={number} must be a probability in (0, 1]")
    return number


def settle(
    value: object, *, integers: Sequence[str] = (), probabilities: Sequence[str] = ()
) -> None:
    """Check fields of a frozen dataclass and leave them in their canonical types.

    Raises:
        ValueError: as :func:`integer` and :func:`probability`, naming the class and the field.
    """
    owner = type(value).__name__
    for name in probabilities:
        object.__setattr__(value, name, probability(owner, name, getattr(value, name)))
    for name in integers:
        object.__setattr__(value, name, integer(owner, name, getattr(value, name)))


def flag(owner: str, name: str, value: Any) -> bool:
    """``value`` if it is a bool.

    Raises:
        ValueError: if it is anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {name}={value!r} must be True or False")
    return value


def expected_batch_size(owner: str, value: Any, *, largest: float, why: str) -> float:
    """``value`` as a float in (0, largest]; it need not be an integer, it is an expectation.

    Raises:
        ValueError: naming the largest possible batch size, and ``why`` that is the limit.
    """
    number = _real(owner, "batch_size", value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{owner}: batch_size={number} must be positive and finite")
    if number > largest:
        raise ValueError(
            f"{owner}: batch_size={number:.10g} is not reachable; the largest possible batch size "
            f"is {largest:.10g} ({why})"
        )
    return number


def public_size(owner: str, dataset_size: Any, nominal_size: Any = None) -> int:
    """N, or ``nominal_size``, which settings are worked out with where N is private.

    Raises:
        ValueError: as :func:`integer`, for either of them.
    """
    n_examples = integer(owner, "dataset_size", dataset_size)
    return n_examples if nominal_size is None else integer(owner, "nominal_size", nominal_size)


def whole_epochs(owner: str, epoch: int, *, epochs: Any, steps: Any) -> int:
    """The number of epochs of ``epoch`` steps, stated as such or by the steps of all.

    Raises:
        ValueError: unless exactly one is given, a positive integer, and steps are whole epochs.
    """
    if (epochs is None) == (steps is None):
        raise ValueError(f"{owner}: give exactly one of epochs and steps (got {epochs=}, {steps=})")
    if steps is None:
        return integer(owner, "epochs", epochs)
    count, rest = divmod(integer(owner, "steps", steps), epoch)
    if rest:
        near = [epoch * each for each in (count, count + 1) if each]
        raise ValueError(
            f"{owner}: steps={steps} are no whole epochs of {epoch} steps; use "
            f"{' or '.join(map(str, near))}, or another batch_size"
        )
    return count


def batch_of_dataset(
    owner: str, batch_size: Any, dataset_size: Any, nominal_size: Any = None
) -> tuple[float, int]:
    """B̄ in (0, N] and N, where nothing but the number of examples limits the batch.

    N is ``nominal_size``, if that is given.

    Raises:
        ValueError: as :func:`public_size` and :func:`expected_batch_size`.
    """
    public = public_size(owner, dataset_size, nominal_size)
    why = f"the dataset has {public} examples"
    return expected_batch_size(owner, batch_size, largest=public, why=why), public
