"""Truncated Poisson sampling with independent noise, under zero-out."""

from __future__ import annotations

import dataclasses
import math

from scipy.stats import binom

from dptrain.accounting.accountant import varying_noise
from dptrain.accounting.deterministic import DeterministicAccountant
from dptrain.accounting.pld import Composition
from dptrain.accounting.poisson_pld import ComposedCurve, SubsampledGaussianCurve
from dptrain.accounting.shifted_mixtures import ShiftedMixtures, public_mixture, public_spread
from dptrain.accounting.subsampled_gaussian import spread, subsampled_gaussian_on_grid
from dptrain.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling.truncated_poisson import TruncatedPoisson

# Binomial tails are computed to a relative 1e-12 (checked against sums of 40 digits).
_SLACK = 1e-10
# Tails below this lose digits to underflow.
_UNDERFLOW = 1e-290
# A branch of less probability than this is charged to δ, as the normal tails are.
_NEGLIGIBLE = 1e-40


@dataclasses.dataclass(frozen=True)
class Branches:
    """The two cases of a step, by how many *other* examples are drawn; all rounded up.

    Attributes:
        open: Pr[Bin(N-1, p) < B]: there is room for the example.
        full: Pr[Bin(N-1, p) ≥ B]: if it enters, it displaces another.
        kept: the example's chance q2 to be drawn and kept, given that the batch is full.
    """

    open: float
    full: float
    kept: float

    @classmethod
    def of(cls, *, dataset_size: int, probability: float, max_batch_size: int) -> Branches:
        """For N, p and B < N.

        Given s ≥ B other examples drawn, the chance is p·B/(s+1); its mean over s is
        q2 = (B/N)·Pr[Bin(N, p) ≥ B+1]/Pr[Bin(N-1, p) ≥ B] (Ganesh 2025, section 3.4), and at most
        p·B/(B+1).
        """
        size, p, largest = dataset_size, probability, max_batch_size
        room = float(binom.cdf(largest - 1, size - 1, p))
        full = float(binom.sf(largest - 1, size - 1, p))
        kept = p * largest / (largest + 1) * (1.0 + _SLACK)
        if full > _UNDERFLOW:
            tail = float(binom.sf(largest, size, p))
            kept = min(kept, largest / size * tail / full * (1.0 + 3.0 * _SLACK))
        return cls(
            open=_upper(room, complement=full), full=_upper(full, complement=room), kept=kept
        )


def _upper(probability: float, *, complement: float) -> float:
    """An upper bound on a probability, computed with its complement, from the better of the two."""
    from_complement = math.nextafter(1.0 - complement * (1.0 - _SLACK), 2.0)
    return min(probability * (1.0 + _SLACK), from_complement) + _UNDERFLOW


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonCurve(ComposedCurve):
    """``steps`` Gaussians of the given sensitivity on batches of at most ``max_batch_size``."""

    probability: float
    dataset_size: int
    max_batch_size: int
    steps: int
    sensitivity: float

    @property
    def branches(self) -> Branches:
        """The two cases of a step."""
        return Branches.of(
            dataset_size=self.dataset_size,
            probability=self.probability,
            max_batch_size=self.max_batch_size,
        )

    def _composition(self, sigma: float, *, remove: bool) -> Composition:
        p, cases, scaled = self.probability, self.branches, sigma / self.sensitivity
        full = ShiftedMixtures(cases.kept, scaled)
        spreads = []
        if cases.open > _NEGLIGIBLE:
            of_open = spread(probability=p, sigma=scaled, remove=remove)
            spreads.append((cases.open, of_open))
        if cases.full > _NEGLIGIBLE:
            spreads.append((cases.full, full.spread(remove=remove)))
        h = public_spread(spreads).spacing(self.steps)
        parts = []
        if cases.open > _NEGLIGIBLE:
            single = subsampled_gaussian_on_grid(
                probability=p, sigma=scaled, spacing=h, remove=remove
            )
            parts.append((cases.open, single))
        if cases.full > _NEGLIGIBLE:
            parts.append((cases.full, full.discretised(spacing=h, remove=remove)))
        mixed = public_mixture(parts)
        left_out = sum(w for w in (cases.open, cases.full) if w <= _NEGLIGIBLE)
        mixed = dataclasses.replace(mixed, infinity=mixed.infinity + left_out)
        return Composition(mixed, self.steps)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """What was rounded, and whether truncation costs privacy."""
        cases = self.branches
        displaced = self.steps * cases.full * cases.kept
        notes = super().notes(sigma, delta)
        if displaced <= delta:
            return notes
        return (
            *notes,
            f"truncation costs privacy: an example displaces another {displaced:.3g} times a run "
            f"on average, at twice the sensitivity; a larger max_batch_size than "
            f"{self.max_batch_size} makes that rarer",
        )


