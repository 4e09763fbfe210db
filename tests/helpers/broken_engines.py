"""Engines that are broken on purpose, each with an audit that finds it, and the audit's power.

A fault replaces a method of the real engine for as long as its context lasts. The power is the
chance that the audit named beside it fails: computed from laws in closed form, never counted. All
audits are made so strict that an engine that is right fails with a chance of at most ``CHANCE``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from scipy.stats import binom, norm

from dptrain import BandMF, Identity, MatrixMechanism, MinSep, Poisson, account, profile
from dptrain.auditing import (
    CanaryRun,
    StatedCurve,
    audit_canaries,
    check_participations,
    game_of,
    run_canaries,
)
from dptrain.engine.optimizer import PrivateOptimizer
from dptrain.sampling import Scheme
from tests.helpers.power import power_against_scaled_noise, power_of_counting

CHANCE = 1e-6  # that an audit of an engine that is right fails
VERDICT = CHANCE / 4  # of each of an audit's four verdicts
STRETCH = 4.0  # norm of a canary's gradient over R
DELTA = 1e-4
REUSED = 5  # the step that has the noise of the one before


@dataclasses.dataclass(frozen=True)
class Fault:
    """A way to break the engine.

    Attributes:
        what: in words.
        found_by: what finds it, in words.
        broken: the engine is, in this context.
        mechanism: of the run that is audited.
        spare: coordinates that are nobody's in it.
        power: the chance that the audit fails.
        run: trains on canaries.
    """

    what: str
    found_by: str
    broken: Callable[[], contextlib.AbstractContextManager[Any]]
    mechanism: MatrixMechanism
    spare: int
    power: Callable[[], float]
    run: Callable[..., CanaryRun] = run_canaries

    def audited(self, seed: int) -> tuple[str, ...]:
        """What a run of the engine, as it is at the moment, contradicts."""
        found = self.run(self.mechanism, spare=self.spare, seed=seed, progress=False)
        if self.mechanism.noise_multiplier < _LEGIBLE:
            return drawn_wrongly(self.mechanism, found)
        epsilon, curve = stated(self.mechanism)
        return audit_canaries(
            self.mechanism,
            found,
            epsilon=epsilon,
            delta=DELTA,
            curve=curve,
            confidence=1 - CHANCE,
        ).violations


@functools.lru_cache(maxsize=16)
def stated(mechanism: MatrixMechanism) -> tuple[float, StatedCurve]:
    """ε at ``DELTA`` and the curve, by an accountant that is quick and gives draws no credit."""
    epsilon = account(mechanism, delta=DELTA, accountant="gaussian").epsilon
    grid = np.linspace(0.0, min(4.0, 1.5 * epsilon), 9)
    found = profile(mechanism, grid, accountant="gaussian")
    return epsilon, StatedCurve(epsilon=found.epsilon, remove=found.remove, add=found.add)


# Noise beside which it is plain who took part: no entry of it reaches one half.
_LEGIBLE = 0.01


def drawn_wrongly(mechanism: MatrixMechanism, found: CanaryRun) -> tuple[str, ...]:
    """What contradicts the scheme in who took part, read from a release of hardly any noise."""
    taken = np.rint(found.released).astype(np.int8)
    findings = [
        finding
        for game, rows in found.games(mechanism)
        if found.included[rows].any()
        for finding in check_participations(game, taken[rows][found.included[rows]])
    ]
    return tuple(each.what for each in findings if each.p_value < CHANCE / len(findings))


@contextlib.contextmanager
def _noise(change: Callable[[int, list[Any], list[Any]], list[Any]]) -> Iterator[None]:
    """``change`` sees the step, its noise and that of the step before, and says what is added."""
    whole = PrivateOptimizer.add_noise
    before: list[Any] = []

    def add_noise(optimizer: PrivateOptimizer) -> None:
        sums = [p.summed_grad.clone() for p in optimizer.params]
        whole(optimizer)
        noise = [p.grad - total for p, total in zip(optimizer.params, sums, strict=True)]
        added = change(optimizer.steps_executed, noise, before)
        for p, total, values in zip(optimizer.params, sums, added, strict=True):
            p.grad.copy_(total + values)
        before[:] = noise

    with mock.patch.object(PrivateOptimizer, "add_noise", add_noise):
        yield


def quieter() -> contextlib.AbstractContextManager[None]:
    """Nine tenths of the noise."""
    return _noise(lambda step, noise, before: [0.9 * values for values in noise])


def reused() -> contextlib.AbstractContextManager[None]:
    """A step has the noise of the one before once more."""
    return _noise(lambda step, noise, before: before if step == REUSED else noise)


def coins_alone(
    kind: type[Scheme], rate: Callable[[Any], float]
) -> contextlib.AbstractContextManager[Any]:
    """Schemes of a kind toss a coin of this rate for each example, and heed nothing else."""

    def stream(scheme: Any, seed: int) -> Any:
        size = scheme.dataset_size
        plain = Poisson(probability=rate(scheme), dataset_size=size, steps=scheme.steps)
        return plain.stream(seed)

    return mock.patch.object(kind, "stream", stream)


def unseparated() -> contextlib.AbstractContextManager[Any]:
    """b-min-sep draws at its rate, and bars nobody."""
    return coins_alone(MinSep, lambda scheme: scheme.rate)


def unclipped() -> contextlib.AbstractContextManager[Any]:
    """The gradients of the last layer, which are ``STRETCH`` R long, are not clipped."""
    whole = PrivateOptimizer.add_noise

    def add_noise(optimizer: PrivateOptimizer) -> None:
        optimizer.params[-1].summed_grad.mul_(STRETCH)
        whole(optimizer)

    return mock.patch.object(PrivateOptimizer, "add_noise", add_noise)


@contextlib.contextmanager
def realized() -> Iterator[None]:
    """The sum is divided by the number of examples that were drawn, not by the expected one."""
    plain = PrivateOptimizer._step

    def counted(optimizer: Any, closure: Any) -> Any:
        optimizer.rows_of_the_step = len(optimizer.clipper.batch.indices)
        return plain(optimizer, closure)

    def scale_grad(optimizer: Any) -> None:
        for p in optimizer.params:
            p.grad.div_(max(1, optimizer.rows_of_the_step))

    with (
        mock.patch.object(PrivateOptimizer, "_step", counted),
        mock.patch.object(PrivateOptimizer, "scale_grad", scale_grad),
    ):
        yield


# Everybody takes part in every step: the game is that of a Gaussian of μ = 1.
_KNOWN = MatrixMechanism(
    scheme=Poisson(probability=1.0, dataset_size=4000, steps=4),
    strategy=Identity(),
    noise_multiplier=2.0,
)
_MIN_SEP = MatrixMechanism(
    scheme=MinSep(probability=0.3, min_sep=3, dataset_size=300, steps=12),
    strategy=BandMF(bands=3),
    noise_multiplier=3.0,
)
_POISSON = MatrixMechanism(
    scheme=Poisson(probability=0.05, dataset_size=400, steps=10),
    strategy=Identity(),
    noise_multiplier=4.0,
)
_SPARE = 2000


def _power_quieter() -> float:
    steps = _MIN_SEP.steps
    return power_against_scaled_noise(0.9, runs=_SPARE, steps=steps, alpha=VERDICT / 3)


def _power_reused() -> float:
    """Of the correlation r of two steps Fisher's transformation is normal, of spread 1/√m."""
    steps = _MIN_SEP.steps
    matrix = game_of(_MIN_SEP).matrix
    noise = np.linalg.inv(matrix)
    noise[REUSED] = noise[REUSED - 1]
    covariance = matrix @ noise @ (matrix @ noise).T
    scale = np.sqrt(np.diag(covariance))
    r = np.abs(covariance / np.outer(scale, scale) - np.eye(steps)).max()
    pairs = steps * (steps - 1) / 2
    needed = norm.isf(VERDICT / 3 / pairs / 2) / np.sqrt(_SPARE)
    return float(norm.sf(np.sqrt(_SPARE) * (needed - np.arctanh(min(r, 1 - 1e-9)))))


