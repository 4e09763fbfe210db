"""The laws of b-min-sep sampling that are simulated: of whole batches, and of cut ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dptrain.accounting.base.curve import Curve
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import Asked, TiltedMinSep
from dptrain.accounting.min_sep.pair import min_sep_law
from dptrain.accounting.min_sep.truncated.curve import TruncatedMinSepCurve, truncated_curve
from dptrain.accounting.min_sep.truncated.full_batches import FullBatches
from dptrain.accounting.min_sep.truncated.truncated_losses import TruncatedMinSepLosses
from dptrain.accounting.simulation.law import PlainLaw, SimulatedLaw, TermsAtEpsilon, least_shown
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies.toeplitz import BandedToeplitz

# Work of the orders from whose bound sampling starts: a second of compiled code.
_QUICK_WORK = 2 * 10**8
# What a core draws in about a minute: rows of a sample, each of a few normals' cost and a
# multiplication for every band.
_MOST_ROWS, _ROW = 5e11, 100
_MOST_SAMPLES = 10**8


class WholeBatches(SimulatedLaw):
    """A law whose bounds rest on those of whole batches: the orders that take no time first.

    Args:
        whole: the moments of whole batches.
        asked: the engine that draws.
        of: the curve that rests on such moments; by default they themselves.
    """

    def __init__(
        self,
        whole: MinSepRenyiCurve,
        asked: Asked = "auto",
        of: Callable[[MinSepRenyiCurve], Curve] = lambda whole: whole,
    ) -> None:
        quick = whole.up_to(_QUICK_WORK)
        self.whole, self._curve, self._asked = whole, of(whole), asked
        self._quick = self._curve if quick is whole else of(quick)
        self._last: tuple[float, TiltedMinSep] | None = None

    @property
    def curve(self) -> Curve:
        """The curve of all affordable orders."""
        return self._curve

    def least_sigma(self, epsilon: float, delta: float, *, progress: bool) -> float | None:
        """The least σ by the orders that take a second at most: samples start from there."""
        return least_shown(self._quick, epsilon, delta, progress=progress)

    def better_sigma(
        self, sigma: float, epsilon: float, delta: float, *, progress: bool
    ) -> float | None:
        """A better σ by all affordable orders."""
        if self._quick is self._curve or self._curve.epsilon(sigma, delta) > epsilon:
            return None
        return least_shown(self._curve, epsilon, delta, progress=progress, start=sigma)

    def to_dict(self) -> dict[str, Any]:
        """The law of whole batches, and the engine that draws."""
        # A seed means other draws in another one.
        engine = "numba" if self._asked == "auto" else self._asked
        return {**self.whole.law.to_dict(), "engine": engine}

    @property
    def most_samples(self) -> int:
        """Number of samples that take minutes."""
        law = self.whole.law
        return min(_MOST_SAMPLES, int(_MOST_ROWS / (law.steps * (_ROW + law.bands))))

    def terms(self, sigma: float) -> TermsAtEpsilon:
        """The terms of whole batches."""
        return self.at(sigma).both

    def at(self, sigma: float) -> TiltedMinSep:
        """The terms of whole batches at σ, the last ones kept."""
        # One at a time: its messages may take a gigabyte.
        if self._last is None or self._last[0] != sigma:
            self._last = None
            self._last = sigma, TiltedMinSep(self.whole, sigma, self._asked)
        return self._last[1]


class RarelyCut(WholeBatches):
    """The terms of whole batches, each larger by what cutting them costs at most."""

    def __init__(self, scheme: MinSep, curve: TruncatedMinSepCurve, asked: Asked = "auto") -> None:
        super().__init__(
            curve.whole, asked, of=lambda whole: dataclasses.replace(curve, whole=whole)
        )
        self._scheme, self._cut = scheme, curve

    def to_dict(self) -> dict[str, Any]:
        """The law of whole batches, and the cap."""
        return {
            **super().to_dict(),
            "dataset_size": self._scheme.dataset_size,
            "max_batch_size": self._scheme.max_batch_size,
        }

    @property
    def most_samples(self) -> int:
        """Number of samples that take minutes."""
        return _MOST_SAMPLES

    def terms(self, sigma: float) -> TermsAtEpsilon:
        """The terms of whole batches, raised."""
        whole = self.at(sigma)

        def both(epsilon: float) -> dict[str, WeightedTerms]:
            remove, add = self._cut.losses(sigma, np.array([epsilon]))
            return {
                "remove": _raised(whole.remove(epsilon), float(remove[0])),
                "add": _raised(whole.add(epsilon), float(add[0])),
            }

        return both


def _raised(terms: WeightedTerms, loss: float) -> WeightedTerms:
    """Terms that are larger by a constant, as is then the root of the mean of their squares."""

    def draw(rng: np.random.Generator, size: int) -> Array:
        return terms.draw(rng, size) + loss

    return dataclasses.replace(terms, ceiling=terms.ceiling + loss, draw=draw)


def simulated_law(mechanism: MatrixMechanism, asked: Asked) -> SimulatedLaw:
    """The law of a mechanism that ``covered_refusal`` does not refuse.

    Whole batches; where ``max_batch_size`` is rarely reached, these and what cutting them costs;
    where it often is, the pair of cut batches.
    """
    scheme, strategy = mechanism.scheme, mechanism.strategy
    if scheme.max_batch_size is None:
        return WholeBatches(MinSepRenyiCurve(min_sep_law(mechanism)), asked)
    assert isinstance(scheme, MinSep)
    if not often_cut(mechanism):
        return RarelyCut(scheme, truncated_curve(mechanism), asked)
    assert isinstance(strategy, BandedToeplitz)
    return PlainLaw(TruncatedMinSepLosses(scheme, strategy.first_column(scheme.steps)))


def often_cut(mechanism: MatrixMechanism) -> bool:
    """True if full batches are met so often that the pair of cut batches shows more."""
    scheme = mechanism.scheme
    if scheme.max_batch_size is None:
        return False
    assert isinstance(scheme, MinSep)
    return FullBatches.of(scheme).drawn * scheme.dataset_size > 1.0
