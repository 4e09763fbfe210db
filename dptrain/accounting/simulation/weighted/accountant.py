"""Accountants that certify by weighted samples, each below a proven bound on δ."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from dptrain.accounting.base.accountant import Profile
from dptrain.accounting.base.curve import LARGEST_SIGMA, Curve, convex_envelope
from dptrain.accounting.base.statement import (
    SMALLEST_SIGMA,
    check_delta,
    check_epsilon,
    checked_grid,
    checked_sigma,
    statement,
    without_noise,
)
from dptrain.accounting.losses.search import least_scale
from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.certificate import fresh_seed
from dptrain.accounting.simulation.confidence import counted_split, upper_confidence
from dptrain.accounting.simulation.declaration import package_version
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.accounting.simulation.weighted.certificate import (
    Declared,
    chosen_point,
    declared_points,
    problem_of,
    redrawn,
)
from dptrain.accounting.simulation.weighted.estimate import estimate_depth
from dptrain.accounting.simulation.weighted.terms import WeightedTerms
from dptrain.accounting.simulation.weighted.verdicts import (
    Point,
    Rule,
    mean_of,
    verify_points,
)
from dptrain.core import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism

METHOD = 2  # raise it when the meaning of a certificate changes
STEP = 1.01
ESTIMATE, VERIFY, GUARANTEE, PROFILE = 10, 11, 12, 13  # purposes of streams, never shared
# What certificates called these methods before accountants had plain names.
_FORMER_NAMES = {
    "balls-in-bins-importance": "balls-in-bins importance sampling",
    "min-sep-importance": "b-min-sep importance sampling",
}
# Points of the declared grid, from the most private one: the last is where the estimate was.
_OFFSETS = (2, 0)
# 1 % a step: a factor of 20,000 in all.
_DEEPEST = 1000
# Of a profile: points that are sampled, as many as ``default_grid`` has, and the least number of
# points that its samples are shared by.
_PROFILE_POINTS, _PROFILE_SHARES = 101, 24
_DEEP = 1e-290

_Both = dict[str, WeightedTerms]
TermsAtEpsilon = Callable[[float], _Both]
"""Weighted terms of both directions at an ε."""


class Bounds(ABC):
    """The deterministic bounds of a mechanism, at any σ, and the terms that refine them."""

    @property
    @abstractmethod
    def curve(self) -> Curve:
        """δ and ε that need no samples."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of everything that the pair depends on, except σ."""

    @abstractmethod
    def tilted(self, sigma: float) -> TermsAtEpsilon:
        """Both directions' terms at an ε, for one σ."""

    @property
    def most_samples(self) -> int:
        """Samples a direction that are worth their time: by default all that are asked for."""
        return 10**9

    def least_sigma(self, epsilon: float, delta: float, *, progress: bool) -> float | None:
        """The least σ at which the bounds show (ε, δ), to a relative 1e-3; ``None`` if none.

        It may leave out bounds that take long: see ``better_sigma``.
        """
        return least_shown(self.curve, epsilon, delta, progress=progress)

    def better_sigma(
        self, sigma: float, epsilon: float, delta: float, *, progress: bool
    ) -> float | None:
        """A σ of at most this one that bounds show which ``least_sigma`` left out, if any."""
        return None


def least_shown(
    curve: Curve, epsilon: float, delta: float, *, progress: bool, start: float = 1.0
) -> float | None:
    """The least σ at which a curve shows (ε, δ), to a relative 1e-3; ``None`` if none."""
    with tqdm(
        desc="deterministic bounds", unit="σ", disable=not progress, delay=2.0, leave=False
    ) as bar:

        def excess(sigma: float) -> float:
            bar.update()
            return math.log(max(curve.epsilon(sigma, delta), 1e-300) / epsilon)

        return least_scale(
            excess,
            start=start,
            relative_tolerance=1e-3,
            smallest=SMALLEST_SIGMA,
            largest=LARGEST_SIGMA,
        )


