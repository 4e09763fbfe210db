"""Every field of a vision run, with its type, default and meaning."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from dptrain.sampling import BallsInBins, MinSep, Poisson, Scheme
from dptrain.strategies import Strategy
from recipes.strategy import build_strategy

DATA_SETS = ("digits",)
SCHEMES = ("MinSep", "Poisson", "BallsInBins")
NOISE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULES = ("constant", "linear", "cosine")

# Fields that a resumed run may change: they decide neither the model nor its guarantee.
FREE_ON_RESUME = ("output", "overwrite", "plots", "checkpoint_every", "evaluate_every")


@dataclasses.dataclass
class DataSettings:
    """Which images, and how many of them are held out."""

    name: str = "digits"
    test_fraction: float = 0.2
    split_seed: int = 0
    image_size: int = 32


@dataclasses.dataclass
class ModelSettings:
    """A VGG: channels per block, groups of its GroupNorm, width of its dense layer."""

    channels: list[int] = dataclasses.field(default_factory=lambda: [32, 64, 128])
    groups: int = 8
    hidden: int = 128
    seed: int = 0  # of the initial weights; public


@dataclasses.dataclass
class SchemeSettings:
    """How batches are drawn; ``min_sep`` and ``warm_start`` are MinSep's."""

    type: str = "MinSep"
    batch_size: float = 128.0  # the expected one, a public constant
    min_sep: int = 8
    warm_start: bool = True


@dataclasses.dataclass
class PrivacySettings:
    """The target (epsilon, delta), or a noise multiplier; delta = null is 1/(2N).

    ``secure``, ``noise_dtype`` and ``regenerate_noise`` are those of ``make_private``.
    """

    epsilon: float | None = 8.0
    delta: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0
    secure: bool = False
    noise_dtype: str = "float32"
    regenerate_noise: bool = False


@dataclasses.dataclass
class OptimizerSettings:
    """SGD with momentum, and the learning rate's course over the run."""

    lr: float = 0.5
    momentum: float = 0.9
    schedule: str = "constant"


@dataclasses.dataclass
class VisionSettings:
    """A whole run. Give ``steps`` or ``epochs`` (expected passes over the training set).

    ``strategy`` is any strategy of dptrain: the name of its class as ``type``, and its fields.
    """

    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    scheme: SchemeSettings = dataclasses.field(default_factory=SchemeSettings)
    strategy: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "BandMF", "bands": 8}
    )
    privacy: PrivacySettings = dataclasses.field(default_factory=PrivacySettings)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    steps: int | None = None
    epochs: float | None = None
    grad_sample_mode: str = "hooks"
    max_physical_batch_size: int | None = None
    seed: int | None = None  # null: fresh entropy for sampling and noise; a number is a secret
    threads: int | None = None  # null: torch's own choice; part of what makes a run repeatable
    evaluate_every: int = 50
    checkpoint_every: int = 50
    plots: bool = True
    output: str = "runs/vision"
    overwrite: bool = False

    def validate(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        for field, value, choices in (
            ("data.name", self.data.name, DATA_SETS),
            ("scheme.type", self.scheme.type, SCHEMES),
            ("privacy.noise_dtype", self.privacy.noise_dtype, tuple(NOISE_DTYPES)),
            ("optimizer.schedule", self.optimizer.schedule, SCHEDULES),
        ):
            if value not in choices:
                raise ValueError(f"{field}={value!r}: choose one of {', '.join(choices)}")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs}: give exactly one of them and set "
                "the other to null"
            )
        if (self.privacy.epsilon is None) == (self.privacy.noise_multiplier is None):
            raise ValueError(
                f"privacy.epsilon={self.privacy.epsilon} and privacy.noise_multiplier="
                f"{self.privacy.noise_multiplier}: give exactly one and set the other to null"
            )
        if self.privacy.secure and self.seed is not None:
            raise ValueError(
                f"privacy.secure=true with seed={self.seed}: a seed that is written down is a key "
                "that others can find; set seed to null, or privacy.secure to false"
            )
        self.build_strategy()
        for field, number in (
            ("scheme.batch_size", self.scheme.batch_size),
            ("optimizer.lr", self.optimizer.lr),
            ("steps", self.steps),
            ("epochs", self.epochs),
            ("threads", self.threads),
            ("evaluate_every", self.evaluate_every),
            ("checkpoint_every", self.checkpoint_every),
        ):
            if number is not None and not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{field}={number}: must be positive")
        if not 0 <= self.optimizer.momentum < 1:
            raise ValueError(f"optimizer.momentum={self.optimizer.momentum}: must lie in [0, 1)")

    def resolved(self, dataset_size: int) -> VisionSettings:
        """The same settings with δ and the number of steps worked out for N examples."""
        self.validate()
        delta = self.privacy.delta
        if delta is None:
            delta = 1 / (2 * dataset_size)
        steps = self.steps
        if steps is None:
            assert self.epochs is not None
            steps = max(1, round(self.epochs * dataset_size / self.scheme.batch_size))
        return dataclasses.replace(
            self, privacy=dataclasses.replace(self.privacy, delta=delta), steps=steps, epochs=None
        )

    def build_scheme(self, dataset_size: int) -> Scheme:
        """The sampling scheme of resolved settings."""
        assert self.steps is not None
        size = self.scheme.batch_size
        if self.scheme.type == "Poisson":
            return Poisson.for_batch_size(
                batch_size=size, dataset_size=dataset_size, steps=self.steps
            )
        if self.scheme.type == "BallsInBins":
            bins = round(dataset_size / size)
            if bins < 1 or self.steps % bins:
                raise ValueError(
                    f"steps={self.steps}: BallsInBins with scheme.batch_size={size:g} has {bins} "
                    f"bins, and a run is whole rounds of them; use steps={bins} times a number"
                )
            return BallsInBins(bins=bins, epochs=self.steps // bins, dataset_size=dataset_size)
        return MinSep.for_batch_size(
            batch_size=size,
            dataset_size=dataset_size,
            min_sep=self.scheme.min_sep,
            steps=self.steps,
            warm_start=self.scheme.warm_start,
        )

    def build_strategy(self) -> Strategy:
        """The noise strategy, not yet bound to a number of steps."""
        return build_strategy(self.strategy)
