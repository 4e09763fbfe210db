"""The noise that b-min-sep sampling takes, estimated from a few thousand samples; no guarantee."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy.signal import lfilter

from dptrain.accounting.losses import gaussian, hockey_stick
from dptrain.accounting.min_sep.pair import MinSepLaw, participations
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.simulation.simulation import chunks, default_threads
from dptrain.core import Array

_CHUNK_BYTES = 32 << 20
_PILOT = 2048
_OWN = (1.0, 1.0)
_ROUGH = ((5.0, 2.0), (4.0, 1.3))
# Times the chance of taking part, and times the strength of what it adds.
_TILTS = tuple((rate, scale) for rate in (4.0, 10.0, 25.0) for scale in (1.3, 2.0, 3.0, 5.0))
_STEP = 1.25
_LEAST = 1e-4  # of the unamplified σ, below which nothing is looked for
_CLOSE = 0.01  # of log δ
_FAR = 0.3  # of log δ, after the last round
_FEW = 12.0  # samples' worth of δ, which chance may show
_ROUNDS = 6
_CHOICES = 4  # of a tilt


@dataclasses.dataclass
class TiltedEstimate:
    """δ of laws of b-min-sep sampling at one ε, from samples of another such law.

    δ(ε) = E_{y~P}[(1 - e^{ε-L(y)})_+] in the remove direction, the larger one of subsampling. Few
    samples of P show a δ of 1e-6. Those of P', where the example takes part more often and adds
    more, do: δ = E_{y~P'}[(P/P')(y) (1 - e^{ε-L})_+], and both P/Q and P'/Q are exact for each y.
    The terms have no useful bound, so this proves nothing; what it is good for is comparing.
    All laws and σ share their random numbers, which makes differences surer than values.

    Args:
        epsilon: ε > 0.
        delta: the δ to be reached.
        samples: a value of δ is the mean of.
        seed: of the samples.
    """

    epsilon: float
    delta: float
    samples: int = 8192
    seed: int = 0
    _tilt: tuple[float, float] | None = dataclasses.field(default=None, init=False, repr=False)

    def delta_at(self, law: MinSepLaw, sigma: float) -> float:
        """δ(ε) of (P, Q) at σ, by the tilt that was found last."""
        return float(self._terms(law, sigma, self._tilt or _OWN, self.samples).mean())

    def noise(self, law: MinSepLaw, start: float | None = None) -> float:
        """A σ at which δ(ε) is near the target.

        Args:
            law: the law.
            start: where to look first, such as the σ of a similar law.

        Returns:
            σ, at most what the unamplified Gaussian mechanism needs. Where no tilt tells, one at
            which none showed more than the target.
        """
        ceiling = law.sensitivity / gaussian.largest_mu(self.epsilon, self.delta)
        if start is not None and self._tilt is not None:
            found = self._solve(law, min(start, ceiling), ceiling)
            if found is not None:
                return found
        low = self._approach(law, ceiling)
        high = min(ceiling, low * _STEP)
        for _ in range(_CHOICES):
            found = self._solve(law, low, ceiling)
            if found is not None:
                return found
            # δ falls by orders of magnitude within one step of σ, and the tilt that suits the large
            # one misses the small one: choose it again nearer to the target.
            middle = math.sqrt(low * high)
            if self._choose(law, middle) > self.delta:
                low = middle
            else:
                high = middle
        return high

    def _solve(self, law: MinSepLaw, sigma: float, ceiling: float) -> float | None:
        """σ by secant steps in log σ, or ``None`` where the tilt does not fit what it meets.

        A tilt far from what counts shows too small a δ, or none, and the less the smaller σ is:
        whoever then lowers σ never comes back.
        """
        last: tuple[float, float] | None = None
        slope = -10.0
        for _ in range(_ROUNDS):
            found = self.delta_at(law, sigma)
            if found <= 0.0:
                return None
            at, excess = math.log(sigma), math.log(found / self.delta)
            if abs(excess) < _CLOSE:
                break
            if last is not None and at != last[0]:
                slope = min(-1.0, max(-80.0, (excess - last[1]) / (at - last[0])))
            last = at, excess
            sigma = min(ceiling, math.exp(at - min(0.4, max(-0.4, excess / slope))))
            if sigma == ceiling and at == math.log(ceiling):
                break
        else:
            if abs(excess) > _FAR:
                return None
        # The law's own samples show a δ that is much too large.
        own = float(self._terms(law, sigma, _OWN, self.samples).mean())
        return sigma if own <= 3.0 * self.delta + _FEW / self.samples else None

    def _approach(self, law: MinSepLaw, ceiling: float) -> float:
        """A σ where δ is above the target, and the tilt with the least variance there."""
        sigma = ceiling
        while sigma > _LEAST * ceiling:
            # No tilt shows too much but by chance, and the law's own samples miss no large δ.
            shown = (self._terms(law, sigma, tilt, _PILOT).mean() for tilt in (_OWN, *_ROUGH))
            if max(shown) > self.delta:
                break
            sigma /= _STEP
        self._choose(law, sigma)
        return sigma

    def _choose(self, law: MinSepLaw, sigma: float) -> float:
        """Take the tilt with the least variance at σ; returns δ there."""
        tried = {tilt: self._terms(law, sigma, tilt, _PILOT) for tilt in _TILTS}
        # A tilt that misses what counts has a small mean, and may well have a small variance too.
        largest = float(np.median([terms.mean() for terms in tried.values()]))
        fair = {tilt: terms for tilt, terms in tried.items() if terms.mean() >= 0.5 * largest}
        self._tilt = min(fair, key=lambda tilt: fair[tilt].std() / max(fair[tilt].mean(), 1e-300))
        return float(fair[self._tilt].mean())

    def _terms(
        self, law: MinSepLaw, sigma: float, tilt: tuple[float, float], samples: int
    ) -> Array:
        drawn = chunks(
            functools.partial(_weighted, law, sigma, self.epsilon, tilt),
            lanes=max(64, min(1024, _CHUNK_BYTES // (8 * law.steps))),
            seed=[self.seed],
            samples=samples,
            threads=default_threads(),
        )
        return np.concatenate(list(drawn))


def _weighted(
    law: MinSepLaw,
    sigma: float,
    epsilon: float,
    tilt: tuple[float, float],
    rng: np.random.Generator,
    size: int,
) -> Array:
    """(P/P')(y) (1 - e^{ε-L(y)})_+ for y ~ P', whose mean is δ(ε)."""
    rate, scale = tilt
    tilted = dataclasses.replace(
        law, probability=min(1.0, rate * law.probability), coefficients=scale * law.coefficients
    )
    times, lanes = participations(tilted, rng, size)
    taking = np.zeros((law.steps, size))
    taking[times, lanes] = 1.0
    outputs = lfilter(tilted.coefficients, [1.0], taking, axis=0)
    outputs += sigma * rng.standard_normal((law.steps, size), dtype=np.float32)
    loss = log_ratio(law, sigma, outputs)
    weight = np.exp(loss - log_ratio(tilted, sigma, outputs))
    return np.asarray(weight * hockey_stick(loss, epsilon))
