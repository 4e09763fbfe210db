"""The likelihood ratio that belongs to a scheme, and the draws that the reader of it is told."""

from __future__ import annotations

import dataclasses

import numpy as np

from dptrain.auditing.draws import noises, participations, step_rates
from dptrain.auditing.likelihood import (
    MOST_STATES,
    Ages,
    Coins,
    Likelihood,
    PatternMixture,
    Subsets,
    Trellis,
    bandwidth,
    orthogonal_from,
    window_patterns,
)
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import (
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Scheme,
    Shuffled,
)

# Factors by which tilted runs raise the probability of the draws.
_RATES = (1.5, 2.5, 5.0)


def whitening_matrix(mechanism: MatrixMechanism) -> Array:
    """The lower triangular M with M (x + σ w) = M x + σ z, for the noise w = W Z of the steps.

    w has the covariance W Wᵀ, so M is the inverse of its Cholesky factor and z is standard normal.
    Where C is square M is C itself. A tree's C has more rows than columns, and M is as good as C
    if W is its pseudo-inverse: then MᵀM = CᵀC. From any other left inverse less can be learnt than
    from C x + σ z, and M is what can be.

    Returns:
        Shape (n, n), float64.
    """
    strategy, steps = mechanism.strategy, mechanism.steps
    if strategy.rows(steps) == steps:
        return np.asarray(strategy.columns(steps, np.arange(steps)), dtype=np.float64)
    noise = strategy.solve(np.eye(strategy.rows(steps)))
    factor = np.linalg.cholesky(noise @ noise.T)
    return np.tril(np.linalg.solve(factor, np.eye(steps)))


