"""Accountant of user-level b-min-sep sampling of examples with one user each."""

from __future__ import annotations

import dataclasses

from dptrain.accounting.users.importance import WeightedUser
from dptrain.accounting.users.law import UserLaw, band_columns
from dptrain.accounting.users.neighbors import neighbor_facts
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserMinSepImportance(WeightedUser):
    """Certification of a user on a *disjoint* graph, where every example has one user.

    Both rules of exclusion, bands ≤ b, any C. Exact for a user of k' examples but for the
    certificate's margin; the loss is the largest over the k' that users have.

    The user's own chain, burn-in included, is the dominating pair, whatever the gradients
    (docs/theory/users.md#thm-users-disjoint, docs/theory/users.md#thm-users-weighted;
    ``test_a_disjoint_graph_costs_what_is_attained``).
    Under ``"sampling"`` a zeroed draw bars as well; the recursion of Theorem 6.1 of Dong & Ganesh
    2026 (arXiv 2602.09338), in which it does not, is an upper bound
    (``test_participation_bars_less_than_sampling_coordinate_by_coordinate``).

    That every example has one user is read off the graph's public facts, edges = examples, which
    are part of the scheme's hash and checked when edges are attached.
    """

    name = "user-min-sep-importance"
    display = "user b-min-sep importance sampling"

    def scheme_refusal(self, scheme: UserMinSep) -> str | None:
        """Refuse graphs with shared examples, on which hidden draws show in others' batches."""
        if not scheme.graph.is_disjoint:
            return (
                "it needs a disjoint graph, in which every example has one user; here "
                f"{scheme.graph.examples} examples have {scheme.graph.edges} users between them, "
                "and others' exclusion shows what a user drew; see 'exposed-steps-importance'"
            )
        return None

    def user_law(self, mechanism: MatrixMechanism) -> UserLaw:
        """The user's own chain, burn-in included."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        counts = tuple(range(1, scheme.graph.max_examples + 1))
        if scheme.graph.attached:
            counts = neighbor_facts(scheme.graph).examples
        return UserLaw(
            columns=band_columns(mechanism.strategy, scheme.steps),
            examples=counts,
            probability=scheme.probability,
            min_sep=scheme.min_sep,
            exclusion=scheme.exclusion,
            neighbors=0,
            burn_in=scheme.burn_in,
        )
