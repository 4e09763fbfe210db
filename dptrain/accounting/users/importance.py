"""Certified noise of user-level sampling by weighted samples, below what revealed draws prove.

Coins are i.i.d. Bern(p). Batch t is the examples whose coin comes up at t, without those that have
a neighbor (an example that shares a user with it, or itself) whose coin came up at one of the b-1
steps before. A user has k' examples, all neighbors of each other, and d outside neighbors. Step t
is *exposed* if a coin of an outside neighbor comes up at a released step in {t+1..t+b-1}: only then
can a draw of the user at t show in others' batches.

δ(ε) ≤ max over users of E[δ(C x + σ z ‖ σ z given the exposed steps and the counts r_t at them)] in
both directions, where r_t ~ Bin(k', p), x_t = r_t unless r_j > 0 at one of the b-1 steps before,
and the exposed steps come from independent coins of chance 1-(1-p)^d. The bound does not fall if d
is raised (docs/theory/users.md#thm-users-exposed;
``test_no_user_loses_more_than_is_claimed_in_three_steps``).

The number k' has no such order, an example more also bars more: the loss is the largest over the
numbers that occur. Different examples of a user are not told apart (an example's draws are
published if a neighbor of *another* of the user's examples comes up): looser, but the law then
depends on d alone, however their neighbors overlap.

It fails under ``exclusion="participation"``: a participation leaves another example out, which then
does not leave out a third, and so on, so that a draw shows arbitrarily far away. That rule is
refused where examples have several users.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.law import SimulatedLaw, TermsAtEpsilon
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.accounting.users.importance_terms import TiltedUser
from dptrain.accounting.users.law import MOST_EXAMPLES, UserLaw, band_columns
from dptrain.accounting.users.neighbors import neighbor_facts, paths_to_neighbors
from dptrain.accounting.users.revealed import RevealedDraws
from dptrain.accounting.users.user_losses import UserLosses
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep

# Numbers in the table of C's columns.
_MOST_ENTRIES = 1 << 24
# Messages of the draws, for each number of examples: steps times separation.
_MOST_BYTES = 1 << 30
# Nanoseconds of a core for a step of a sample: for itself, for each number of examples that occurs,
# and for each band (measured at 100 to 1,000 steps, 2 to 128 bands, 1 to 8 numbers).
_STEP, _NUMBER, _BAND = 30.0, 60.0, 1.0
# What the samples of one look may take; all looks of a calibration take about twice that.
_MOST_NANOSECONDS = 6e10
# So many samples are worth starting for: M up to about 200 δ.
_FEWEST = 20_000
# Share of exposed steps from which on hidden draws gain less than a per cent: at .77 σ was 9 % less
# than with revealed draws, at .98 not at all (arXiv's graph, k = 2, δ = 2e-6).
_MOST_EXPOSED = 0.9
_MOST_PATHS = 4 * 10**8  # about half a minute


class _SimulatedUser(SimulatedLaw):
    def __init__(self, law: UserLaw, proven: BestOf, mechanism: MatrixMechanism) -> None:
        self._law, self._proven, self._mechanism = law, proven, mechanism

    @property
    def losses(self) -> UserLosses:
        return UserLosses(self._law)

    @functools.cached_property
    def curve(self) -> Curve:
        return self._proven.curve(self._mechanism)

    @property
    def most_samples(self) -> int:
        return affordable(self._law)

    def to_dict(self) -> dict[str, Any]:
        return {"law": "user chain", **self._law.to_dict()}

    def least_sigma(self, epsilon: float, delta: float, *, progress: bool) -> float | None:
        """The least σ, to the precision of the deterministic calibration that it replaces."""
        found = self._proven.calibrate(self._mechanism, epsilon=epsilon, delta=delta)
        return found.noise_multiplier

    def terms(self, sigma: float) -> TermsAtEpsilon:
        return TiltedUser(self._law, sigma).both


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserMinSepImportance(SimulatedAccountant):
    """Certification of ``UserMinSep`` by the terms of ``TiltedUser``, bands ≤ b, any C.

    On a graph whose examples share users it is amplified by the draws that nobody else can show,
    under exclusion by sampling (docs/theory/users.md#thm-users-exposed,
    docs/theory/users.md#thm-users-weighted). It gains where few steps are exposed, that is where
    1-(1-p)^{d(b-1)} is well below 1; at 1 it is what ``RevealedDraws`` says without any simulation.
    d is the largest number of examples that share a user with some user's examples and are not that
    user's (``outside_neighbors``), a fact of the public graph;
    ``AttributionGraph.bound(max_neighbors=…)`` bounds it.

    On a *disjoint* graph, where every example has one user, the user's own chain, burn-in included,
    is the dominating pair, whatever the gradients and by both rules of exclusion
    (docs/theory/users.md#thm-users-disjoint; ``test_a_disjoint_graph_costs_what_is_attained``):
    exact for a user of k' examples but for the certificate's margin. Under ``"sampling"`` a zeroed
    draw bars as well; the recursion of Theorem 6.1 of Dong & Ganesh 2026 (arXiv 2602.09338), in
    which it does not, is an upper bound
    (``test_participation_bars_less_than_sampling_coordinate_by_coordinate``). That a graph is
    disjoint is read off its public facts, edges = examples, which are part of the scheme's hash and
    checked when edges are attached.

    The top of the grid is what follows if all draws of the user are revealed
    (docs/theory/users.md#thm-users-revealed, docs/theory/users.md#thm-users-blocking), or if no use
    is made of them, whichever is less: so no statement is above what would be stated without
    samples. Samples are limited to what a core draws in a minute, and a calibration to about two.
    """

    max_samples: int = 2 * 10**6  # fewer where a sample has many steps

    name = "user-min-sep-importance"
    display = "user b-min-sep importance sampling"
    formerly = ("exposed-steps-importance", "user-min-sep-monte-carlo", "exposed-steps")
    refines = True
    ample = 200_000

    def user_law(self, mechanism: MatrixMechanism) -> UserLaw:
        """The pair that dominates every user of a mechanism that is not refused.

        Where examples have several users, the chain from an empty past, exposed by the largest d.
        """
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        graph = scheme.graph
        counts, most = tuple(range(1, graph.max_examples + 1)), 0
        if graph.attached:
            facts = neighbor_facts(graph)
            counts, most = facts.examples, facts.neighbors
        return UserLaw(
            columns=band_columns(mechanism.strategy, scheme.steps),
            examples=counts,
            probability=scheme.probability,
            min_sep=scheme.min_sep,
            exclusion=scheme.exclusion,
            neighbors=most,
            burn_in=scheme.burn_in if graph.is_disjoint else 0,
        )

    def proven(self, scheme: UserMinSep) -> BestOf:
        """The deterministic accountants that would answer instead."""
        return BestOf.of([RevealedDraws(), *([UnsampledGaussian()] if scheme.unamplified else [])])

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, long bands, many examples a user, and large tables.

        On a graph that is not disjoint also exclusion by participation, and edges that are not
        here.
        """
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if not isinstance(scheme, UserMinSep):
            return "it needs UserMinSep sampling"
        if not scheme.graph.is_disjoint:
            if scheme.exclusion != "sampling":
                return (
                    "it needs exclusion='sampling' where examples have several users: "
                    "participations show arbitrarily far otherwise"
                )
            if not scheme.graph.attached:
                return (
                    "it counts neighbors in the edges of the graph, which are not loaded; "
                    "attach() them"
                )
        if strategy.bands > scheme.min_sep:
            return (
                f"it needs bands <= min_sep, but the strategy has bands={strategy.bands} and the "
                f"scheme min_sep={scheme.min_sep}; use fewer bands or a larger min_sep"
            )
        if strategy.rows(scheme.steps) != scheme.steps:
            return "it needs a square strategy matrix"
        if scheme.graph.max_examples > MOST_EXAMPLES:
            return (
                f"it covers at most {MOST_EXAMPLES} examples per user, but one has "
                f"{scheme.graph.max_examples}; bound the attribution graph first"
            )
        if scheme.steps * min(strategy.bands, scheme.steps) > _MOST_ENTRIES:
            return f"its table of C would hold more than {_MOST_ENTRIES} numbers; use fewer bands"
        if reason := self.proven(scheme).members[0].refusal(mechanism):
            return reason
        numbers = scheme.graph.max_examples  # no more of them occur
        size = 8 * scheme.steps * scheme.min_sep * numbers
        if size > _MOST_BYTES:
            return (
                f"its tables of {scheme.steps} steps and min_sep={scheme.min_sep} for {numbers} "
                f"numbers of examples take {size / 2**30:.3g} GiB, more than "
                f"{_MOST_BYTES / 2**30:.3g}; use a smaller min_sep, or bound the graph"
            )
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where samples would gain little, or take long.

        It reads the public graph, the scheme and the number of bands, and nothing else.
        """
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        by_name = f"request it by name (accountant={self.name!r})"
        if scheme.min_sep == 1 and mechanism.strategy.bands == 1:
            return f"with min_sep=1 the loss is known without samples; {by_name}"
        if scheme.graph.attached and (paths := paths_to_neighbors(scheme.graph)) > _MOST_PATHS:
            return f"counting neighbors would follow {paths:.1g} paths in the graph; {by_name}"
        law = self.user_law(mechanism)
        if (share := law.exposed_share) > _MOST_EXPOSED:
            return f"{share:.0%} of the steps are exposed, so amplification is small; {by_name}"
        if affordable(law) < _FEWEST:
            return (
                f"samples of {law.steps} steps are too slow to draw enough of them in a minute; "
                f"{by_name}"
            )
        return None

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes, also at δ = 1e-6 and a thousand steps."""
        return Cost.MINUTES

    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """The law that starts from what revealed draws prove."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        law = self.user_law(mechanism)
        return _SimulatedUser(law, self.proven(scheme), mechanism)


def affordable(law: UserLaw) -> int:
    """Samples of a pair that a core draws in about a minute, with compiled code."""
    step = _STEP + _NUMBER * len(law.examples) + _BAND * law.columns.shape[1]
    return int(_MOST_NANOSECONDS / (law.steps * step))
