"""Monte Carlo accountant for user-level b-min-sep sampling of examples with one user each."""

from __future__ import annotations

import dataclasses

from dptrain.accounting.users.law import UserLaw, band_columns
from dptrain.accounting.users.monte_carlo import SimulatedUser
from dptrain.accounting.users.neighbors import neighbour_facts
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserMinSepMonteCarlo(SimulatedUser):
    """Simulates the loss of a user on a *disjoint* graph, where every example has one user.

    Both rules of exclusion, bands ≤ b, any C. Exact for a user of k' examples but for the
    certificate's margin; the loss is the largest over the k' that users have.

    Proof. No example of another user is a neighbour of u's, so u's coins change nobody else's
    batches, and others' coins change nothing about u's. Publish others' coins: x_t = |B_t ∩ D_u| is
    u's own chain, independent of them, and what others contribute is known given earlier releases.
    The pair (C x + σ z, σ z) dominates the run, whatever the gradients (the lemma of
    ``dptrain.accounting.users.exposed``), and is attained by aligned gradients of norm 1.

    The chain is the true one for either rule: under ``"participation"`` the recursion of Theorem
    6.1 of Dong & Ganesh 2026, f_i = (1-p)^k f_{i+1} + Σ_j P(Bin(k,p) = j) e^{…} f_{i+b}; under
    ``"sampling"`` a zeroed draw bars as well. (The theorem uses the former for the latter too. That
    is an upper bound: with the same coins, no draw in the window means no participation in it, so
    x is at least as large, coordinate by coordinate. No shift in time and no Toeplitz C is needed,
    and the paper's shift would need one kernel that serves all histories at once.) The burn-in is
    part of the chain: the law of the countdown at step 1 is computed exactly.

    A user of fewer examples is barred less often, and neither chain dominates the other: hence the
    largest loss. That every example has one user is read off the graph's public facts, edges =
    examples, which are part of the scheme's hash and checked when edges are attached.
    """

    name = "user-min-sep-monte-carlo"
    display = "user b-min-sep Monte Carlo"

    def scheme_refusal(self, scheme: UserMinSep) -> str | None:
        """Refuses graphs with shared examples, on which hidden draws show in others' batches."""
        if not scheme.graph.is_disjoint:
            return (
                "it needs a disjoint graph, in which every example has one user; here "
                f"{scheme.graph.examples} examples have {scheme.graph.edges} users between them, "
                "and others' exclusion shows what a user drew; see 'exposed-steps'"
            )
        return None

    def law(self, mechanism: MatrixMechanism) -> UserLaw:
        """The user's own chain, burn-in included."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        counts = tuple(range(1, scheme.graph.max_examples + 1))
        if scheme.graph.attached:
            counts = neighbour_facts(scheme.graph).examples
        return UserLaw(
            columns=band_columns(mechanism.strategy, scheme.steps),
            examples=counts,
            probability=scheme.probability,
            min_sep=scheme.min_sep,
            exclusion=scheme.exclusion,
            neighbours=0,
            burn_in=scheme.burn_in,
        )
