"""A guarantee once more: the mechanism that it tells, asked of the accountant that it names."""

from __future__ import annotations

import math

import numpy as np

from dptrain.accounting.base.accountant import Accountant, Cost, Profile
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.base.registry import accountant_named
from dptrain.accounting.base.statement import of_units, told_once
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.dispatch import (
    accountants_for,
    default_grid,
    profile_by,
    proven_within_seconds,
)
from dptrain.core import Adjacency, Guarantee, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy

_BEST_OF = "best of "
_POINTS = 161  # of a curve; the rates that follow are those of 4,001 to 2 % of themselves


def mechanism_of(guarantee: Guarantee) -> MatrixMechanism:
    """The mechanism that a guarantee is about, from the scheme, strategy and σ that it tells.

    Where the number of examples is private, the nominal size stands for it here too: no
    statement depends on the number itself (``AnySizeScheme``).

    Raises:
        TypeError: if it is no guarantee.
        ValueError: if scheme or strategy cannot be read, or their hash is not the guarantee's.
    """
    checks.instance("guarantee", guarantee, Guarantee)
    scheme = dict(guarantee.scheme)
    if "dataset_size" not in scheme and scheme.get("nominal_size") is not None:
        scheme["dataset_size"] = scheme["nominal_size"]
    try:
        found = MatrixMechanism(
            scheme=Scheme.from_dict(scheme),
            strategy=Strategy.from_dict(guarantee.strategy),
            noise_multiplier=guarantee.noise_multiplier,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"its mechanism cannot be rebuilt: {error}") from error
    if found.hash != guarantee.mechanism_hash:
        raise ValueError(
            f"its mechanism_hash {guarantee.mechanism_hash} does not match its scheme, strategy "
            f"and noise_multiplier={guarantee.noise_multiplier:g}, which give {found.hash}: one of "
            "them was changed"
        )
    return found


def stated_accountant(name: str, adjacency: Adjacency) -> Accountant:
    """The accountant of the name that a statement or profile gives.

    Raises:
        ValueError: if there is none, or it has no theorems for the adjacency.
    """
    names = name.removeprefix(_BEST_OF).split(", ") if name.startswith(_BEST_OF) else [name]
    members = [accountant_named(each, adjacency) for each in names]
    if len(members) == 1:
        return members[0]
    proven = [each for each in members if isinstance(each, DeterministicAccountant)]
    if len(proven) < len(members):
        raise ValueError(f"accountant={name!r}: of those that simulate there is no best")
    return BestOf.of(proven)


def profile_of(guarantee: Guarantee) -> Profile:
    """δ(ε) of what a guarantee is about, as far as that is proven within seconds.

    It follows from the mechanism that the guarantee tells (``mechanism_of``), on a grid up to twice
    its ε: by the deterministic accountants that answer for it, or else by those that leave the
    answer to a simulation, or by the one that the guarantee names.

    Raises:
        TypeError: if it is no guarantee.
        ValueError: saying why there is no such curve, and how one is had.

    Example:
        >>> from dptrain.accounting import TradeOff, account, profile_of
        >>> from dptrain.mechanism import MatrixMechanism
        >>> from dptrain.sampling import Poisson
        >>> from dptrain.strategies import Identity
        >>> scheme = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=50)
        >>> run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
        >>> stated = account(run, delta=1e-5)
        >>> alone, together = TradeOff.of(stated), TradeOff.of(stated, profile_of(stated))
        >>> bool(together.true_positive_rate(0.01) < alone.true_positive_rate(0.01))
        True
    """
    checks.instance("guarantee", guarantee, Guarantee)
    if not math.isfinite(guarantee.epsilon) or guarantee.delta >= 1:
        raise ValueError("nothing is promised, at any ε")
    if guarantee.accountant.startswith("individual "):
        raise ValueError(
            "the budget of an individual filter does not follow from the mechanism; its curve is "
            "profile=filter_profile(private.stated_individual, guarantee), of dptrain.individual"
        )
    mechanism = mechanism_of(guarantee)
    quick = proven_within_seconds(mechanism, guarantee.adjacency, by_name=True)
    member: Accountant = quick or _stated(guarantee, mechanism)
    grid = guarantee.epsilon * np.linspace(0, 2, _POINTS)  # its own ε is one of them, to the bit
    if guarantee.epsilon == 0.0:
        grid = default_grid(mechanism)
    with told_once():
        return profile_by(member, mechanism, grid)


def _stated(guarantee: Guarantee, mechanism: MatrixMechanism) -> Accountant:
    """The accountant that the guarantee names, if it proves a curve within seconds."""
    quick = (Cost.INSTANT, Cost.SECONDS)
    member = stated_accountant(guarantee.accountant, guarantee.adjacency)
    if isinstance(member, DeterministicAccountant) and member.cost(mechanism.participants) in quick:
        return member
    slow = [
        each
        for each in accountants_for(mechanism, adjacency=guarantee.adjacency)
        if isinstance(each.accountant, DeterministicAccountant)
        and each.cost is not None
        and each.cost not in quick
    ]
    if not slow:
        raise ValueError(
            "no accountant proves the whole curve of this mechanism; of a simulation only the one "
            "(ε, δ) is certain"
        )
    first = slow[0]
    assert first.cost is not None
    raise ValueError(
        f"its whole curve takes {first.cost.value} to prove, and is had by "
        f"profile=dptrain.profile(mechanism, accountant={first.name!r})"
    )


def restate(guarantee: Guarantee) -> Guarantee:
    """The statement that the accountant named by a guarantee makes now of its mechanism.

    Nothing of the answer is taken from the guarantee but the mechanism, δ (or ε), the relation,
    and the seed of a simulation: whoever holds the guarantee need not trust who wrote it, only
    this package. That the mechanism is the one that ran it cannot show.

    Args:
        guarantee: of a mechanism. One that a filter of individual budgets bounds during
            training is none: it does not follow from the mechanism.

    Returns:
        The accountant's own statement, to be compared: whether the guarantee claims more is the
        caller's question.

    Raises:
        TypeError: if it is no guarantee.
        ValueError: if the mechanism cannot be built again, or the accountant is unknown or
            refuses it, or a certificate does not hold.

    Example:
        >>> from dptrain.accounting import account, restate
        >>> from dptrain.mechanism import MatrixMechanism
        >>> from dptrain.sampling import Poisson
        >>> from dptrain.strategies import Identity
        >>> scheme = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=50)
        >>> run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
        >>> stated = account(run, delta=1e-5)
        >>> restate(stated) == stated
        True
    """
    mechanism = mechanism_of(guarantee)
    member = stated_accountant(guarantee.accountant, guarantee.adjacency)
    with told_once():
        return of_units(member.restate(mechanism.participants, guarantee), mechanism)
