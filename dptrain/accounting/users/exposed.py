"""User-level b-min-sep sampling on any graph: reveal only the draws that others can show.

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
refused.
"""

from __future__ import annotations

import dataclasses

from dptrain.accounting.users.importance import WeightedUser
from dptrain.accounting.users.law import UserLaw, band_columns
from dptrain.accounting.users.neighbors import neighbor_facts
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExposedStepsImportance(WeightedUser):
    """Sampling-based exclusion on any graph, amplified by the draws that nobody else can show.

    (docs/theory/users.md#thm-users-exposed, docs/theory/users.md#thm-users-weighted.)

    It gains where few steps are exposed, that is where
    1-(1-p)^{d(b-1)} is well below 1; at 1 it is what ``RevealedDraws`` says without any
    simulation.
    d is the largest number of examples that share a user with some user's examples and are not that
    user's (``outside_neighbors``), a fact of the public
    graph; ``AttributionGraph.bound(max_neighbors=…)`` bounds it.
    """

    name = "exposed-steps-importance"
    display = "exposed steps, importance sampling"

    def scheme_refusal(self, scheme: UserMinSep) -> str | None:
        """Refuse exclusion by participation, and graphs whose edges are not here."""
        if scheme.exclusion != "sampling":
            return "it needs exclusion='sampling': participations show arbitrarily far otherwise"
        if not scheme.graph.attached and not scheme.graph.is_disjoint:
            return "it counts neighbors in the graph's edges, which are not here; attach() them"
        return None

    def known_elsewhere(self, scheme: UserMinSep) -> str | None:
        """Disjoint graphs have the user's own chain."""
        if scheme.graph.is_disjoint:
            return "every example has one user, where 'user-min-sep-importance' knows the chain"
        return None

    def user_law(self, mechanism: MatrixMechanism) -> UserLaw:
        """The chain from an empty past, exposed by the largest d of all users."""
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
            exclusion="sampling",
            neighbors=most,
            burn_in=0,
        )
