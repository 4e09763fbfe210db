"""The Gaussian bound that needs no randomness of the sampling."""

from __future__ import annotations

from dptrain.accounting.base.curve import DeterministicAccountant, GaussianCurve
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import CyclicPoisson, Poisson
from dptrain.strategies import fixed_epoch_sensitivity
from dptrain.strategies.toeplitz import Toeplitz

# Steps up to which all n²/e entries of the columns that meet are formed; Toeplitz needs n.
_PERIODIC_UP_TO = 10_000


class UnsampledGaussian(DeterministicAccountant):
    """Gaussian mechanism with the sensitivity of C under the scheme's participation bound.

    Under zero-out adjacency the run is μ-GDP with μ = k·sens(C; m, b)/σ, for every scheme whose
    draws do not depend on the data: k = ``max_per_batch``, m = ``max_participations`` and
    b = ``min_sep`` of the protected unit (docs/theory/neighbors.md#thm-unamplified;
    ``test_unamplified_claims_cover_every_pattern``).

    So for truncated schemes too; but only under zero-out: if an example could be *absent*, it would
    make room for another in a truncated batch. No randomness of the draws is used, so it is chosen
    automatically only where there is none to use, or nothing else is proven (``UserFixed``,
    ``Shuffled``), and beside the accountants of ``UserMinSep``; elsewhere it is offered by name.

    An upper bound: the worst pattern may be one that the scheme draws rarely, or never on the graph
    at hand. Where the order of the epochs is kept (``Shuffled(reshuffle=False)``, ``BallsInBins``),
    participations are *exactly* an epoch apart and the sensitivity is that of such patterns.
    """

    name = "gaussian"
    display = "unamplified Gaussian"
    kind = Kind.UPPER_BOUND
    truncation = True  # no use is made of the draws

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse no mechanism."""
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where the scheme is random in a way that others may use."""
        scheme, bands = mechanism.scheme, mechanism.strategy.bands
        if scheme.unamplified:
            return None
        # MMCC covers these, and is the looser one where there is little noise.
        plain = isinstance(scheme, Poisson | CyclicPoisson) and scheme.max_batch_size is None
        if plain and bands > scheme.min_sep:
            return None
        return (
            "it ignores the amplification by sampling, and answers only when requested by name "
            "(accountant='gaussian')"
        )

    def curve(self, mechanism: MatrixMechanism) -> GaussianCurve:
        """The curve of k·sens(C; m, b)."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        sensitivity = strategy.sensitivity(
            steps=scheme.steps,
            max_participations=scheme.max_participations,
            min_sep=scheme.min_sep,
        )
        if scheme.period is not None and (
            isinstance(strategy, Toeplitz) or scheme.steps <= _PERIODIC_UP_TO
        ):
            epochs = scheme.steps // scheme.period
            periodic = fixed_epoch_sensitivity(strategy, steps=scheme.steps, epochs=epochs)
            sensitivity = min(sensitivity, periodic * (1.0 + 1e-12))
        return GaussianCurve(scheme.max_per_batch * sensitivity)
