"""User-level b-min-sep sampling on any graph: reveal only the draws that others can show.

Setting. Coins 1[e ∈ S_t] are i.i.d. Bern(p), burn-in included. Batch t is S_t without every
example that has a neighbour (itself included) in S_j for some j in {t-b+1..t-1}. User u has the
examples D_u, k' of them, all neighbours of each other; M_u = N(D_u) minus D_u are their outside
neighbours, d = |M_u|. Step t is *exposed* if a coin of M_u comes up at a released step in
{t+1..t+b-1}.

Claim. With I = (exposed steps, u's counts r_t at them), δ(ε) ≤ max over u of
E_I[δ(C x + σ z ‖ σ z given I)] in both directions, where r_t ~ Bin(k', p) i.i.d. at other steps,
x_t = r_t unless r_j > 0 for a j in {t-b+1..t-1}, j ≥ 1, and the exposed steps come from i.i.d.
U_j ~ Bern(1-(1-p)^d). The bound does not fall if d is raised.

Proof.

1. *Publish* every coin of the burn-in, every coin of examples outside D_u, and the coins of D_u at
   exposed steps. Coins depend on nothing else, under fixed-graph zero-out both data sets have the
   same, so δ is at most the mean over this information of δ given it. Which steps are exposed
   is a function of coins outside D_u only. Hence, given the information, the coins of D_u that
   stay hidden are still i.i.d. Bern(p).
2. *Others are known.* Whether an example f outside D_u is in batch j depends on f's own coin at j
   and on coins of N(f) at j-b+1..j-1. If f is not in S_j, it is not in the batch. If it is, every
   e in N(f) ∩ D_u has f in M_u, so all steps j-b+1..j-1 are exposed: the coins of e there are
   published. So batches outside D_u are functions of the information. Their gradients are
   functions of earlier releases, the same ones in both runs: they can be subtracted.
3. *What is left of u*: step t adds w_t, a sum of |B_t ∩ D_u| vectors of norm ≤ 1 (in units of the
   clipping norm) that depends on earlier releases. Number the outcomes h of the hidden coins, with
   known weights μ(h). An example of D_u in S_t is in batch t only if no coin of D_u came up in
   {t-b+1..t-1}, since they are all neighbours; others' coins and the burn-in only leave out more.
   So for *each* h, |B_t ∩ D_u| ≤ x_t(h), x as in the claim.
4. *Comparison lemma.* Let a_t(h; earlier y) be vectors with <a_t(h), a_t(h')> ≤ m_t(h) m_t(h') for
   numbers m ≥ 0, for all h, h' and all pasts. Let ρ be the ratio of the laws P of
   y_t = a_t(h) + σ z_t, h ~ μ, and Q of y_t = σ z_t, and ρ' the same for scalars m_t(h). Then
   E_Q F(ρ) ≤ E_Q F(ρ') for every convex F, so also for (ρ - e^ε)_+ and (1 - e^ε ρ)_+, which are δ
   in both directions. Proof (Kahane's inequality, made adaptive): take F smooth and σ = 1. For
   weights ℓ ≥ 0 let V_t(ℓ) = E F(Σ_h ℓ_h W_h), W_h the likelihood ratio of the scalar rows from t
   on for h. All second derivatives ∂²V/∂ℓ_h∂ℓ_h' = E F'' W_h W_h' are ≥ 0. Given the past, row t
   turns ℓ_h into ℓ_h exp(X_h - Var X_h/2), X Gaussian with covariance K_hh' = <a_t(h), a_t(h')>
   instead of K'_hh' = m_t(h) m_t(h'). Along the Gaussian interpolation K → K' the derivative of
   E V_{t+1}(ℓ e^{X - Var/2}) is Σ_hh' ½ (K' - K)_hh' E[ℓ_h e^{…} ℓ_h' e^{…} ∂²V_{t+1}] ≥ 0, so
   replacing row t by the scalar one does not lower the mean. Replace the rows one after
   another, from the last to the first.
   Here a_t(h) = Σ_{j≤t} C_tj w_j(h), so that
   <a_t(h), a_t(h')> ≤ Σ_jj' |C_tj| |C_tj'| x_j(h) x_j'(h') = m_t(h) m_t(h') with m = |C| x.
   That is the pair of the claim (C stands for |C| where it has negative entries).
5. *The information that counts.* Given all that was published, the scalar pair depends on the
   exposed steps and on r_t at them only: exchangeable coins enter x by their counts. At least one
   of the d coins of M_u comes up at step j with chance 1-(1-p)^d, independently over j and of u's
   coins.
6. *More neighbours.* Draw the U_j for d+1 as those for d, or one more coin: then more steps are
   exposed. Publishing further counts that are independent of the rest, and have one law in both
   runs, writes P as a mixture of the new P given them while Q stays: δ is convex, so it does not
   fall. Hence the largest d of all users serves every user. □

The number k' has no such order, an example more also bars more: the loss is the largest over the
numbers that occur. Different examples of u are not told apart (an example's draws are published if
a neighbour of *another* of u's examples comes up): looser, but the law then depends on d alone,
however their neighbours overlap.

Where it fails: under ``exclusion="participation"`` u's participation leaves f out, f then does not
leave out g, and so on; a draw shows arbitrarily far away and step 2 breaks. That rule is refused.
"""

from __future__ import annotations

import dataclasses

from dptrain.accounting.users.law import UserLaw, band_columns
from dptrain.accounting.users.monte_carlo import SimulatedUser
from dptrain.accounting.users.neighbors import neighbour_facts
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExposedSteps(SimulatedUser):
    """Sampling-based exclusion on any graph, amplified by the draws that nobody else can show.

    The proof is the module's. It gains where few steps are exposed, that is where
    1-(1-p)^{d(b-1)} is well below 1; at 1 it is what ``RevealedDraws`` says without any
    simulation.
    d is the largest number of examples that share a user with some user's examples and are not that
    user's (``outside_neighbours``), a fact of the public
    graph; ``AttributionGraph.bound(max_neighbours=…)`` bounds it.
    """

    name = "exposed-steps"
    display = "exposed steps"

    def scheme_refusal(self, scheme: UserMinSep) -> str | None:
        """Refuses exclusion by participation, and graphs whose edges are not here."""
        if scheme.exclusion != "sampling":
            return "it needs exclusion='sampling': participations show arbitrarily far otherwise"
        if not scheme.graph.attached and not scheme.graph.is_disjoint:
            return "it counts neighbours in the graph's edges, which are not here; attach() them"
        return None

    def law(self, mechanism: MatrixMechanism) -> UserLaw:
        """The chain from an empty past, exposed by the largest d of all users."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        graph = scheme.graph
        counts, most = tuple(range(1, graph.max_examples + 1)), 0
        if graph.attached:
            facts = neighbour_facts(graph)
            counts, most = facts.examples, facts.neighbours
        return UserLaw(
            columns=band_columns(mechanism.strategy, scheme.steps),
            examples=counts,
            probability=scheme.probability,
            min_sep=scheme.min_sep,
            exclusion="sampling",
            neighbours=most,
            burn_in=0,
        )
