"""The default accountant for b-min-sep sampling: importance sampling below a proven bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, get_args

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve
from dptrain.accounting.min_sep.importance_terms import Asked, TiltedMinSep
from dptrain.accounting.min_sep.law import min_sep_law, min_sep_refusal
from dptrain.accounting.min_sep.renyi import MinSepRenyiCurve
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.law import SimulatedLaw, TermsAtEpsilon, least_shown
from dptrain.core import checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep

# Work of the orders from whose bound sampling starts: a second of compiled code.
_QUICK_WORK = 2 * 10**8
# What a core draws in about a minute: rows of a sample, each of a few normals' cost and a
# multiplication for every band.
_MOST_ROWS, _ROW = 5e11, 100


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


class _MinSepLaw(WholeBatches):
    @property
    def most_samples(self) -> int:
        law = self.whole.law
        return int(_MOST_ROWS / (law.steps * (_ROW + law.bands)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSepImportance(SimulatedAccountant):
    """Certification of b-min-sep sampling, bands ≤ min_sep, by the terms of ``TiltedMinSep``.

    Args:
        engine: ``"auto"`` (compiled code) or ``"cuda"``: noise and losses on a GPU by torch, after
            participations that compiled code draws. It is part of the certificate, as one seed
            means other draws in another engine. Drawing raises ``ValueError`` without numba, of the
            extra ``fast``, or without the GPU; reading a certificate does not. The other options
            are those of ``SimulatedAccountant``.
    """

    engine: Asked = "auto"

    name = "min-sep-importance"
    display = "b-min-sep importance sampling"
    formerly = ("min-sep-monte-carlo",)
    refines = True

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("engine", self.engine, get_args(Asked))

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """``None`` for b-min-sep laws with a banded Toeplitz C, bands ≤ b."""
        return min_sep_refusal(mechanism)

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where noise is independent and the loss is known without samples."""
        scheme = mechanism.scheme
        # Without separation it is Poisson sampling, with p = 1 from a random start balls in bins.
        own = (
            isinstance(scheme, MinSep)
            and scheme.min_sep > 1
            and not (scheme.probability == 1.0 and scheme.warm_start)
        )
        if mechanism.strategy.bands == 1 and not own:
            return "the noise is independent, where the loss is known without samples"
        return None

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes at most at the usual δ."""
        return Cost.MINUTES

    def law(self, mechanism: MatrixMechanism) -> SimulatedLaw:
        """Rényi divergences of small orders, and a Gaussian loss in the add direction."""
        return _MinSepLaw(MinSepRenyiCurve(min_sep_law(mechanism)), self.engine)
