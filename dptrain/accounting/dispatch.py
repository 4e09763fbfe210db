"""The guarantee of a mechanism, by the accountant that answers for it, and the noise it takes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.accounting.base.accountant import (
    Accountant,
    Availability,
    Cost,
    Profile,
    size_refusal,
)
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.base.registry import accountant_named, answering, availabilities
from dptrain.accounting.base.statement import (
    SMALLEST_DELTA,
    check_delta,
    check_epsilon,
    checked_grid,
    of_units,
    statement,
    told_once,
)
from dptrain.accounting.base.trade_off import LEAST_FLOOR, TradeOff
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.core import Adjacency, Guarantee, Kind, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy


def accountants_for(
    mechanism: MatrixMechanism, *, adjacency: Adjacency | None = None
) -> list[Availability]:
    """Every accountant for the adjacency: whether it answers for the mechanism, and if not, why."""
    checks.instance("mechanism", mechanism, MatrixMechanism)
    adjacency = mechanism.adjacency if adjacency is None else adjacency
    checks.instance("adjacency", adjacency, Adjacency, example="Adjacency.ZERO_OUT")
    return availabilities(mechanism, adjacency)


def find_accountants(
    mechanism: MatrixMechanism,
    accountant: str | Accountant | None = None,
    *,
    adjacency: Adjacency | None = None,
) -> list[Accountant]:
    """The accountant asked for (by name or itself), or those that answer by themselves.

    ``register_accountant`` states the rule by which they do. They are asked about
    ``mechanism.participants``.

    Raises:
        ValueError: if the name is unknown, the accountant is about another adjacency, or the
            mechanism is not covered; the error gives every accountant's reason.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    adjacency = mechanism.adjacency if adjacency is None else adjacency
    checks.instance("adjacency", adjacency, Adjacency, example="Adjacency.ZERO_OUT")
    if isinstance(accountant, str):
        accountant = accountant_named(accountant, adjacency)
    if accountant is not None:
        checks.instance("accountant", accountant, Accountant, example="'gaussian', its name")
        if accountant.adjacency is not adjacency:
            raise ValueError(
                f"accountant={accountant.name!r} states {accountant.adjacency.value}, but "
                f"adjacency={adjacency.value!r} was requested; leave accountant out or change the "
                "adjacency"
            )
        asked = mechanism.participants
        if reason := size_refusal(adjacency, mechanism) or accountant.obstacle(asked):
            raise ValueError(
                f"accountant={accountant.name!r} does not cover {_pair(mechanism)}: {reason}"
            )
        return [accountant]
    table = accountants_for(mechanism, adjacency=adjacency)
    found = answering(table)
    if not found:
        nobody = f"no accountant covers {_pair(mechanism)} under adjacency={adjacency.value!r}"
        if reason := size_refusal(adjacency, mechanism):
            raise ValueError(f"{nobody}: {reason}")
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in table)
        raise ValueError(
            f"{nobody}. {reasons}. accountant='gaussian' covers every pair under zero_out, without "
            "amplification; 'dptrain account --support' lists what each scheme is accounted with"
        )
    return found


def find_accountant(
    mechanism: MatrixMechanism,
    accountant: str | Accountant | None = None,
    *,
    adjacency: Adjacency | None = None,
) -> Accountant:
    """The accountant of ``find_accountants``, or the best of them in each direction."""
    found = find_accountants(mechanism, accountant, adjacency=adjacency)
    proven = [member for member in found if isinstance(member, DeterministicAccountant)]
    return BestOf.of(proven) if len(proven) > 1 else found[0]


def _pair(mechanism: MatrixMechanism) -> str:
    scheme, strategy = type(mechanism.scheme).__name__, type(mechanism.strategy).__name__
    return f"scheme {scheme} with strategy {strategy} (bands={mechanism.strategy.bands})"


