"""The one place where an accountant's numbers become a guarantee, and where targets are checked."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.accounting.base.accountant import Accountant, size_refusal
from dptrain.core import Guarantee, Kind, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme

SMALLEST_SIGMA = 1e-3  # below, squared losses leave double precision, and ε would be millions

SMALLEST_DELTA = 1e-300
"""The bound on δ where it vanishes in double precision.

With Gaussian noise δ is positive at every ε; what is lost to underflow is far less than this.
"""

PUBLIC_GRAPH = (
    "Which examples belong to which users is assumed to be public; the contents of the examples "
    "are protected"
)
"""Belongs to every statement about users: fixed-graph adjacency (docs/theory/users.md)."""

AVERAGED = (
    "Users participate as examples do under {}, and in every step the mean of a user's gradients "
    "is clipped once: a user has the same weight with one example as with many"
)
"""Belongs to those where a user counts once; the scheme by which users take part is put in."""

SETTINGS_ARE_PUBLIC = (
    "Added or removed is an example while every setting stays as it is (nominal size, which "
    "divides the sum, sampling probability, steps, largest batch): they must not be set from the "
    "exact number of examples, nor may that number be published"
)
"""Belongs to every statement of add-remove: what the theorems take for granted."""


def statement(
    mechanism: MatrixMechanism,
    accountant: Accountant,
    *,
    epsilon: float,
    delta: float,
    notes: tuple[str, ...] = (),
    kind: Kind | None = None,
    certificate: dict[str, Any] | None = None,
) -> Guarantee:
    """The guarantee that ``accountant`` states for the mechanism, for its scheme's unit."""
    if reason := size_refusal(accountant.adjacency, mechanism):
        raise ValueError(f"the {accountant.display} accountant states nothing: {reason}")
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=mechanism.scheme.unit,
        adjacency=accountant.adjacency,
        scheme=mechanism.scheme.published(),
        strategy=mechanism.strategy.to_dict(),
        strategy_hash=mechanism.strategy.coefficient_hash,
        noise_multiplier=mechanism.noise_multiplier,
        steps_planned=mechanism.steps,
        accountant=accountant.name,
        kind=accountant.kind_of(mechanism) if kind is None else kind,
        mechanism_hash=mechanism.hash,
        notes=(*notes, *_notes(mechanism.scheme)),
        certificate=certificate,
    )


def of_units(found: Guarantee, mechanism: MatrixMechanism) -> Guarantee:
    """The statement about the mechanism's units that follows from one about its participants.

    ``found`` is an accountant's statement about ``mechanism.participants``, at any σ.
    """
    if mechanism.participants is mechanism:
        return found
    if reason := size_refusal(found.adjacency, mechanism):
        raise ValueError(f"the {found.accountant} accountant states nothing: {reason}")
    return dataclasses.replace(
        found,
        unit=mechanism.scheme.unit,
        scheme=mechanism.scheme.published(),
        mechanism_hash=mechanism.with_noise(found.noise_multiplier).hash,
        notes=(*found.notes, *_notes(mechanism.scheme)),
    )


def _notes(scheme: Scheme) -> tuple[str, ...]:
    """The remarks that belong to every statement about the scheme's units."""
    public = (PUBLIC_GRAPH,) if scheme.unit.kind == "user" else ()
    if scheme.group_size is None:
        return public
    return (*public, AVERAGED.format(type(scheme.participants).__name__))


def without_noise(mechanism: MatrixMechanism, accountant: Accountant, delta: float) -> Guarantee:
    """The statement at σ = 0, which guarantees nothing."""
    note = "there is no noise, hence no privacy"
    return statement(mechanism, accountant, epsilon=math.inf, delta=delta, notes=(note,))


def checked_grid(epsilon: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A grid of ε as an array: not empty, ascending, not negative and finite."""
    try:
        plain = np.atleast_1d(np.asarray(epsilon))
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor with gradients
        raise TypeError(f"{checks.named('epsilon', epsilon)} must be numbers: {error}") from error
    if plain.dtype.kind not in "iuf":
        raise TypeError(f"{checks.named('epsilon', epsilon)} must be a sequence of numbers")
    grid = plain.astype(np.float64)
    if grid.ndim != 1 or grid.size == 0 or not np.isfinite(grid).all() or grid[0] < 0:
        raise ValueError("epsilon: the grid must be one-dimensional, finite and not negative")
    if (np.diff(grid) < 0).any():
        raise ValueError("epsilon: the grid must be ascending; sort it first")
    return grid


def checked_sigma(mechanism: MatrixMechanism) -> float:
    """σ, where privacy losses can be computed in double precision (0 is for the caller).

    Raises:
        ValueError: if σ is not 0 and beyond 1e-3 and 1e9, where losses over- or underflow.
    """
    sigma = mechanism.noise_multiplier
    if sigma != 0.0 and not SMALLEST_SIGMA <= sigma <= 1e9:
        raise ValueError(
            f"noise_multiplier={sigma:g}: privacy losses can be computed only for σ = 0 and from "
            f"{SMALLEST_SIGMA:g} to 1e+09; choose σ in that range (below it, nothing is protected)"
        )
    return sigma


def check_epsilon(epsilon: float, *, name: str = "epsilon") -> float:
    """A target ε as a float, if it means something.

    Args:
        epsilon: the target.
        name: of the argument.

    Raises:
        TypeError: if ε is no number.
        ValueError: if it is not positive and finite.
    """
    return checks.number(name, epsilon, above=0, remedy="8 is a common choice")


@contextmanager
def told_once() -> Iterator[None]:
    """Silence about a large δ (see ``check_delta``), of which the caller was warned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"delta=\S+ is not below", category=UserWarning)
        yield


def check_delta(
    delta: float, scheme: Scheme, *, name: str = "delta", large: Literal["warn", "refuse"] = "warn"
) -> float:
    """A target δ as a float, if it is in (0, 1).

    Args:
        delta: the target.
        scheme: who is protected.
        name: of the argument.
        large: what to do about a δ so large that it protects nobody. A question about it may be
            asked; nothing is to be trained for it.

    Raises:
        TypeError: if δ is no number.
        ValueError: if it is not in (0, 1), or too large.
    """
    users = scheme.unit.kind == "user"
    number, one = ("(number of users)", "user") if users else ("N", "example")
    delta = checks.number(
        name,
        delta,
        above=0,
        below=1,
        remedy=f"e.g. 1/(2·{scheme.population}), half of 1/{number}",
    )
    if delta >= 1.0 / scheme.population:
        count = f"{scheme.population} users" if users else f"N = {scheme.population}"
        remark = (
            f"{name}={delta:g} is not below 1/{number} = {1.0 / scheme.population:g} ({count}): "
            f"such a guarantee allows publishing everything about a random {one} outright; use "
            "half of that or less"
        )
        if large == "refuse":
            raise ValueError(remark)
        warnings.warn(remark, UserWarning, stacklevel=3)
    return delta