class NoLikelihood(ValueError):
    """Raised if there is no way to compute the exact likelihood ratio of a mechanism."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Game:
    """The game in which somebody tells from y whether the example took part.

    Attributes:
        mechanism: what is audited.
        matrix: M of ``whitening_matrix``.
        scheme: whose draws the example follows: the mechanism's own, or that of its users.
        known: what of the draws the reader is told besides, in words; empty if nothing.
        inexact: why scores are not the exact likelihood ratio, in words; empty if they are.
    """

    mechanism: MatrixMechanism
    matrix: Array
    scheme: Scheme
    known: str = ""
    inexact: str = ""

    @property
    def who(self) -> str:
        """The name of those who are there or not, in the plural."""
        return "examples"

    @property
    def audited(self) -> dict[str, int]:
        """Numbers that say whose game it is; none where all examples are alike."""
        return {}

    @property
    def sigma(self) -> float:
        """σ, the noise multiplier."""
        return self.mechanism.noise_multiplier

    def likelihood(self, scheme: Scheme | None = None) -> Likelihood:
        """The exact ratio under the scheme, or under the same one with another probability.

        Raises:
            NoLikelihood: if there is none; the message says why.
        """
        return _likelihood(scheme or self.scheme, self.matrix, self.sigma)

    def scores(self, outputs: Array) -> Array:
        """The score that tells best if the example took part: larger if it did.

        log (P/Q)(y) where that is exact. Where columns overlap too much it is the formula for
        columns that do not, and for other schemes the matched filter of the mean participation,
        ⟨M E[x], y⟩/σ². Counting is sound with any score.

        Args:
            outputs: y, shape (samples, n).

        Returns:
            Shape (samples,).
        """
        if not self.inexact:
            return self.likelihood().log_ratio(outputs)
        if isinstance(self.scheme, Poisson | MinSep):
            warm = isinstance(self.scheme, MinSep) and self.scheme.warm_start
            p, b = self.scheme.probability, self.scheme.min_sep
            ages = Ages(matrix=self.matrix, sigma=self.sigma, probability=p, min_sep=b, warm=warm)
            return ages.log_ratio(outputs)
        mean = np.full(self.scheme.steps, self.scheme.rate)
        return np.asarray(outputs @ (self.matrix @ mean)) / self.sigma**2

    def draws(self, count: int, seed: int, scheme: Scheme | None = None) -> Array:
        """Independent x from streams of the scheme, or of one of ``denser``; shape (count, n)."""
        return participations(scheme or self.scheme, count, seed).astype(np.float64)

    def denser(self) -> list[Scheme]:
        """The scheme with larger probabilities, if it has any; ``likelihood`` takes these too."""
        scheme = self.scheme
        if not isinstance(scheme, Poisson | MinSep | CyclicPoisson):
            return []
        rates = [rate * scheme.probability for rate in _RATES]
        return [dataclasses.replace(scheme, probability=rate) for rate in rates if rate < 0.9]

    def mean(self) -> Array:
        """E[x] up to a factor, shape (n,)."""
        if isinstance(self.scheme, CyclicPoisson):
            return (np.arange(self.scheme.steps) % self.scheme.cycle == 0).astype(np.float64)
        return np.full(self.scheme.steps, self.scheme.rate)

    def rates(self) -> Array | None:
        """The chance of x_t > 0 of every step, shape (n,); ``None`` if it is not known."""
        return step_rates(self.scheme)

    @property
    def forgetful(self) -> bool:
        """True if participations in different steps are independent of each other."""
        return isinstance(self.scheme, Poisson | CyclicPoisson)

    def several(self) -> Array | None:
        """The chance of x_t > 1 given x_t > 0, shape (n,); ``None`` if it is not known or 0."""
        return None

    def play(self, count: int, seeds: tuple[int, int, int]) -> Played:
        """Runs with the audited examples or users, and as many runs without them.

        Args:
            count: how many of each.
            seeds: of the draws, and of the noise of the runs with and without.
        """
        taken = self.draws(count, seeds[0])
        noise = [noises(self.mechanism, count, seed) for seed in seeds[1:]]
        return Played(
            taken=taken,
            noise=noise[1],
            inside=self.scores((taken + noise[0]) @ self.matrix.T),
            outside=self.scores(noise[1] @ self.matrix.T),
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """Runs of a game.

    Attributes:
        taken: x of the runs with whoever is audited, shape (count, n).
        noise: σ w of the runs without, shape (count, n).
        inside: scores of the runs with, shape (count,).
        outside: scores of the runs without, shape (count,).
    """

    taken: Array
    noise: Array
    inside: Array
    outside: Array


def game_of(mechanism: MatrixMechanism) -> Game:
    """The game, with the draws hidden as the guarantee of the scheme has them hidden.

    The part of an example of ``CyclicPoisson`` is told, as its accountants tell it: the first one,
    which has the most turns.

    Raises:
        ValueError: if there is no noise, or batches are cut, or a unit has several examples.
    """
    if mechanism.noise_multiplier == 0:
        raise ValueError("noise_multiplier=0: without noise there is nothing to audit")
    scheme = mechanism.scheme.participants
    name = type(scheme).__name__
    if scheme.max_batch_size is not None:
        raise ValueError(
            f"{name}: max_batch_size={scheme.max_batch_size}: whether a drawn example is kept "
            "depends on the other examples, which the one-example audit ignores; audit it with "
            "max_batch_size=None"
        )
    if scheme.unit.kind != "example":
        raise ValueError(
            f"{name} protects users with several examples, but this audit concerns one example: "
            "use audit_users"
        )
    known = "which part of the cycle is the example's" if isinstance(scheme, CyclicPoisson) else ""
    game = Game(mechanism=mechanism, matrix=whitening_matrix(mechanism), scheme=scheme, known=known)
    try:
        game.likelihood()
    except NoLikelihood as reason:
        return dataclasses.replace(game, inexact=str(reason))
    return game


def _likelihood(scheme: Scheme, matrix: Array, sigma: float) -> Likelihood:
    if isinstance(scheme, Poisson):
        return _coins(scheme.probability, 1, False, matrix, sigma)
    if isinstance(scheme, MinSep):
        return _coins(scheme.probability, scheme.min_sep, scheme.warm_start, matrix, sigma)
    if isinstance(scheme, CyclicPoisson):
        return _cyclic(scheme, matrix, sigma)
    if isinstance(scheme, BallsInBins):
        patterns = np.tile(np.eye(scheme.bins), (1, scheme.epochs))
        weights = np.full(scheme.bins, 1.0 / scheme.bins)
        return PatternMixture(matrix=matrix, sigma=sigma, patterns=patterns, weights=weights)
    if isinstance(scheme, RandomAllocation):
        return _allocation(scheme, matrix, sigma)
    if isinstance(scheme, Shuffled):
        return _shuffled(scheme, matrix, sigma)
    raise NoLikelihood(f"no likelihood ratio is known for scheme {type(scheme).__name__}")


def _coins(p: float, b: int, warm: bool, matrix: Array, sigma: float) -> Likelihood:
    if orthogonal_from(matrix, b):
        if b == 1:
            return Coins(matrix=matrix, sigma=sigma, probabilities=np.full(len(matrix), p))
        return Ages(matrix=matrix, sigma=sigma, probability=p, min_sep=b, warm=warm)
    bands = bandwidth(matrix)
    if len(window_patterns(max(bands, b) - 1, b)) > MOST_STATES:
        raise NoLikelihood(
            f"{bands} bands with a separation of {b}: more than {MOST_STATES} patterns of "
            "participations overlap in one output, which is too many for the exact likelihood "
            "ratio; audit fewer bands, or a larger separation"
        )
    return Trellis(
        matrix=matrix, sigma=sigma, probability=p, min_sep=b, warm=warm and b > 1, bands=bands
    )


def _cyclic(scheme: CyclicPoisson, matrix: Array, sigma: float) -> Likelihood:
    """The likelihood ratio for the first part, which is in Poisson batches every b steps."""
    own = np.zeros(scheme.steps)
    own[:: scheme.cycle] = scheme.probability
    if not orthogonal_from(matrix[:, :: scheme.cycle], 1):
        raise NoLikelihood(
            f"columns of the strategy that are cycle={scheme.cycle} steps apart overlap, so the "
            "draws of a part do not separate; audit a strategy with at most as many bands"
        )
    return Coins(matrix=matrix, sigma=sigma, probabilities=own)


def _allocation(scheme: RandomAllocation, matrix: Array, sigma: float) -> Likelihood:
    t, k = scheme.steps_per_epoch, scheme.participations
    if scheme.epochs == 1 and k == 1:
        weights = np.full(t, 1.0 / t)
        return PatternMixture(matrix=matrix, sigma=sigma, patterns=np.eye(t), weights=weights)
    if orthogonal_from(matrix, 1):
        return Subsets(matrix=matrix, sigma=sigma, picks=k, epoch=t)
    raise NoLikelihood(
        f"RandomAllocation with participations={k}, epochs={scheme.epochs} and a strategy whose "
        "columns overlap, so that draws of neighboring epochs overlap; audit Identity, or a "
        "single participation"
    )


def _shuffled(scheme: Shuffled, matrix: Array, sigma: float) -> Likelihood:
    if scheme.reshuffle and scheme.epochs > 1:
        raise NoLikelihood(
            "Shuffled with reshuffle=True: the orders of several epochs do not separate in this "
            "audit; audit reshuffle=False"
        )
    epoch = scheme.steps_per_epoch
    patterns = np.tile(np.eye(epoch), (1, scheme.epochs))
    sizes = np.full(epoch, float(scheme.batch_size))
    sizes[-1] = scheme.dataset_size - scheme.batch_size * (epoch - 1)
    weights = sizes / scheme.dataset_size
    return PatternMixture(matrix=matrix, sigma=sigma, patterns=patterns, weights=weights)