def account(
    mechanism: MatrixMechanism,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    accountant: str | Accountant | None = None,
    adjacency: Adjacency | None = None,
) -> Guarantee:
    """The mechanism's guarantee: the least ε at ``delta``, or the least δ at ``epsilon``.

    Args:
        mechanism: the mechanism; σ = 0 gives ε = ∞ (or δ = 1).
        delta: δ in (0, 1); give exactly one of δ and ε.
        epsilon: ε > 0.
        accountant: an accountant or its name; by default the tightest applicable bound.
        adjacency: the neighboring relation, by default the mechanism's; most pairs only have
            theorems for zero-out.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if both or neither of δ and ε are given or they are out of range, or no
            accountant covers the mechanism.
    """
    if (delta is None) == (epsilon is None):
        raise ValueError(f"give exactly one of delta and epsilon (got {delta=}, {epsilon=})")
    checks.instance("mechanism", mechanism, MatrixMechanism)
    delta = None if delta is None else check_delta(delta, mechanism.scheme)
    epsilon = None if epsilon is None else check_epsilon(epsilon)
    member = find_accountant(mechanism, accountant, adjacency=adjacency)
    asked = mechanism.participants
    if delta is not None:
        with told_once():
            return of_units(member.guarantee(asked, delta=delta), mechanism)
    assert epsilon is not None
    found = member.profile(asked, np.array([epsilon])).delta[0]
    value = max(float(found), SMALLEST_DELTA)
    notes: tuple[str, ...] = ()
    if member.kind is Kind.CONFIDENCE:
        chance = member.failure_probability
        notes = (f"false with probability at most {chance:g} over the accountant's own simulation",)
    return of_units(statement(asked, member, epsilon=epsilon, delta=value, notes=notes), mechanism)


def profile(
    mechanism: MatrixMechanism,
    epsilon: npt.ArrayLike | None = None,
    *,
    accountant: str | Accountant | None = None,
    adjacency: Adjacency | None = None,
) -> Profile:
    """δ(ε) in both directions on a grid of ε (default: ``default_grid``).

    Raises:
        ValueError: if no accountant covers the mechanism or the grid is not ascending from ε ≥ 0.
    """
    if epsilon is not None:
        epsilon = checked_grid(epsilon)
    member = find_accountant(mechanism, accountant, adjacency=adjacency)
    if epsilon is None:
        epsilon = default_grid(mechanism)
    return profile_by(member, mechanism, epsilon)


