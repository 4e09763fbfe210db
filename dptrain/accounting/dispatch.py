"""Which accountant answers for which mechanism."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dptrain.accounting.accountant import Accountant, Availability, Profile
from dptrain.accounting.balls_in_bins import BallsInBinsRenyi
from dptrain.accounting.cyclic_poisson import CyclicPoissonPLD
from dptrain.accounting.deterministic import DeterministicAccountant
from dptrain.accounting.min_sep import MinSepMonteCarlo
from dptrain.accounting.monte_carlo import MonteCarloAccountant
from dptrain.accounting.poisson_pld import PoissonPLD
from dptrain.accounting.random_allocation import RandomAllocationRenyi
from dptrain.accounting.statement import check_delta, check_epsilon, statement
from dptrain.accounting.truncated_poisson import TruncatedPoissonPLD
from dptrain.accounting.unsampled_gaussian import UnsampledGaussian
from dptrain.accounting.user_revealed import RevealedDraws, RevealedDrawsAnyBlocking
from dptrain.guarantee import Adjacency, Guarantee
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.cyclic_poisson import CyclicPoisson

# All accountants, in the order in which they are asked. Which of those that cover a mechanism are
# chosen automatically is theirs to say (``Accountant.reserved``).
ACCOUNTANTS: list[Accountant] = [
    PoissonPLD(),
    TruncatedPoissonPLD(),
    CyclicPoissonPLD(),
    BallsInBinsRenyi(),
    RandomAllocationRenyi(),
    RevealedDraws(),
    RevealedDrawsAnyBlocking(),
    UnsampledGaussian(),
    MinSepMonteCarlo(),
]

SUPPORTED = (
    "Poisson with independent noise, the same at every step (bands=1)",
    "TruncatedPoisson with independent noise, the same at every step (bands=1)",
    "CyclicPoisson without max_batch_size, bands <= cycle",
    "BallsInBins with any strategy",
    "RandomAllocation with participations=1 and independent noise, the same at every step",
    "MinSep with a banded Toeplitz strategy, bands <= min_sep (by simulation)",
    "UserMinSep, UserFixed and Shuffled with any strategy (UserMinSep gains from bands <= min_sep)",
    "any pair with accountant='gaussian', without amplification by sampling",
)

# Schemes that nothing but the Gaussian bound covers yet, for some or all of their parameters.
_NOT_YET = ("TruncatedPoisson", "TruncatedMinSep", "RandomAllocation")


def accountants_for(
    mechanism: MatrixMechanism, *, adjacency: Adjacency = Adjacency.ZERO_OUT
) -> list[Availability]:
    """Every accountant for the adjacency: whether it answers for the mechanism, and if not, why."""
    members = [member for member in ACCOUNTANTS if member.adjacency is adjacency]
    return [Availability.of(member, mechanism) for member in members]


def find_accountants(
    mechanism: MatrixMechanism,
    accountant: str | Accountant | None = None,
    *,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> list[Accountant]:
    """The accountant asked for (by name or itself), or the automatic ones that cover the mechanism.

    Deterministic accountants take precedence: what they prove needs no simulation.

    Raises:
        ValueError: if the name is unknown, the accountant is about another adjacency, or the
            mechanism is not covered; the error gives every accountant's reason and lists what is
            supported.
    """
    if isinstance(accountant, str):
        named = {member.name: member for member in ACCOUNTANTS}
        if accountant not in named:
            raise ValueError(f"accountant={accountant!r} is unknown; known: {sorted(named)}")
        accountant = named[accountant]
    if accountant is not None:
        if accountant.adjacency is not adjacency:
            raise ValueError(
                f"accountant={accountant.name!r} states {accountant.adjacency.value}, asked for is "
                f"adjacency={adjacency.value!r}; leave accountant out or change the adjacency"
            )
        if reason := accountant.refusal(mechanism):
            raise ValueError(
                f"accountant={accountant.name!r} does not cover {_pair(mechanism)}: {reason}"
            )
        return [accountant]
    table = accountants_for(mechanism, adjacency=adjacency)
    found = [each.accountant for each in table if each.reason is None]
    if not found:
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in table)
        raise ValueError(
            f"no accountant covers {_pair(mechanism)} under adjacency={adjacency.value!r}. "
            f"{_not_yet(mechanism)}{reasons}. Supported: {'; '.join(SUPPORTED)}"
        )
    proven: list[Accountant] = [a for a in found if isinstance(a, DeterministicAccountant)]
    return proven or found[:1]


def _not_yet(mechanism: MatrixMechanism) -> str:
    scheme = mechanism.scheme
    truncated = isinstance(scheme, CyclicPoisson) and scheme.max_batch_size is not None
    if not truncated and type(scheme).__name__ not in _NOT_YET:
        return ""
    how = "truncated CyclicPoisson" if truncated else type(scheme).__name__
    return (
        f"There is no accountant yet that uses this sampling of {how}; accountant='gaussian' is "
        "valid for it, without amplification. "
    )


def _pair(mechanism: MatrixMechanism) -> str:
    scheme, strategy = type(mechanism.scheme).__name__, type(mechanism.strategy).__name__
    return f"scheme {scheme} with strategy {strategy} (bands={mechanism.strategy.bands})"


def account(
    mechanism: MatrixMechanism,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    accountant: str | Accountant | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> Guarantee:
    """What the mechanism guarantees: the least ε at ``delta``, or the least δ at ``epsilon``.

    Args:
        mechanism: the mechanism; σ = 0 gives ε = ∞ (or δ = 1).
        delta: δ in (0, 1); give exactly one of δ and ε.
        epsilon: ε > 0.
        accountant: an accountant or its name; by default the tightest applicable bound.
        adjacency: the neighbouring relation; most pairs only have theorems for zero-out.

    Raises:
        ValueError: if both or neither of δ and ε are given or they are out of range, or no
            accountant covers the mechanism.
    """
    if (delta is None) == (epsilon is None):
        raise ValueError(f"give exactly one of delta and epsilon (got {delta=}, {epsilon=})")
    members = find_accountants(mechanism, accountant, adjacency=adjacency)
    if delta is not None:
        check_delta(delta, mechanism.scheme)
        found = [member.guarantee(mechanism, delta=delta) for member in members]
        return min(found, key=lambda guarantee: guarantee.epsilon)
    assert epsilon is not None
    check_epsilon(epsilon)
    grid = np.array([epsilon])
    values = [float(member.profile(mechanism, grid).delta[0]) for member in members]
    least = int(np.argmin(values))
    best = members[least]
    notes: tuple[str, ...] = ()
    if isinstance(best, MonteCarloAccountant):
        chance = best.failure_probability
        notes = (f"false with probability at most {chance:g} over the accountant's own simulation",)
    return statement(mechanism, best, epsilon=epsilon, delta=values[least], notes=notes)


def profile(
    mechanism: MatrixMechanism,
    epsilon: npt.ArrayLike | None = None,
    *,
    accountant: str | Accountant | None = None,
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> Profile:
    """δ(ε) in both directions on a grid of ε (default: :func:`default_grid`).

    Raises:
        ValueError: if no accountant covers the mechanism or the grid is not ascending from ε ≥ 0.
    """
    members = find_accountants(mechanism, accountant, adjacency=adjacency)
    if epsilon is None:
        epsilon = default_grid(mechanism)
    profiles = [member.profile(mechanism, epsilon) for member in members]
    return min(profiles, key=lambda found: float(np.log(found.delta + 1e-300).sum()))


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
