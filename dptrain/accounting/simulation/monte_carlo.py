"""Accountants that bound δ by simulated privacy losses."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dptrain.accounting.base.accountant import Cost, Profile
from dptrain.accounting.base.curve import convex_envelope
from dptrain.accounting.base.statement import (
    check_delta,
    check_epsilon,
    checked_grid,
    checked_sigma,
    without_noise,
)
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.hockey_stick_terms import declare_epsilons
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.certificate import (
    certify_noise,
    check_certificate,
    fresh_seed,
)
from dptrain.accounting.simulation.certificate_cache import attempts_of
from dptrain.accounting.simulation.confidence import (
    check_resolution,
    largest_threshold,
    upper_confidence,
)
from dptrain.accounting.simulation.declaration import request_of, verdict_of
from dptrain.accounting.simulation.moments import KeptMoments, loss_moments
from dptrain.accounting.simulation.simulation import Simulation
from dptrain.core import Array, Guarantee
from dptrain.mechanism import MatrixMechanism

_MINUTES = 2000  # steps at which δ = 1e-5 still takes minutes
GUARANTEE, PROFILE = 2, 3  # purposes of random streams, beside those of the certificate


class Estimate(NamedTuple):
    """Point estimates of δ over a grid of ε, with standard errors; they prove nothing."""

    epsilon: Array
    remove: Array
    add: Array
    remove_error: Array
    add_error: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonteCarloAccountant(SimulatedAccountant):
    """Bounds from the simulated losses of a ``Simulation``, which a subclass picks.

    Args:
        samples: samples a direction in ``guarantee``; by default 60/δ.
        profile_samples: samples a direction in ``profile`` and ``estimate``; by default
            what two hundred million steps hold (a few seconds), within 10^5 and 10^6.

    With ``cache`` an interrupted ``guarantee`` leaves its samples there, and the same call
    continues; for ``calibrate`` see ``certify_noise``.
    """

    samples: int | None = None
    profile_samples: int | None = None

    instead: ClassVar[str] = "an accountant without simulation"  # where samples would be too many
    counts: ClassVar[tuple[str, ...]] = ("samples", "profile_samples", "max_samples", "threads")

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes to hours: 60/δ samples and more."""
        return Cost.MINUTES if mechanism.steps <= _MINUTES else Cost.HOURS

    @abstractmethod
    def simulation(self, mechanism: MatrixMechanism) -> Simulation:
        """The pair (P, Q) of a mechanism that is not refused, without its σ."""

    def checked(self, mechanism: MatrixMechanism) -> Simulation:
        """The pair (P, Q) of the mechanism, without its σ.

        Raises:
            ValueError: if the mechanism is refused.
        """
        self.check_covers(mechanism)
        return self.simulation(mechanism)

    def calibrate(self, mechanism: MatrixMechanism, *, epsilon: float, delta: float) -> Guarantee:
        """The least certified σ for (ε, δ): kind VERIFIED, chance of a wrong verdict included.

        Raises:
            ValueError: if the mechanism is refused, ε or δ is out of range, δ needs more than
                ``max_samples``, or a cached certificate is corrupt.
        """
        check_epsilon(epsilon)
        check_delta(delta, mechanism.scheme)
        simulation = self.checked(mechanism)
        self._check_job(verdict_of(delta, self.attempts).samples, delta)
        certificate = certify_noise(
            simulation,
            epsilon=epsilon,
            delta=delta,
            seed=self.seed,
            threads=self.threads,
            progress=self.progress,
            cache=self.cache,
            recheck=self.recheck,
            attempts=self.attempts,
        )
        return self.verified(mechanism, certificate, epsilon=epsilon, delta=delta)

    def guarantee(self, mechanism: MatrixMechanism, *, delta: float) -> Guarantee:
        """The least ε of a declared grid that the simulation supports at δ: kind CONFIDENCE.

        A grid point is accepted if the mean of (1 - e^{ε-L})_+ is at most δ' in both directions,
        with δ' such that exp(-s·KL(δ'‖δ)) ≤ q; the answer is the least ε such that it and all
        larger points accept. It is wrong with probability at most q
        (docs/theory/certification.md#thm-confidence-grid;
        ``test_guarantee_brackets_the_gaussian``). The largest point is the unamplified Gaussian's ε
        and needs no verdict.

        Raises:
            ValueError: if the mechanism is refused, δ not in (0, 1), or the samples are too few or
                too many.
        """
        check_delta(delta, mechanism.scheme)
        simulation, sigma = self.checked(mechanism), checked_sigma(mechanism)
        if sigma == 0.0:
            return without_noise(mechanism, self, delta)
        samples = self.samples or math.ceil(60.0 / delta)
        self._check_job(samples, delta)
        threshold = largest_threshold(delta, samples, self.failure_probability)
        top = gaussian.epsilon(delta, simulation.sensitivity / sigma)
        grid = declare_epsilons(top)
        kept = None
        if self.cache is not None:
            asked = {"sigma": sigma, "delta": delta, "samples": samples, "threshold": threshold}
            kept = KeptMoments(Path(self.cache), simulation, asked)
        seed, means = self._means(
            simulation, sigma, grid - simulation.slack, samples, GUARANTEE, kept
        )
        # The factor covers the rounding of the sums.
        rejected = np.nonzero(~(means[:, 0] * (1 + 1e-12) <= threshold).all(axis=0))[0]
        least = 0 if rejected.size == 0 else int(rejected[-1]) + 1
        certificate = {
            "law": simulation.to_dict(),
            "noise_multiplier": sigma,
            "seed": str(seed),
            "samples": samples,
            "threshold": threshold,
            "failure_probability": self.failure_probability,
            "grid": {"points": len(grid), "first": float(grid[0]) if len(grid) else top},
            "ceiling": top,
        }
        epsilon = float(grid[least]) if least < len(grid) else top
        return self.confident(mechanism, certificate, epsilon=epsilon, delta=delta)

    def _drawn_again(self, certificate: dict[str, Any]) -> Self:
        again = super()._drawn_again(certificate)
        return dataclasses.replace(again, samples=certificate["samples"])

    def _certified_again(
        self, mechanism: MatrixMechanism, certificate: dict[str, Any]
    ) -> Guarantee:
        simulation = self.checked(mechanism)
        epsilon, delta = (certificate["request"][name] for name in ("epsilon", "delta"))
        request = request_of(simulation, epsilon, delta, attempts_of(certificate["request"]))
        self._check_job(request["samples"], delta)
        check_certificate(
            certificate, simulation, request, threads=self.cores, progress=self.progress
        )
        return self.verified(mechanism, certificate, epsilon=epsilon, delta=delta)

    def profile(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Profile:
        """Upper confidence values of δ(ε): all of them hold at once except with probability q.

        Each is the Bernoulli-KL upper bound at q over the number of points and directions, or the
        unamplified Gaussian's δ where that is smaller, or what follows from the chance of never
        taking part, or a chord in e^ε between such bounds
        (docs/theory/certification.md#thm-confidence-curve). The plain means are those of
        ``estimate``.

        Raises:
            ValueError: if the mechanism is refused or the grid is not ascending and ≥ 0.
        """
        simulation, sigma, grid = self._grid(mechanism, epsilon)
        if sigma == 0.0:
            return self.together(grid, np.ones_like(grid), np.ones_like(grid))
        samples, share = self._profile_size(simulation), self.failure_probability / (2 * grid.size)
        means = self._means(simulation, sigma, grid - simulation.slack, samples, PROFILE)[1][:, 0]
        remove = np.minimum(
            gaussian.delta(grid, simulation.sensitivity / sigma), simulation.participation
        )
        add = np.where(grid < simulation.add_limit, remove, 0.0)
        upper = [
            convex_envelope(
                grid,
                np.minimum([upper_confidence(m, samples, share) for m in row.tolist()], certain),
            )
            for row, certain in zip(means, (remove, add), strict=True)
        ]
        return self.together(grid, upper[0], upper[1])

    def estimate(self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike) -> Estimate:
        """Plain means and standard errors of δ(ε) in both directions; no guarantee.

        Raises:
            ValueError: as ``profile``, or without noise.
        """
        simulation, sigma, grid = self._grid(mechanism, epsilon)
        if sigma == 0.0:
            raise ValueError("noise_multiplier=0.0: nothing to estimate without noise; δ is 1")
        samples = self._profile_size(simulation)
        moments = self._means(simulation, sigma, grid, samples, PROFILE)[1]
        variance = np.maximum(moments[:, 1] - moments[:, 0] ** 2, 0.0)
        errors = np.sqrt(variance / samples)
        return Estimate(grid, moments[0, 0], moments[1, 0], errors[0], errors[1])

    def _grid(
        self, mechanism: MatrixMechanism, epsilon: npt.ArrayLike
    ) -> tuple[Simulation, float, Array]:
        grid = checked_grid(epsilon)
        return self.checked(mechanism), checked_sigma(mechanism), grid

    def _profile_size(self, simulation: Simulation) -> int:
        return self.profile_samples or min(1_000_000, max(100_000, 200_000_000 // simulation.work))

    def _check_job(self, samples: int, delta: float) -> None:
        if samples > self.max_samples:
            least = delta * samples / self.max_samples  # samples are in proportion to 1/δ
            raise ValueError(
                f"delta={delta}: simulation would take {samples:.3g} samples a direction, above "
                f"max_samples={self.max_samples}, enough for δ of about {least:.2g} or more; raise "
                f"max_samples, or use a larger δ or {self.instead}"
            )
        check_resolution(delta)

    def _means(
        self,
        simulation: Simulation,
        sigma: float,
        grid: Array,
        samples: int,
        purpose: int,
        kept: KeptMoments | None = None,
    ) -> tuple[int, Array]:
        """Seed, and the two moments of (1 - e^{ε-L})_+: shape (direction, moment, len(grid))."""
        return loss_moments(
            simulation,
            sigma,
            grid,
            seed=fresh_seed(self.seed),
            purpose=[purpose],
            samples=samples,
            threads=self.cores,
            progress=self.progress,
            kept=kept,
        )
