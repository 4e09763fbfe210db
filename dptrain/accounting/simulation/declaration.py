"""What is fixed before a verification begins: request, seed, chunks and the grid of σ."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from typing import Any

import numpy as np
import torch

from dptrain.accounting.losses import gaussian
from dptrain.accounting.simulation.certificate_cache import attempts_of
from dptrain.accounting.simulation.chunk_sums import Verdicts
from dptrain.accounting.simulation.confidence import (
    Verdict,
    check_resolution,
    samples_among,
    samples_needed,
)
from dptrain.accounting.simulation.simulation import Simulation
from dptrain.core import checks

METHOD = 3  # raise it when the meaning of a certificate changes: it is part of the cache's key
STEP = 1.01
ESTIMATE, VERIFY = 0, 1  # purposes of the random streams, never shared
# Steps of the grid around the estimate; shared noise makes a further σ cheap, and the far ones
# catch an estimate that came out too low before the unamplified Gaussian has to.
OFFSETS = (-1, 0, 1, 2, 4, 8, 16)


def package_version() -> str:
    """Version of the installed package, or a remark that it runs from a source tree."""
    try:
        return importlib.metadata.version("dptrain")
    except importlib.metadata.PackageNotFoundError:
        return "source tree, not installed"


def generator_versions() -> dict[str, str]:
    """Versions of what turns a seed into losses."""
    return {"numpy": np.__version__, "torch": torch.__version__}


def declare_grid(guess: float, ceiling: float) -> list[int]:
    """Exponents k of the grid 1.01^k around ``guess``, ascending, all below ``ceiling``."""
    center = round(math.log(guess) / math.log(STEP))
    return [center + offset for offset in OFFSETS if STEP ** (center + offset) < ceiling]


def request_of(
    simulation: Simulation, epsilon: float, delta: float, attempts: int = 1
) -> dict[str, Any]:
    """What a certificate answers: its digest finds the certificate in a cache.

    Where it is one of several attempts, their number is part of it.

    Raises:
        ValueError: if ε or δ is out of range, or δ below what is resolved.
    """
    checks.number("epsilon", epsilon, minimum=0)
    verdict = verdict_of(delta, attempts)
    check_resolution(delta)
    return {
        "method": METHOD,
        "law": simulation.to_dict(),
        "epsilon": epsilon,
        "delta": delta,
        "samples": verdict.samples,
        "threshold": verdict.threshold,
        "package": package_version(),
        **({} if attempts == 1 else {"attempts": attempts}),
    }


def verdict_of(delta: float, attempts: int) -> Verdict:
    """What the samples of a certificate prove, one of so many attempts."""
    return samples_needed(delta) if attempts == 1 else samples_among(delta, attempts)


def _proof(request: dict[str, Any]) -> Verdict:
    return verdict_of(request["delta"], attempts_of(request))


def ceiling_of(simulation: Simulation, request: dict[str, Any]) -> float:
    """A σ that the unamplified Gaussian mechanism shows to be (ε, δ_v)-DP: needs no verdict."""
    violated = _proof(request).violated
    return simulation.sensitivity / gaussian.largest_mu(request["epsilon"], violated)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """Everything a verification depends on but its samples, declared before the first of them.

    Args:
        request: see ``request_of``.
        seed: of all streams.
        lanes: samples a chunk.
        slack: what covers the rounding of a loss.
        estimate: the σ around which the grid lies.
        ceiling: a σ that needs no verdict, above the grid.
        exponents: k of the grid.
        sigmas: the grid, σ = 1.01^k, ascending.
        versions: of the libraries that turn seeds into losses.
    """

    request: dict[str, Any]
    seed: int
    lanes: int
    slack: float
    estimate: float
    ceiling: float
    exponents: tuple[int, ...]
    sigmas: tuple[float, ...]
    versions: dict[str, str]

    @classmethod
    def of(
        cls, simulation: Simulation, request: dict[str, Any], *, seed: int, estimate: float
    ) -> Declaration:
        """Declare the grid around an estimate."""
        ceiling = ceiling_of(simulation, request)
        exponents = declare_grid(estimate, ceiling)
        return cls(
            request=request,
            seed=seed,
            lanes=simulation.lanes,
            slack=simulation.slack,
            estimate=estimate,
            ceiling=ceiling,
            exponents=tuple(exponents),
            sigmas=tuple(STEP**exponent for exponent in exponents),
            versions=generator_versions(),
        )

    @property
    def samples(self) -> int:
        """s, a direction."""
        return int(self.request["samples"])

    def verdicts(self) -> Verdicts:
        """Those of no samples yet."""
        threshold = float(self.request["threshold"])
        return Verdicts(self.sigmas, samples=self.samples, threshold=threshold)

    @property
    def chunks(self) -> int:
        """Number of chunks that hold the s samples."""
        return -(-self.samples // self.lanes)

    def samples_in(self, first: int, end: int) -> int:
        """Samples in the chunks first..end-1; only the last chunk of all may be short."""
        return min(end * self.lanes, self.samples) - first * self.lanes

    def size(self, chunk: int) -> int:
        """Samples in one chunk."""
        return self.samples_in(chunk, chunk + 1)

    def check(self, simulation: Simulation, request: dict[str, Any], *, where: str = "") -> None:
        """Refuse to continue a verification as something else than what was declared.

        Raises:
            ValueError: if the request, the simulation, or a library's version is another.
        """
        mine = Declaration.of(simulation, request, seed=self.seed, estimate=self.estimate)
        for field in ("request", "lanes", "slack", "exponents", "versions"):
            declared, here = getattr(self, field), getattr(mine, field)
            if declared != here:
                raise ValueError(
                    f"{where}the declared {field} {_short(declared)} is not what is asked for "
                    f"here, {_short(here)}: use the version and the arguments it was begun with, "
                    "or delete it to begin another attempt"
                )
        # Another machine's last digits are as good; anything else is another grid.
        for declared, here in zip(
            (*self.sigmas, self.ceiling), (*mine.sigmas, mine.ceiling), strict=True
        ):
            if not math.isclose(declared, here, rel_tol=1e-9):
                raise ValueError(f"{where}the declared σ = {declared} should be {here}")

    def evidence(self) -> dict[str, Any]:
        """What of a certificate is settled before its first sample, JSON-ready."""
        proof = _proof(self.request)
        return {
            "request": self.request,
            "seed": str(self.seed),
            "streams": "SFC64 of SeedSequence([seed, purpose], spawn_key=(chunk,)), shared by the "
            f"directions; purpose {ESTIMATE} estimate (and its round), {VERIFY} verify",
            "chunks": {"samples": self.lanes, "count": self.chunks},
            "epsilon_slack": self.slack,
            "violated": proof.violated,
            "failure_probability": proof.failure,
            "delta_proved": proof.delta,
            "estimate": self.estimate,
            "ceiling": {
                "noise_multiplier": self.ceiling,
                "shown_by": "unamplified Gaussian mechanism",
            },
            "versions": self.versions,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **value,
            "seed": str(self.seed),
            "exponents": list(self.exponents),
            "sigmas": list(self.sigmas),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Declaration:
        """Read what ``to_dict`` wrote."""
        exponents = tuple(int(each) for each in value["exponents"])
        sigmas = tuple(float(each) for each in value["sigmas"])
        seed = int(value["seed"])
        return cls(**{**value, "seed": seed, "exponents": exponents, "sigmas": sigmas})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