class TruncatedPoissonPLD(DeterministicAccountant):
    """PLD of n steps of truncated Poisson sampling under zero-out, both directions, for C = c·I.

    (Ganesh 2025, Theorem 3.3.) Let x be the gradient of the example, blanked to 0 in the other
    world, where it is still drawn like any other. One step is dominated by a public r and, for
    (P, Q) and also for (Q, P), with noise σ:

    * r = 1 with probability Pr[Bin(N-1, p) < B]: Bern(p) against 0;
    * r = 2 otherwise: 2·Bern(q2) against -Bern(q2), with q2 of :class:`Branches`.

    Proof.

    * Draw the others first, in a random order, s of them. If s ≥ B, the example's own coin and the
      lottery among s + 1 let it in with probability p·B/(s+1), and by symmetry it displaces the
      B-th in the order, whose gradient is w, ‖w‖ ≤ 1; else the first B are the batch. None of this
      depends on the world. Publish the order and min(s, B), from which r follows. Given s ≥ B the
      example enters with probability q2, the mean over s. Padding adds nothing.
    * Given what is published and all earlier releases, the gradients are fixed, so the others' sum
      is a known shift. For s < B what is left is Bern(p)·x against 0. For s ≥ B it is x - w with
      probability q2 against -w with probability q2: lengths at most 2 and 1.
    * Both are dominated by aligned shifts of the greatest lengths. For γ ≥ 1 the divergence
      ∫(P - γQ)₊ is that of q·N(v) against c0·N(0) + c1·N(w), with c0 = (1-q)(γ-1) and c1 = γq. For
      any split q = a + b it is at most that of a·N(v) against c0·N(0) plus that of b·N(v) against
      c1·N(w), and each of these depends on its distance only and grows with it: at most |v| and
      |v| + |w|. For v and w on opposite sides of 0 on a line the split at which all likelihood
      ratios cross at the same point gives equality, so that case is the greatest. For γ < 1 move
      (1-q)(1-γ)·N(0) to the first law and split γq instead.
    * The law of r does not depend on the data, so the loss of (r, y) is that of y given r: the
      step's loss distribution is the mixture of the two. Coins are fresh in every step, so the
      steps compose adaptively.

    Nothing is lost where B ≥ N (Poisson sampling); elsewhere it is an upper bound, as x - w and -w
    cannot both be aligned and longest, and r is not published.

    Rounding: with a smaller q2 the pair of r = 2 arises from that with a larger one by replacing
    the output by a draw from N(0, σ²) with some probability, so q2 is rounded up. So are both
    weights, whose sum may then exceed 1 by 2e-10: the composed masses are at least the true ones,
    whichever case is worse (a small q2 can make r = 2 the better one).

    Not offered: add-or-remove-one of N (Theorem 3.1; r = 1 the same, r = 2: 2·Bern(q2) against 0)
    and replace-one (Theorem 3.4; Bern(p) against -Bern(p), 2·Bern(q2) against -2·Bern(q2)).
    """

    name = "truncated Poisson PLD"
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, correlated noise and noise that varies from step to step."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if not isinstance(scheme, TruncatedPoisson):
            return "it needs TruncatedPoisson sampling"
        if strategy.bands != 1:
            return (
                f"it needs independent noise, the strategy has bands={strategy.bands}; use bands=1 "
                "(Identity), or accountant='gaussian' without amplification"
            )
        varies = varying_noise(mechanism)
        return varies and f"{varies}; use Identity"

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """Exact if no batch can be cut."""
        scheme = mechanism.scheme
        assert isinstance(scheme, TruncatedPoisson)
        return Kind.EXACT if scheme.max_batch_size >= scheme.dataset_size else Kind.UPPER_BOUND

    def curve(self, mechanism: MatrixMechanism) -> TruncatedPoissonCurve | SubsampledGaussianCurve:
        """The curve; a diagonal C only scales the sensitivity."""
        scheme = mechanism.scheme
        assert isinstance(scheme, TruncatedPoisson)
        sensitivity = float(mechanism.strategy.column_norms(scheme.steps).max())
        if scheme.max_batch_size >= scheme.dataset_size:
            return SubsampledGaussianCurve(scheme.probability, scheme.steps, sensitivity)
        return TruncatedPoissonCurve(
            probability=scheme.probability,
            dataset_size=scheme.dataset_size,
            max_batch_size=scheme.max_batch_size,
            steps=scheme.steps,
            sensitivity=sensitivity,
        )
