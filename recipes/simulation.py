"""Cheap tuning: a run at a fraction of the batch size and noise, which is not private.

Constant signal-to-noise scale-down (Sander, Stock & Sablayrolles 2023, "TAN Without a Burn"): the
noise on the mean gradient, σ/B, stays as it is when both are divided by the same factor, and so
does the learning curve, about; the work of a step falls by the factor. σ/factor protects nobody.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from dptrain import MatrixMechanism
from dptrain.accounting import calibrate
from dptrain.sampling import Scheme
from recipes.runfolder import NOT_PRIVATE
from recipes.settings import RunSettings


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The settings of a simulated run, and of the run that it stands for.

    Attributes:
        mechanism: the scaled-down mechanism.
        full: JSON-ready description of the full run.
    """

    mechanism: MatrixMechanism
    full: dict[str, Any]

    @classmethod
    def of(cls, settings: RunSettings, *, plan: MatrixMechanism, small: Scheme) -> Simulation:
        """Scale the noise of ``plan`` down to ``small``, whose batches are divided by the factor.

        Args:
            settings: resolved; the target or the noise multiplier is that of the full run.
            plan: the run that is simulated, with any noise.
            small: its scheme with batches divided by ``settings.simulate``.
        """
        privacy, strategy = settings.privacy, plan.strategy
        sigma, promised = privacy.noise_multiplier, None
        if sigma is None:
            assert privacy.epsilon is not None
            assert privacy.delta is not None
            found = calibrate(
                scheme=plan.scheme,
                strategy=strategy,
                epsilon=privacy.epsilon,
                delta=privacy.delta,
                accountant=settings.build_accountant(plan),
            )
            sigma, promised = found.mechanism.noise_multiplier, found.guarantee.epsilon
        assert settings.simulate is not None
        scaled = sigma / settings.simulate
        return cls(
            MatrixMechanism(scheme=small, strategy=strategy, noise_multiplier=scaled),
            {
                "factor": settings.simulate,
                "noise_multiplier": sigma,
                "expected_batch_size": plan.scheme.expected_batch_size,
                "epsilon": promised,
                "delta": privacy.delta,
            },
        )

    def describe(self) -> str:
        """The text that the user reads instead of a guarantee."""
        full, mechanism = self.full, self.mechanism
        promise = ""
        if full["epsilon"] is not None:
            promise = f" (which would be ε = {full['epsilon']:.6g}, δ = {full['delta']:.6g})"
        return (
            f"NOT PRIVATE: a simulation at 1/{full['factor']:g} of batch size and noise, for "
            "tuning only. It ran with expected batch size "
            f"{mechanism.scheme.expected_batch_size:.6g} and σ = {mechanism.noise_multiplier:.6g} "
            f"in place of {full['expected_batch_size']:.6g} and "
            f"{full['noise_multiplier']:.6g}{promise}. Nothing that it wrote is protected: do not "
            "release the model, and remember that choices made by it on private data are not "
            "covered by the later run's guarantee either."
        )

    def mark(self, folder: str | pathlib.Path) -> None:
        """Leave a file in the run's folder that says so, before the first step."""
        facts = json.dumps(self.full, indent=2)
        text = f"# Not private\n\n{self.describe()}\n\n```json\n{facts}\n```\n"
        (pathlib.Path(folder) / NOT_PRIVATE).write_text(text, encoding="utf-8")
