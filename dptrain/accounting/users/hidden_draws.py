"""User-level sampling in which nobody's draws show in what others do: coins that stay hidden."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.stats import binom

from dptrain.accounting.base.accountant import Cost, truncation_refusal, varying_noise
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.poisson.curves import GRID_NOTE
from dptrain.accounting.poisson.groups import BinomialMixtureCurve, Tosses
from dptrain.core import Array, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserCyclic, UserMinSep

_MOST_EXAMPLES = 1000
# Binomial tails are computed to a relative 1e-12 (``poisson/truncated_step.py``).
_TAIL_ROUNDING = 1e-11


@dataclasses.dataclass(frozen=True)
class WorstOf(Curve):
    """The largest of several curves: users of different kinds, and everybody is one of them."""

    curves: tuple[BinomialMixtureCurve, ...]

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """The larger δ of each direction."""
        found = np.array([curve.delta(sigma, epsilon) for curve in self.curves])
        return found[:, 0].max(axis=0), found[:, 1].max(axis=0)

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """The larger ε of each direction."""
        remove, add = np.array([curve.epsilons(sigma, delta) for curve in self.curves]).max(axis=0)
        return float(remove), float(add)

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε of both directions."""
        return max(self.epsilons(sigma, delta))

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks on what was rounded."""
        return (GRID_NOTE,)


class UserPoissonPLD(DeterministicAccountant):
    """Steps of Bin(k, p) of a user's examples, where others' coins say nothing about the user's.

    ``UserMinSep`` with ``min_sep=1``: nobody is ever left out then, under either rule, on any
    graph: it is Poisson sampling of examples, and all coins of others can be published without a
    word about the user's. A step is dominated by c·Bin(k, p) + σz against σz in both directions,
    and users with fewer examples by the same pair (docs/theory/users.md#thm-users-poisson;
    ``test_users_of_independent_coins_by_quadrature``; Choquette-Choo et al. 2024, Appendix F.5,
    arXiv 2310.15526). Equal gradients of the k examples attain it.

    ``UserCyclic``: slots follow from the public graph; with at most ``min_sep`` bands the columns
    of C at a user's ceil(n/b) steps in each of their slots share no row, and the steps compose:
    c·Bin(k_s, q_s) + σz against σz with c the largest column norm. The guarantee is that of the
    worst user (docs/theory/users.md#thm-users-cyclic;
    ``test_no_user_of_any_small_graph_loses_more_than_is_claimed``). Where batches are cut to B
    examples, a public coin says whether *others* drew so many in the step that the user's draws
    could displace one; if so, the user's draws of that step count as published
    (docs/theory/users.md#thm-users-cyclic-cut;
    ``test_cut_batches_of_users_cost_no_more_than_is_claimed``).
    """

    name = "user-poisson-pld"
    display = "user-level Poisson PLD"
    formerly = ("user-cyclic-pld",)
    kind = Kind.EXACT
    truncation = True

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, and bands beyond the steps between two slots of a user."""
        scheme, bands = mechanism.scheme, mechanism.strategy.bands
        if isinstance(scheme, UserCyclic):
            if bands > scheme.min_sep:
                return (
                    f"it needs bands <= {scheme.min_sep}, the steps between two slots of a user "
                    f"(cycle={scheme.cycle}, spread={scheme.partition.spread}); the strategy has "
                    f"bands={bands}; use fewer bands, a larger cycle or a smaller spread"
                )
            return _too_many(scheme.max_per_batch)
        if not isinstance(scheme, UserMinSep) or scheme.min_sep != 1:
            return "it needs UserCyclic sampling, or UserMinSep with min_sep=1"
        if bands != 1:
            return f"it needs independent noise (bands=1), but the strategy has bands={bands}"
        return truncation_refusal(scheme) or _too_many(scheme.graph.max_examples)

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """Exact for ``UserMinSep`` where all steps have the same noise."""
        exact = isinstance(mechanism.scheme, UserMinSep) and varying_noise(mechanism) is None
        return Kind.EXACT if exact else Kind.UPPER_BOUND

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """A composition for every kind of user."""
        return Cost.SECONDS if isinstance(mechanism.scheme, UserCyclic) else Cost.INSTANT

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curves of the kinds of users that there are."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep | UserCyclic)
        norm = float(mechanism.strategy.column_norms(scheme.steps).max())
        if isinstance(scheme, UserMinSep):
            tosses = Tosses(scheme.graph.max_examples, scheme.probability, scheme.steps)
            return WorstOf((BinomialMixtureCurve((tosses,), norm),))
        return WorstOf(
            tuple(
                BinomialMixtureCurve(_slots(scheme, least, counts), norm)
                for least, *counts in scheme.partition.profiles
            )
        )


def _slots(scheme: UserCyclic, least: int, counts: list[int]) -> tuple[Tosses, ...]:
    """The steps of users with so many examples in each of their slots, of ``least`` or more.

    The i-th slot of a user has its first turn after i separations or later, and the one with most
    examples costs most where it comes first.
    """
    turns: dict[int, int] = {}
    for place, count in enumerate(sorted(counts, reverse=True)):
        left = scheme.steps - place * scheme.min_sep
        turns[count] = turns.get(count, 0) + max(0, -(-left // scheme.cycle))
    return tuple(
        Tosses(count, scheme.probability(least), times, published=_crowded(scheme, count))
        for count, times in turns.items()
        if times
    )


def _crowded(scheme: UserCyclic, count: int) -> float:
    """The largest chance, over slots, that others leave less room than ``count`` in a batch."""
    largest = scheme.max_batch_size
    if largest is None:
        return 0.0
    if largest < count:
        return 1.0
    sizes = np.array([size for size in scheme.partition.sizes if size > largest])
    if not len(sizes):
        return 0.0
    chances = np.array([scheme.probability(int(size)) for size in sizes])
    full = float(binom.sf(largest - count, sizes - count, chances).max())
    return min(1.0, full * (1.0 + _TAIL_ROUNDING) + 1e-300)


def _too_many(examples: int) -> str | None:
    if examples <= _MOST_EXAMPLES:
        return None
    return (
        f"it covers at most {_MOST_EXAMPLES} examples of a user per step, but one user has "
        f"{examples}; bound the attribution graph first"
    )