def profile_by(member: Accountant, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
    """The accountant's profile, which says what it is about."""
    return dataclasses.replace(
        member.profile(mechanism.participants, epsilon),
        adjacency=member.adjacency,
        unit=mechanism.scheme.unit,
        mechanism_hash=mechanism.hash,
    )


def proven_within_seconds(
    mechanism: MatrixMechanism, adjacency: Adjacency, *, by_name: bool = False
) -> DeterministicAccountant | None:
    """The accountant that proves the curve within seconds, the best of several, or ``None``.

    With ``by_name``, where nobody answers unasked, those are asked too that answer by name only and
    make use of the sampling: they leave it to a simulation, which proves one (ε, δ) and no curve.
    """
    quick = [
        (each.accountant, each.reserved is None)
        for each in accountants_for(mechanism, adjacency=adjacency)
        if isinstance(each.accountant, DeterministicAccountant)
        and each.cost in (Cost.INSTANT, Cost.SECONDS)
    ]
    found = [member for member, unasked in quick if unasked]
    if by_name and not found:
        found = [member for member, _ in quick if member.name != UnsampledGaussian.name]
    return BestOf.of(found) if found else None


def default_grid(mechanism: MatrixMechanism, points: int = 101) -> npt.NDArray[np.float64]:
    """ε from 0 to where the unamplified Gaussian bound falls to 1e-12, at most 50.

    Denser near 0 (quadratic spacing), where amplified profiles change fastest.
    """
    sigma = mechanism.noise_multiplier
    top = 50.0
    if sigma > 0:
        curve = UnsampledGaussian().curve(mechanism)
        top = min(top, max(curve.epsilon(sigma, 1e-12), 1e-6))
    return top * np.linspace(0.0, 1.0, points) ** 2


def trade_off(
    mechanism: MatrixMechanism,
    guarantee: Guarantee,
    *,
    accountant: str | Accountant | None = None,
    floor: float | None = None,
    points: int = 401,
) -> TradeOff:
    """The most that attacks can reach, by a guarantee together with the profile that is proven.

    Beside a guarantee by simulation stand the deterministic accountants that answer by themselves
    within seconds, if there are any: of the simulation itself only the one (ε, δ) is certain.

    Args:
        mechanism: the mechanism.
        guarantee: what ``account`` or ``calibrate`` said of it.
        accountant: of the profile; by default those that answer.
        floor: the least error rate that μ is to speak of, by default the guarantee's δ.
        points: ε in the grid; μ is larger by about 3/points² of itself than with all of them.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the guarantee is another mechanism's, or the accountant does not cover it.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    checks.instance("guarantee", guarantee, Guarantee)
    checks.integer("points", points, minimum=2)
    if floor is not None:
        floor = checks.number("floor", floor, minimum=LEAST_FLOOR, below=0.5)
    if guarantee.mechanism_hash != mechanism.hash:
        raise ValueError(
            f"guarantee: it describes the mechanism {guarantee.mechanism_hash}, not "
            f"{mechanism.hash}; take account(mechanism, ...)"
        )
    member: Accountant | None = None
    if accountant is not None:
        member = find_accountant(mechanism, accountant, adjacency=guarantee.adjacency)
    else:
        member = proven_within_seconds(mechanism, guarantee.adjacency)
    if not isinstance(member, DeterministicAccountant):
        return TradeOff.of(guarantee, floor=floor)
    # Beyond e^ε + 1 of its own ε no bound cuts off rates above its δ
    # (docs/theory/composition.md#thm-trade-off).
    least = guarantee.delta if floor is None else min(floor, guarantee.delta)
    top = guarantee.epsilon
    if least < guarantee.delta or not math.isfinite(top):
        with told_once():
            top = member.guarantee(mechanism.participants, delta=least).epsilon
    if not math.isfinite(top):
        return TradeOff.of(guarantee, floor=floor)
    grid = float(np.logaddexp(top, 0.0)) * np.linspace(0.0, 1.0, points) ** 2
    return TradeOff.of(guarantee, profile_by(member, mechanism, grid), floor=floor)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A mechanism whose σ was chosen for a target, and the guarantee that it has.

    Attributes:
        mechanism: scheme, strategy and the calibrated σ.
        guarantee: what was shown; its ε is at most the target's.
    """

    mechanism: MatrixMechanism
    guarantee: Guarantee


def calibrate(
    *,
    scheme: Scheme,
    strategy: Strategy,
    epsilon: float,
    delta: float,
    accountant: str | Accountant | None = None,
    adjacency: Adjacency | None = None,
    attempts: int = 1,
    **options: Any,
) -> Calibration:
    """The least σ for which an accountant shows (ε, δ).

    Deterministic accountants bisect σ to a relative 1e-4, rounded up, on the best of their bounds.

    Args:
        scheme: how examples take part.
        strategy: how noise is correlated.
        epsilon: target ε > 0.
        delta: target δ in (0, 1), below 1 over the number of protected units.
        accountant: an accountant or its name; by default the automatic one.
        adjacency: the neighboring relation, by default the mechanism's; most pairs only have
            theorems for zero-out.
        attempts: how many calibrations, this one included, there are to pick one from by what they
            say: δ includes the chance that a simulation is wrong in any of them.
        options: passed on to the accountant's ``calibrate``.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the target is out of range or out of reach, or no accountant covers the pair.

    Warns:
        UserWarning: if δ is not below that.
    """
    epsilon = check_epsilon(epsilon)
    checks.instance("scheme", scheme, Scheme, example="Poisson.for_batch_size(...)")
    delta = check_delta(delta, scheme)
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    attempts = checks.integer("attempts", attempts)
    member = find_accountant(mechanism, accountant, adjacency=adjacency)
    if attempts > 1:
        member = member.among(attempts)
    with told_once():
        best = member.calibrate(mechanism.participants, epsilon=epsilon, delta=delta, **options)
    found = of_units(best, mechanism)
    return Calibration(mechanism.with_noise(found.noise_multiplier), found)