def _power_unseparated() -> float:
    """One pair of participations that are too near is proof."""
    scheme: Any = _MIN_SEP.scheme
    return shown_by_one(never_near(scheme.rate, scheme), canaries=scheme.dataset_size)


def never_near(p: float, scheme: Any) -> float:
    """Chance that who takes part with probability p, barred by nothing, never does so too soon."""
    free, barred = 1.0, [0.0] * (scheme.min_sep - 1)  # by the age of the last participation
    for _ in range(scheme.steps):
        free, barred = (
            (free + barred[-1]) * (1 - p),
            [free * p, *(chance * (1 - p) for chance in barred[:-1])],
        )
    return free + sum(barred)


def shown_by_one(none: float, *, canaries: int) -> float:
    """Chance that a canary is in and shows something, which one does not with chance ``none``."""
    return 1 - ((1 + none) / 2) ** canaries


def _power_unclipped() -> float:
    """At ε = 2 half of those that are in have μ = 4, and the test speaks from 2.5 on.

    The audit chooses among tests on half of the runs, and finds one that is no weaker there.
    """
    t, epsilon = 2.5, 2.0
    size = _KNOWN.scheme.dataset_size
    curve = norm.cdf(0.5 - epsilon) - np.exp(epsilon) * norm.cdf(-0.5 - epsilon)
    runs = int(binom.ppf(1e-4, size, 0.5)) // 2  # rarely fewer of either kind, and half are counted
    power = power_of_counting(
        hit_rate=(norm.sf(t - 1) + norm.sf(t - STRETCH)) / 2,
        false_rate=norm.sf(t),
        runs=runs,
        epsilon=epsilon,
        delta=float(curve),
        alpha=VERDICT,
    )
    return power - 2e-4


