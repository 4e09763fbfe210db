"""δ of a mechanism at its ε, in both directions, by tilted runs of the game."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import logsumexp
from tqdm.auto import tqdm

from dptrain.auditing.draws import key, noises
from dptrain.auditing.intervals import least_mean
from dptrain.auditing.laws import Game, NoLikelihood
from dptrain.core import Array, checks
from dptrain.sampling import Scheme

DIRECTIONS = ("remove", "add")

_ENTRIES = 1 << 22  # of outputs at a time, 32 MB
_PILOT = 1000  # samples of each proposal, from which their shares are chosen
_ROUNDS = 60
_LEAST_SHARE = 0.02
_FEW = 100.0  # effective samples below which a standard error means nothing

_SCALES = (1.0, 1.4, 2.0)
# Where nobody takes part more often than the scheme has it, all of the tail is in what they add.
_MORE_SCALES = (1.0, 1.5, 2.2, 3.5, 5.0, 7.5, 11.0)
_SHIFTS = (-5.0, -4.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 4.0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Proposal:
    """A law that outputs are drawn from in place of P or Q.

    Attributes:
        scheme: draws the participations, the game's own with its probability or a larger one;
            ``None``: nobody takes part.
        scale: what the example's contribution is multiplied by.
        shift: added to every output; shape (n,), in units of σ.
    """

    scheme: Scheme | None
    scale: float
    shift: Array

    def log_ratio(self, game: Game, outputs: Array) -> Array:
        """log of its density over that of Q; shape (samples,)."""
        if self.scheme is not None:
            return game.likelihood(self.scheme).log_ratio(outputs, self.scale)
        return np.asarray(outputs @ self.shift / game.sigma - np.sum(self.shift**2) / 2)

    def means(self, game: Game, count: int, seed: int) -> Array:
        """Draws of the terms that are added to σ z; shape (count, n)."""
        if self.scheme is None:
            return np.tile(game.sigma * self.shift, (count, 1))
        taken = game.draws(count, seed, self.scheme)
        return self.scale * taken @ game.matrix.T


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaEstimate:
    """The estimate of δ(ε) in one direction.

    Attributes:
        direction: ``"remove"``, H(P‖Q), or ``"add"``, H(Q‖P).
        epsilon: ε.
        delta: unbiased estimate.
        standard_error: of the estimate; no confidence bound.
        lower: δ is at least this, with the audit's confidence.
        effective_samples: (Σ f)²/Σ f² of the terms f; below 100 the estimate is not to be trusted.
    """

    direction: str
    epsilon: float
    delta: float
    standard_error: float
    lower: float
    effective_samples: float

    @property
    def measured(self) -> bool:
        """True if enough samples met the event for the standard error to mean something."""
        return self.effective_samples >= _FEW


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TiltedRuns:
    """Runs of the game by a mixture M of proposals, and their likelihoods under P, Q and M.

    All of δ(ε), both directions, are means over them: H(P‖Q) of (dP/dM - e^ε dQ/dM)_+ and H(Q‖P) of
    (dQ/dM - e^ε dP/dM)_+.

    Attributes:
        log_p: log dP/dQ, shape (samples,).
        log_m: log dM/dQ, shape (samples,).
        proposals: number of laws in M.
    """

    log_p: Array
    log_m: Array
    proposals: int

    def terms(self, direction: str, epsilon: float) -> Array:
        """The terms whose mean estimates δ(ε)."""
        if direction == "remove":
            high, low = self.log_p, np.full_like(self.log_p, epsilon)
        else:
            high, low = np.zeros_like(self.log_p), epsilon + self.log_p
        gap = np.minimum(low - high, 0.0)
        return np.asarray(np.exp(high - self.log_m) * -np.expm1(gap))

    def estimate(self, direction: str, epsilon: float, alpha: float) -> DeltaEstimate:
        """δ(ε) in a direction, with a lower bound that fails with chance at most ``alpha``."""
        terms = self.terms(checks.choice("direction", direction, DIRECTIONS), epsilon)
        squares = float(np.sum(terms**2))
        return DeltaEstimate(
            direction=direction,
            epsilon=epsilon,
            delta=float(terms.mean()),
            standard_error=float(terms.std(ddof=1)) / math.sqrt(terms.size),
            lower=least_mean(terms, alpha),
            effective_samples=float(terms.sum()) ** 2 / squares if squares else 0.0,
        )

    def masses(self) -> dict[str, tuple[float, float]]:
        """The masses of P and Q, with standard errors: 1, or the draws are of other laws."""
        found = {}
        for name, log_weights in (("P", self.log_p - self.log_m), ("Q", -self.log_m)):
            weights = np.exp(log_weights)
            found[name] = (
                float(weights.mean()),
                float(weights.std(ddof=1)) / math.sqrt(weights.size),
            )
        return found


def tilted_runs(
    game: Game, *, epsilon: float, samples: int, seed: int, progress: bool = True
) -> TiltedRuns:
    """Draw runs that meet the events of δ(ε) often, in both directions.

    Proposals are the mechanism with larger probabilities and contributions, and outputs that are
    all shifted; shares are chosen by a pilot so that M is near the terms in Kullback-Leibler
    divergence (Cappé, Douc, Guillin, Marin & Robert 2008, arXiv 0710.4242). P and Q always have a
    share of their own, so that no term exceeds 50.

    Args:
        game: the game; its likelihood ratio must be exact.
        epsilon: ε ≥ 0.
        samples: how many.
        seed: of all draws.
        progress: show a bar.

    Raises:
        NoLikelihood: if there is no exact likelihood ratio.
    """
    if game.inexact:
        raise NoLikelihood(game.inexact)
    samples = checks.integer("samples", samples, minimum=1000)
    epsilon = checks.number("epsilon", epsilon, minimum=0)
    candidates = _candidates(game)
    equal = np.full(len(candidates), 1 / len(candidates))
    bar = tqdm(total=samples + _PILOT * len(candidates), delay=2, disable=not progress, unit="run")
    with bar:
        ratios = _draw(game, candidates, equal, _PILOT * len(candidates), key(seed, 0), bar)
        shares = _shares(ratios, equal, epsilon)
        kept = np.flatnonzero(shares)
        proposals, shares = [candidates[k] for k in kept], shares[kept]
        ratios = _draw(game, proposals, shares, samples, key(seed, 1), bar)
    log_m = np.asarray(logsumexp(ratios, axis=1, b=shares))
    return TiltedRuns(log_p=ratios[:, 0], log_m=log_m, proposals=len(proposals))


def _candidates(game: Game) -> list[Proposal]:
    """The proposals: P first, Q second, then the tilted ones."""
    still = np.zeros(game.scheme.steps)
    denser = game.denser()
    scales = _SCALES if denser else _MORE_SCALES
    tilted = [
        Proposal(scheme=each, scale=s, shift=still)
        for each in (game.scheme, *denser)
        for s in scales
    ]
    mean = game.matrix @ game.mean()
    unit = mean / np.linalg.norm(mean)
    shifts = [Proposal(scheme=None, scale=1.0, shift=shift * unit) for shift in (0.0, *_SHIFTS)]
    return [tilted[0], shifts[0], *tilted[1:], *shifts[1:]]


def _draw(
    game: Game, proposals: Sequence[Proposal], shares: Array, samples: int, seed: int, bar: tqdm
) -> Array:
    """log ratios of every proposal to Q at draws of their mixture; shape (samples, proposals)."""
    found = []
    most = max(1, _ENTRIES // game.scheme.steps)
    for number, start in enumerate(range(0, samples, most)):
        count = min(most, samples - start)
        rng = np.random.default_rng(key(seed, number, 0))
        parts = rng.multinomial(count, shares)
        outputs = noises(game.mechanism, count, key(seed, number, 1)) @ game.matrix.T
        ends = np.cumsum(parts)
        for k, (proposal, size, end) in enumerate(zip(proposals, parts, ends, strict=True)):
            if size:
                outputs[end - size : end] += proposal.means(game, size, key(seed, number, 2, k))
        found.append(np.stack([each.log_ratio(game, outputs) for each in proposals], axis=1))
        bar.update(count)
    return np.concatenate(found)


def _shares(ratios: Array, drawn: Array, epsilon: float) -> Array:
    """Shares of the proposals from a pilot of the mixture ``drawn``; 0 for those not worth it."""
    log_m = np.asarray(logsumexp(ratios, axis=1, b=drawn))
    pilot = TiltedRuns(log_p=ratios[:, 0], log_m=log_m, proposals=len(drawn))
    densities = np.exp(ratios - log_m[:, None])
    found = []
    for direction in DIRECTIONS:
        terms = pilot.terms(direction, epsilon)
        if terms.sum() == 0:
            continue
        shares = drawn.copy()
        for _ in range(_ROUNDS):
            mixed = densities @ shares
            shares = shares * ((terms / mixed) @ densities) / terms.sum()
        found.append(shares)
    # Half of the samples for each direction that was met at all.
    shares = np.mean(found, axis=0) if found else drawn.copy()
    shares[shares < _LEAST_SHARE] = 0.0
    shares[:2] = np.maximum(shares[:2], _LEAST_SHARE)
    return np.asarray(shares / shares.sum())
