"""BandMF chosen for the sampling that amplifies it: least error at the noise that (ε, δ) takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm

from dptrain.accounting import Accountant, Calibration, calibrate
from dptrain.accounting.base import check_delta, check_epsilon
from dptrain.accounting.min_sep import TiltedEstimate, min_sep_law, min_sep_refusal
from dptrain.core import checks
from dptrain.mechanism import MatrixMechanism
from dptrain.planning.candidates import Settings, settings_of
from dptrain.planning.question import Question
from dptrain.sampling import Scheme
from dptrain.strategies import PREFIX_SUMS, BandMF, Workload, checked_workload

_DECAYS = (1.0, 0.99, 0.97, 0.93, 0.85)
_FIRST = 0.1
_FACTORS = (3.0, 1.7)  # by which κ moves, until no move helps
_LARGEST, _LEAST = 1.0, 1e-3
_USUAL = 24  # trials, for the progress bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmplifiedChoice:
    """The strategy that ``amplified_band_mf`` chose, beside the best ordinary one.

    Attributes:
        strategy: the choice, bound: the coefficients are part of the value and of its hash.
        ordinary: the best ordinary BandMF (``overlap=0``) that was tried, bound.
        error: RMSE·σ/B̄ of ``strategy``, per unit of the clipping norm.
        ordinary_error: the same of ``ordinary``.
        calibration: of ``strategy``, or ``None`` where σ was only estimated.
        ordinary_calibration: of ``ordinary``.
    """

    strategy: BandMF
    ordinary: BandMF
    error: float
    ordinary_error: float
    calibration: Calibration | None
    ordinary_calibration: Calibration | None

    @property
    def gain(self) -> float:
        """The reduction of the error against the ordinary one, as a fraction: never negative."""
        return 1.0 - self.error / self.ordinary_error


@dataclasses.dataclass
class _Search:
    """Errors of values of BandMF at estimated σ, remembered."""

    scheme: Scheme
    steps: int
    workload: Workload
    estimate: TiltedEstimate
    tried: Callable[[], object]
    _found: dict[BandMF, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def error(self, strategy: BandMF) -> float:
        """RMSE times the estimated σ."""
        if strategy not in self._found:
            bound = strategy.bind(self.steps)
            law = min_sep_law(
                MatrixMechanism(scheme=self.scheme, strategy=bound, noise_multiplier=1.0)
            )
            near = min(
                self._found,
                key=lambda other: (
                    abs(math.log((other.overlap + 1e-3) / (strategy.overlap + 1e-3)))
                    + abs(math.log(other.bands / strategy.bands))
                ),
                default=None,
            )
            start = None if near is None else self._found[near][1]
            sigma = self.estimate.noise(law, start)
            self._found[strategy] = bound.rmse(self.steps, self.workload) * sigma, sigma
            self.tried()
        return self._found[strategy][0]

    def best(self, *strategies: BandMF) -> BandMF:
        """The strategy of least error."""
        return min(strategies, key=self.error)

    def ordinary(self, bands: int) -> BandMF:
        """The best ordinary BandMF found by halving the bands for as long as that helps."""
        best = BandMF(bands=bands, workload=self.workload)
        while best.bands > 1:
            fewer = dataclasses.replace(best, bands=best.bands // 2)
            if self.best(best, fewer) is best:
                break
            best = fewer
        return best

    def with_overlap(self, bands: int) -> BandMF:
        """The best BandMF found by changing κ and ρ in turn."""
        start = BandMF(bands=bands, workload=self.workload, overlap=_FIRST)
        best = self._along_overlap(start, _FACTORS[0])
        best = self._along_decay(best)
        best = self._along_overlap(best, _FACTORS[1])
        return self._along_decay(best)

    def _along_overlap(self, best: BandMF, factor: float) -> BandMF:
        for power in (1, -1):
            while True:
                overlap = float(f"{best.overlap * factor**power:.2g}")
                if not _LEAST <= overlap <= _LARGEST:
                    break
                moved = self.best(best, dataclasses.replace(best, overlap=overlap))
                if moved == best:
                    break
                best = moved
        return best

    def _along_decay(self, best: BandMF) -> BandMF:
        for way in (1, -1):
            at = _DECAYS.index(best.overlap_decay)
            while 0 <= at + way < len(_DECAYS):
                at += way
                # The more quickly the weights fall, the larger they are at the start.
                moved = dataclasses.replace(best, overlap_decay=_DECAYS[at])
                if self.best(best, moved) == best:
                    break
                best = moved
        return best


def amplified_band_mf(
    *,
    scheme: Scheme,
    epsilon: float,
    delta: float,
    bands: int | None = None,
    workload: Workload = PREFIX_SUMS,
    certify: bool = True,
    accountant: str | Accountant | None = None,
    samples: int = 8192,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> AmplifiedChoice:
    """The banded Toeplitz C of least RMSE·σ/B̄, where σ is what (ε, δ) takes with this sampling.

    ``BandMF`` minimizes RMSE·‖c‖, which is the error at fixed privacy without amplification. With
    it σ depends on how much columns of different steps overlap as well: overlap and decay of
    ``BandMF`` are searched, for the noise that ``TiltedEstimate`` finds. An estimate decides which
    matrix is proposed and nothing else: training, or ``calibrate``, finds its σ with a proof.

    With ``certify`` the proposal and the best ordinary BandMF are calibrated by the accountant of
    the scheme, and the one of less error is returned: never worse than the ordinary one. δ includes
    the chance that either certificate is wrong (``attempts`` of ``calibrate``). Without, the
    estimates are compared.

    Args:
        scheme: ``MinSep``, ``BallsInBins`` or ``Poisson``; with ``max_batch_size``, the search
            looks at the scheme without it.
        epsilon: target ε > 0.
        delta: target δ in (0, 1).
        bands: most bands, at most the scheme's ``min_sep``, which is the default.
        workload: which queries count; momentum and a learning-rate schedule by ``MomentumSGD``.
        certify: calibrate both (seconds to minutes).
        accountant: who certifies; by default who answers for the scheme.
        samples: of every estimate.
        seed: of the samples; the same seed gives the same choice on one machine, and the returned
            value says what was chosen on every machine.
        progress: show progress bars.
        options: passed on to ``calibrate``.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a target is out of range or out of reach, the workload is made for another n,
            there are more bands than ``min_sep`` or steps, or the scheme's noise does not depend on
            the shape of C (cyclic Poisson) or is not known to.

    Example:
        >>> scheme = MinSep.for_batch_size(batch_size=10, dataset_size=1000, min_sep=8, steps=200)
        >>> choice = amplified_band_mf(scheme=scheme, epsilon=4.0, delta=1e-4, certify=False)
        >>> choice.error <= choice.ordinary_error
        True
    """
    checks.instance("scheme", scheme, Scheme, example="MinSep.for_batch_size(...)")
    epsilon = check_epsilon(epsilon)
    delta = check_delta(delta, scheme)
    checked_workload(workload).check(scheme.steps)
    samples = checks.integer("samples", samples, minimum=256)
    seed = checks.integer("seed", seed, minimum=0)
    plain = scheme
    if scheme.max_batch_size is not None:
        plain = dataclasses.replace(scheme, max_batch_size=None)  # type: ignore[type-var]
    most = min(scheme.min_sep, scheme.steps)
    if bands is None:
        bands = most
    elif checks.integer("bands", bands) > most:
        raise ValueError(f"bands={bands} exceeds min_sep={most} of the scheme: use at most {most}")
    probe = MatrixMechanism(
        scheme=plain, strategy=BandMF(bands=1).bind(scheme.steps), noise_multiplier=1.0
    )
    if reason := min_sep_refusal(probe):
        raise ValueError(
            f"scheme={type(scheme).__name__}: {reason}, for which no strategy is optimized here: "
            "use MinSep, BallsInBins or an ordinary BandMF"
        )
    with tqdm(
        total=_USUAL, desc="choosing C", unit="C", disable=not progress, delay=1.0, leave=False
    ) as bar:
        search = _Search(
            plain,
            scheme.steps,
            workload,
            TiltedEstimate(epsilon, delta, samples, seed),
            functools.partial(_counted, bar),
        )
        ordinary = search.ordinary(bands)
        chosen = search.best(ordinary, search.with_overlap(bands)) if bands > 1 else ordinary
    found = {each: each.bind(scheme.steps) for each in (ordinary, chosen)}
    errors = {each: search.error(each) / scheme.expected_batch_size for each in found}
    shown: dict[BandMF, Calibration] = {}
    if certify:
        for each, bound in found.items():
            shown[each] = calibrate(
                scheme=scheme,
                strategy=bound,
                epsilon=epsilon,
                delta=delta,
                accountant=accountant,
                attempts=len(found),
                **options,
            )
            sigma = shown[each].mechanism.noise_multiplier
            rmse = bound.rmse(scheme.steps, workload)
            errors[each] = rmse * sigma / scheme.expected_batch_size
        chosen = min((ordinary, chosen), key=lambda each: errors[each])
    return AmplifiedChoice(
        strategy=found[chosen],
        ordinary=found[ordinary],
        error=errors[chosen],
        ordinary_error=errors[ordinary],
        calibration=shown.get(chosen),
        ordinary_calibration=shown.get(ordinary),
    )


def amplified_settings(
    question: Question, mechanism: MatrixMechanism, *, progress: bool
) -> list[Settings]:
    """The ``strategy`` group of a BandMF chosen for a plan's pair, if it is not an ordinary one.

    None where the pair has independent noise, or where nothing can be chosen for its scheme.
    """
    scheme, bands = mechanism.scheme, min(question.max_bands, mechanism.scheme.min_sep)
    if not isinstance(mechanism.strategy, BandMF) or bands < 2:
        return []
    if min_sep_refusal(mechanism):
        return []
    found = amplified_band_mf(
        scheme=scheme,
        epsilon=question.epsilon,
        delta=question.delta,
        bands=bands,
        workload=question.workload,
        certify=False,
        progress=progress,
    ).strategy
    if not found.overlap:
        return []
    return [settings_of(dataclasses.replace(found, coefficients=None, steps=None))]


def _counted(bar: tqdm) -> None:
    if bar.n + 1 >= (bar.total or 0):
        bar.total = bar.n + 2  # a longer search than usual
    bar.update()
