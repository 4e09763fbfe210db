"""Cyclic Poisson sampling with a banded strategy: composed subsampled Gaussians."""

from __future__ import annotations

from dptrain.accounting.deterministic import DeterministicAccountant
from dptrain.accounting.poisson_pld import SubsampledGaussianCurve
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.cyclic_poisson import CyclicPoisson


class CyclicPoissonPLD(DeterministicAccountant):
    """ceil(n/b) compositions of one subsampled Gaussian of sensitivity max_t ‖C_{:,t}‖, bands ≤ b.

    (Choquette-Choo et al. 2023, Theorem 4 on cyclic Poisson sampling.) Proof, under zero-out:

    * The split into parts does not depend on what examples contain (and N, which an equal split
      reads, is the same on both data sets), so it may be published: δ is the mean over splits of
      the δ given the split, at most the worst one. That covers both assignments.
    * Let the example be in part s and publish everybody else's coins, which its own are independent
      of. At steps s, s + b, … it tosses coins of probability p; at others it contributes nothing.
      Given all that was released before step t = s + ib, the coin of t decides whether the
      contribution v_t, ‖v_t‖ ≤ 1, fixed by then, is added to the rows of column t. Those rows are
      touched by no other step of the example (bands ≤ b), end before its next step, and are shifted
      otherwise by what others contribute, which is known from the releases. So the release of
      these rows is a Gaussian of sensitivity at most ‖C_{:,t}‖, subsampled with probability p, and
      the blocks compose adaptively.
    * A smaller norm is a larger σ for the same norm, which is post-processing: the largest column
      norm of all dominates each. A part has ceil(n/b) steps or one fewer, and a step fewer is
      post-processing too.

    The signs of C's entries play no part. With one part it is Poisson sampling and exact; otherwise
    the split is random and hidden, of which no use is made: an upper bound.
    """

    name = "cyclic Poisson PLD"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, truncation, and bands beyond the cycle."""
        scheme, bands = mechanism.scheme, mechanism.strategy.bands
        if not isinstance(scheme, CyclicPoisson):
            return "it needs CyclicPoisson sampling"
        if scheme.max_batch_size is not None:
            return (
                f"max_batch_size={scheme.max_batch_size} cuts batches, so that examples' coins are "
                "not independent; use max_batch_size=None"
            )
        if bands > scheme.cycle:
            return (
                f"it needs bands <= cycle, the strategy has bands={bands} and the scheme "
                f"cycle={scheme.cycle}; use at most {scheme.cycle} bands or a cycle of at least "
                f"{bands}"
            )
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """Exact for one part and the same noise at every step."""
        scheme = mechanism.scheme
        norms = mechanism.strategy.column_norms(scheme.steps)
        plain = scheme.min_sep == 1 and norms.min() == norms.max()
        return Kind.EXACT if plain else Kind.UPPER_BOUND

    def curve(self, mechanism: MatrixMechanism) -> SubsampledGaussianCurve:
        """The curve of the largest column norm."""
        scheme = mechanism.scheme
        assert isinstance(scheme, CyclicPoisson)
        norms = mechanism.strategy.column_norms(scheme.steps)
        return SubsampledGaussianCurve(
            scheme.probability, scheme.max_participations, float(norms.max())
        )