def _power_realized() -> float:
    """The noise of a step has B̄ over its batch's size times what it should."""
    scheme: Any = _POISSON.scheme
    p, size, steps = scheme.probability, scheme.dataset_size, scheme.steps
    sizes: npt.NDArray[np.int64] = np.arange(1, size + 1)
    found = [
        power_against_scaled_noise(
            p * size / drawn, runs=_SPARE, steps=1, alpha=VERDICT / 3 / steps
        )
        for drawn in sizes
    ]
    return float(1 - (1 - binom.pmf(sizes, size, p) @ np.array(found)) ** steps)


FAULTS = {
    "noise": Fault(
        what="nine tenths of the noise",
        found_by="size of the noise in nobody's coordinates",
        broken=quieter,
        mechanism=_MIN_SEP,
        spare=_SPARE,
        power=_power_quieter,
    ),
    "separation": Fault(
        what="b-min-sep bars nobody",
        found_by="who took part, read from a run with hardly any noise",
        broken=unseparated,
        mechanism=_MIN_SEP.with_noise(_LEGIBLE / 10),
        spare=2,
        power=_power_unseparated,
    ),
    "clipping": Fault(
        what="one of two layers is not clipped (norms 4 R)",
        found_by="counting canaries against the stated curve",
        broken=unclipped,
        mechanism=_KNOWN,
        spare=_SPARE,
        power=_power_unclipped,
    ),
    "reuse": Fault(
        what="one step has the noise of the step before",
        found_by="correlations of the whitened noise",
        broken=reused,
        mechanism=_MIN_SEP,
        spare=_SPARE,
        power=_power_reused,
    ),
    "divisor": Fault(
        what="the sum is divided by the size of the batch",
        found_by="size of the noise of single steps",
        broken=realized,
        mechanism=_POISSON,
        spare=_SPARE,
        power=_power_realized,
    ),
}