def _below(bounds: Bounds, ceiling: float, epsilon: float) -> Point:
    """Both directions' terms at σ = ceiling/1.01^point."""

    def terms_at(point: float) -> _Both:
        return bounds.tilted(ceiling / STEP**point)(epsilon)

    return terms_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedAccountant(SimulatedAccountant):
    """Certifies a pair with few weighted samples.

    δ(ε) is the mean of terms that never exceed a proven bound M: so many samples are needed as M/δ
    says, not 1/δ (docs/theory/certification.md#thm-weighted-verdict). Statements and their failure
    are those of ``certify_noise``: a grid is declared, fresh samples verify it from its most
    private point on (the add direction from the other end), and the answer is wrong only if one
    event of probability q happened (docs/theory/certification.md#thm-weighted-looks).

    In ``calibrate`` the chance of failure is a thousandth of δ and part of it. Where more than
    ``max_samples`` samples would be needed to better the deterministic bound, that bound stands.

    Args:
        seed: as for ``SimulatedAccountant``, and so are all options but the last.
        failure_probability: see there.
        max_samples: see there.
        threads: see there.
        cache: see there.
        recheck: see there.
        progress: see there.
        profile_samples: samples a direction of all points of ``profile`` together, of which one
            point gets a twenty-fourth at most. With four times as many the values are nearer to
            the truth by half, and take four times as long.
    """

    max_samples: int = 10**8
    profile_samples: int = 480_000
    counts: ClassVar[tuple[str, ...]] = ("max_samples", "threads", "profile_samples")
    ample: ClassVar[int] = 65_536  # see Rule

    @abstractmethod
    def bounds(self, mechanism: MatrixMechanism) -> Bounds:
        """Those of a mechanism that is not refused."""

    def _checked(self, mechanism: MatrixMechanism) -> Bounds:
        self.check_covers(mechanism)
        return self.bounds(mechanism)

    def _rule(self, bounds: Bounds, violated: float, failure: float) -> Rule:
        return Rule(violated, failure, min(self.max_samples, bounds.most_samples), self.ample)

    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """The least certified σ of a declared grid: kind VERIFIED, a wrong verdict included in δ.

        The run is (ε, δ_v + k q(1-δ_v))-DP with q = δ/(1000 k) for k ``attempts`` and δ_v such that
        this is δ: see ``certify_noise`` for why q counts once in each. The grid's top is a σ at
        which the deterministic bounds show (ε, δ_v): kind UPPER_BOUND where nothing below it was
        shown by samples.

        Raises:
            ValueError: if the mechanism is refused, ε or δ is out of range, no σ reaches them, or a
                cached certificate is corrupt.
        """
        check_epsilon(epsilon)
        check_delta(delta, mechanism.scheme)
        bounds = self._checked(mechanism)
        request = self._request(bounds, epsilon, delta)
        rule = self._calibration_rule(bounds, delta, self.attempts)
        failure, violated = rule.failure, rule.violated
        if self.cache is not None:
            for asked in (request, *self._formerly(request)):
                found = self._cached(Path(self.cache), bounds, asked)
                if found is not None:
                    return self._stated(mechanism, found, epsilon=epsilon, delta=delta)
        seed = fresh_seed(self.seed)
        top = bounds.least_sigma(epsilon, violated, progress=self.progress)
        if top is None:
            raise ValueError(
                f"epsilon={epsilon} at delta={delta} is out of reach even at σ = {LARGEST_SIGMA:g}"
            )
        rows = self._verified_rows(_below(bounds, top, epsilon), rule, seed, VERIFY)
        sigma = top / STEP ** (chosen_point(rows) or 0.0)
        better = bounds.better_sigma(sigma, epsilon, violated, progress=self.progress)
        if better is not None:  # no sample has to show it
            top, rows = min(better, sigma), []
            sigma = top
        certificate = {
            **self._evidence(bounds, rule, seed, rows),
            "request": request,
            "delta_proved": violated + self.attempts * failure * (1.0 - violated),
            "ceiling": top,
            "noise_multiplier": sigma,
        }
        if self.cache is not None:
            certificate_cache.store(Path(self.cache), request, certificate)
        return self._stated(mechanism, certificate, epsilon=epsilon, delta=delta)

    def _cached(
        self, directory: Path, bounds: Bounds, request: dict[str, Any]
    ) -> dict[str, Any] | None:
        """The stored certificate that answers a request, checked; ``None`` if there is none."""
        attempts = certificate_cache.attempts_stored(directory, request)
        asked = request if attempts == 1 else {**request, "attempts": attempts}
        rule = self._calibration_rule(bounds, asked["delta"], attempts)
        declared = self._declared(bounds, rule, asked["epsilon"])
        problems = [functools.partial(problem_of, request=asked, declared=declared)]
        if self.recheck:
            problems.append(functools.partial(redrawn, declared=declared))
        return certificate_cache.load(directory, asked, *problems)

    def _stated(
        self,
        mechanism: MatrixMechanism,
        certificate: dict[str, Any],
        *,
        epsilon: float,
        delta: float,
    ) -> Guarantee:
        """Kind VERIFIED where samples chose σ; where deterministic bounds did, what these are."""
        accepted = [row for row in certificate["grid"] if row["accepted"]]
        if any(row[side]["samples"] for row in accepted for side in DIRECTIONS):
            return self.verified(mechanism, certificate, epsilon=epsilon, delta=delta)
        calibrated = mechanism.with_noise(certificate["noise_multiplier"])
        note = "Deterministic bounds alone show it: samples did not better them"
        return statement(
            calibrated, self, epsilon=epsilon, delta=delta, notes=(note,), kind=Kind.UPPER_BOUND,
            certificate=certificate,
        )  # fmt: skip

    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The least ε of a declared grid that the samples support at δ: kind CONFIDENCE.

        False with probability at most ``failure_probability``; the grid's top is the deterministic
        ε and needs no verdict.

        Raises:
            ValueError: if the mechanism is refused or δ not in (0, 1).
        """
        check_delta(delta, mechanism.scheme)
        bounds, sigma = self._checked(mechanism), checked_sigma(mechanism)
        if sigma == 0.0:
            return without_noise(mechanism, self, delta)
        top = bounds.curve.epsilon(sigma, delta)
        rule = self._rule(bounds, delta, self.failure_probability)
        tilted, seed = bounds.tilted(sigma), fresh_seed(self.seed)

        def epsilon_at(depth: float) -> float:
            return float(top / STEP**depth)

        def terms_at(depth: float) -> _Both:
            return tilted(epsilon_at(depth))

        rows = self._verified_rows(terms_at, rule, seed, GUARANTEE) if top > 0.0 else []
        depth_shown = chosen_point(rows)
        certificate = {
            **self._evidence(bounds, rule, seed, rows),
            "noise_multiplier": sigma,
            "ceiling": top,
        }
        epsilon = top if depth_shown is None else epsilon_at(depth_shown)
        return self.confident(mechanism, certificate, epsilon=epsilon, delta=delta)

    def _certified_again(
        self, mechanism: MatrixMechanism, certificate: dict[str, Any]
    ) -> Guarantee:
        bounds = self._checked(mechanism)
        epsilon, delta = (certificate["request"][name] for name in ("epsilon", "delta"))
        attempts = certificate_cache.attempts_of(certificate["request"])
        request = self.among(attempts)._request(bounds, check_epsilon(epsilon), delta)
        requests = (request, *self._formerly(request))
        certificate_cache.check_request(certificate, *requests)
        rule = self._calibration_rule(bounds, delta, attempts)
        declared = self._declared(bounds, rule, epsilon)
        wrong = problem_of(certificate, certificate["request"], declared)
        if wrong := wrong or redrawn(certificate, declared):
            raise ValueError(f"its certificate is wrong: {wrong}")
        return self._stated(mechanism, certificate, epsilon=epsilon, delta=delta)

    def _request(self, bounds: Bounds, epsilon: float, delta: float) -> dict[str, Any]:
        return {
            "method": {"name": self.name, "version": METHOD},
            "law": bounds.to_dict(),
            "epsilon": epsilon,
            "delta": delta,
            "package": package_version(),
            **({} if self.attempts == 1 else {"attempts": self.attempts}),
        }

    def _calibration_rule(self, bounds: Bounds, delta: float, attempts: int) -> Rule:
        """The split of δ: ``counted_split``."""
        return self._rule(bounds, *counted_split(delta, attempts))

    def _formerly(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The same request under the method's former name: another attempt would cost as much δ."""
        former = _FORMER_NAMES.get(self.name)
        method = {**request["method"], "name": former}
        return [] if former is None else [{**request, "method": method}]

    def _declared(self, bounds: Bounds, rule: Rule, epsilon: float) -> Declared:
        """What a certificate of ``calibrate`` can be checked against."""

        def redraw(ceiling: float, points: Sequence[int], seed: int) -> list[dict[str, Any]]:
            return self._verdicts(points, _below(bounds, ceiling, epsilon), rule, seed, VERIFY)

        return Declared(
            rule=rule,
            step=STEP,
            offsets=_OFFSETS,
            most=_DEEPEST,
            covers=lambda sigma: bounds.curve.epsilon(sigma, rule.violated) <= epsilon,
            terms_at=lambda ceiling: _below(bounds, ceiling, epsilon),
            redraw=redraw,
        )

    def _verified_rows(
        self, terms_at: Point, rule: Rule, seed: int, purpose: int
    ) -> list[dict[str, Any]]:
        """Estimate where to go, declare a grid up to there, and verify it by fresh samples."""
        depth = estimate_depth(
            terms_at,
            rule,
            seed=[seed, ESTIMATE],
            most=_DEEPEST,
            threads=self.cores,
            progress=self.progress,
        )
        return self._verdicts(declared_points(depth, _OFFSETS), terms_at, rule, seed, purpose)

    def _verdicts(
        self, points: Sequence[int], terms_at: Point, rule: Rule, seed: int, purpose: int
    ) -> list[dict[str, Any]]:
        return verify_points(
            points,
            terms_at,
            rule,
            seed=[seed, purpose],
            threads=self.cores,
            progress=self.progress,
            label="certify",
        )

    def _evidence(
        self, bounds: Bounds, rule: Rule, seed: int, rows: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "method": {"name": self.name, "version": METHOD},
            "law": bounds.to_dict(),
            "seed": str(seed),
            "violated": rule.violated,
            "failure_probability": rule.failure,
            "step": STEP,
            "grid": rows,
            "package": package_version(),
        }

    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """Upper confidence values of δ(ε): all of them hold at once except with probability q.

        Sampled at 101 points of the grid at most, the fewer the more samples at each; the
        deterministic bounds and the chords in e^ε between all of these count as well
        (docs/theory/certification.md#thm-confidence-curve).

        Raises:
            ValueError: if the mechanism is refused or the grid is not ascending and ≥ 0.
        """
        grid = checked_grid(epsilon)
        bounds, sigma = self._checked(mechanism), checked_sigma(mechanism)
        if sigma == 0.0:
            return self.together(grid, np.ones_like(grid), np.ones_like(grid))
        values = np.stack(bounds.curve.delta(sigma, grid))
        chosen = np.unique(np.linspace(0, grid.size - 1, _PROFILE_POINTS).round().astype(int))
        share = self.failure_probability / (2 * chosen.size)
        samples = max(1, self.profile_samples // max(_PROFILE_SHARES, chosen.size))
        tilted, seed = bounds.tilted(sigma), fresh_seed(self.seed)
        shown = tqdm(chosen.tolist(), "profile", disable=not self.progress, delay=2.0, leave=False)
        for index in shown:
            both = tilted(grid[index])
            for side, direction in enumerate(DIRECTIONS):
                terms = both[direction]
                if terms.ceiling < _DEEP:
                    continue  # the deterministic value is as good
                stream = [seed, PROFILE, index, side]
                mean = mean_of(terms, samples, seed=stream, threads=self.cores) / terms.ceiling
                mean = min(mean * (1.0 + 1e-12), 1.0)
                upper = terms.ceiling * upper_confidence(mean, samples, share)
                values[side, index] = min(values[side, index], upper)
        remove, add = (convex_envelope(grid, side) for side in values)
        return self.together(grid, remove, add)
