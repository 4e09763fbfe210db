"""The fields that every run has, with their types, defaults and meaning."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import Field
from torch import nn

from dptrain import MatrixMechanism, NoiseOptions
from dptrain.accounting import Accountant, accountant_named, find_accountants
from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.clipping import check_mode_name
from dptrain.clipping.base import ClippingStyle
from dptrain.configuration import (
    SIZES,
    build_clipping,
    build_strategy,
    check_scheme,
    expected_batch_size,
)
from dptrain.core import exact_device
from dptrain.engine import ScaledAdam
from dptrain.individual import IndividualFilter
from dptrain.integrations.loggers import TOOLS, check_installed
from dptrain.noise import check_private_folder
from dptrain.strategies import Strategy, check_bands_fit
from recipes.average import Average
from recipes.config import Count, Positive, check_types, flatten, one_of
from recipes.device import unusable
from recipes.filter_settings import COMMON, FilterSettings
from recipes.schedule import SCHEDULES

AUTOCAST = {"bfloat16": torch.bfloat16}
NOISE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Decay = Annotated[float, Field(ge=0, lt=1)]
OPTIMIZERS = ("sgd", "adam", "scaled_adam")

# Fields that a resumed run may change: they decide neither the model nor its guarantee.
FREE_ON_RESUME = (
    "output",
    "overwrite",
    "plots",
    "checkpoint_every",
    "evaluate_every",
    "evaluate_examples",
    "debug_norms",
    "loggers",
    "log_private_metrics",
    "num_workers",
    "privacy.certificates",
    "privacy.noise_folder",
    "individual.report",
    "statement.model",
    "statement.organization",
)


PATHS = ("output", "privacy.certificates", "privacy.noise_folder")


@dataclasses.dataclass
class PrivacySettings:
    """The target (epsilon, delta), or a noise multiplier, and how the noise is made.

    With an individual filter the target is the filter's and ``epsilon`` is null.

    Attributes:
        epsilon: the target ε; null where ``noise_multiplier`` is stated.
        delta: δ; null is 1/(2 · population), which is the number of training examples, or of users
            under a scheme of users.
        noise_multiplier: σ, instead of ``epsilon``.
        max_grad_norm: R, the norm that every example's gradient is clipped to.
        accountant: name of the accountant; null is the tightest that answers.
        certificates: folder in which the certificates of simulated accounting are kept, so that the
            next run of the same mechanism need not simulate again; null keeps none.
        secure: draw noise from cryptographic bits on a GPU too, as on a CPU anyway; slower there,
            and ``seed`` has to be null.
        noise_dtype: of the buffers of past noise, float32 or bfloat16. bfloat16 halves them, and
            the guarantee is then an estimate.
        regenerate_noise: draw past noise again instead of keeping it; BISR and BandInvMF only.
        noise_folder: keep past noise in a file in this folder instead of in memory, with the same
            noise. It has to be on a disk of the machine, yours and closed to others (mode 0700), as
            past noise is as secret as ``seed``; for device cpu. null keeps it in memory.
    """

    epsilon: Positive | None = 8.0
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    noise_multiplier: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    max_grad_norm: Positive = 1.0
    accountant: str | None = None
    certificates: str | None = None
    secure: bool = False
    noise_dtype: Annotated[str, one_of(NOISE_DTYPES)] = "float32"
    regenerate_noise: bool = False
    noise_folder: str | None = None


@dataclasses.dataclass
class StatementSettings:
    """The facts about its author that the privacy statement gives.

    Attributes:
        model: name of the model, with its version; null is not stated.
        organization: whose model it is; null is not stated.
    """

    model: Annotated[str, Field(pattern=r"\S")] | None = None
    organization: Annotated[str, Field(pattern=r"\S")] | None = None


@dataclasses.dataclass
class OptimizerSettings:
    """The optimizer, its parameters and the course of the learning rate.

    Attributes:
        name: sgd, adam or scaled_adam. scaled_adam scales each example's gradient before it is
            clipped (scale-then-privatise), and ``privacy.max_grad_norm`` is of scaled gradients.
        lr: learning rate.
        momentum: of sgd, in [0, 1).
        betas: of adam and scaled_adam, two numbers in [0, 1).
        eps: of adam and scaled_adam, added to the root of the second moment.
        eps_scale: of scaled_adam, added to the root by which gradients are divided.
        schedule: factor of the learning rate over the run: constant, linear or cosine (both fall to
            0), or late_linear (1 for a quarter of the run, then linearly to 1/20 at three
            quarters).
        ema: decay of an exponential moving average of the weights, in (0, 1), which is evaluated
            and saved in place of the last weights. It is made of what was released, so it costs no
            privacy; null is none.
    """

    name: Annotated[str, one_of(OPTIMIZERS)] = "sgd"
    lr: Positive = 0.5
    momentum: Decay = 0.9
    betas: Annotated[list[Decay], Field(min_length=2, max_length=2)] = dataclasses.field(
        default_factory=lambda: [0.9, 0.999]
    )
    eps: Positive = 1e-8
    eps_scale: Positive = 1e-3
    schedule: Annotated[str, one_of(SCHEDULES)] = "constant"
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None

    def build_average(self, model: nn.Module) -> Average | None:
        """The average of the weights that training will release, if one is kept."""
        return None if self.ema is None else Average(model, self.ema)

    def build(self, parameters: Any) -> torch.optim.Optimizer:
        """The optimizer over ``parameters``."""
        if self.name == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)
        betas = (self.betas[0], self.betas[1])
        if self.name == "scaled_adam":
            return ScaledAdam(
                parameters, lr=self.lr, betas=betas, eps=self.eps, eps_scale=self.eps_scale
            )
        return torch.optim.Adam(parameters, lr=self.lr, betas=betas, eps=self.eps)


@dataclasses.dataclass
class RunSettings:
    """A whole run. Exactly one of ``steps`` and ``epochs`` is given.

    Attributes:
        scheme: how batches are drawn: a class as ``type``, and its fields.
        strategy: how the noise of the steps is correlated: a class as ``type``, and its fields.
        privacy: the target and the noise.
        clipping: how gradients are clipped: a class as ``type``, and its fields.
        individual: a privacy budget for every example: a filter's class as ``type``, and its
            fields; ``{type: null}`` is none.
        optimizer: what takes the noisy gradients.
        statement: names that stand in the privacy statement.
        steps: optimizer steps of the whole run.
        epochs: instead of ``steps``, expected passes over the training set.
        simulate: divides batch size and noise by this factor, for cheap tuning. Such a run is **not
            private**, and its folder says so.
        grad_sample_mode: how gradients of single examples are found: bookkeeping, hooks or
            functorch.
        max_physical_batch_size: most examples that are on the device at once; larger batches come
            in parts. null: no limit.
        num_workers: processes that load data.
        device: cpu, cuda, cuda:1 and so on.
        autocast: bfloat16 runs the model within ``torch.autocast``: its products are of numbers of
            eight bits, which pays on graphics cards and on processors with AMX. Weights, gradients
            of single examples, their norms and the noise stay float32, and the guarantee is the
            same. null is float32 throughout.
        seed: of sampling and noise. null draws fresh entropy; a number repeats the run and is a
            **secret**, as whoever knows it can subtract the noise.
        threads: of torch; null is torch's own choice. It is part of what makes a run repeatable.
        debug_norms: add norms of gradients to the training metrics, which are private.
        loggers: what records the run beside metrics.jsonl: tensorboard, wandb (offline), mlflow (a
            local store). They get what may be released; an empty list is none.
        log_private_metrics: send them the private metrics too (of training batches, of held-out
            examples, norms of gradients), under names that say so. No guarantee covers these.
        evaluate_every: steps between two evaluations on the test set.
        evaluate_examples: how many test examples they use; null is all, as the last one always
            does.
        checkpoint_every: steps between two checkpoints.
        plots: draw the curves and the privacy profile at the end; needs matplotlib.
        output: folder of the run.
        overwrite: begin anew in a folder that holds another run.
    """

    free_on_resume: ClassVar[tuple[str, ...]] = FREE_ON_RESUME
    # What is not published: paths, and what may be a path as well as a name on the hub.
    paths: ClassVar[tuple[str, ...]] = PATHS
    paths_or_names: ClassVar[tuple[str, ...]] = ()
    # Whether the recipe's data say which users an example belongs to.
    knows_users: ClassVar[bool] = False

    scheme: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "MinSep", "batch_size": 128.0, "min_sep": 8},
        metadata={"common": SIZES},
    )
    strategy: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "BandMF", "bands": 8}
    )
    privacy: PrivacySettings = dataclasses.field(default_factory=PrivacySettings)
    clipping: dict[str, Any] = dataclasses.field(default_factory=lambda: {"type": "Flat"})
    individual: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": None}, metadata={"common": COMMON}
    )
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    statement: StatementSettings = dataclasses.field(default_factory=StatementSettings)
    steps: Count | None = None
    epochs: Positive | None = None
    simulate: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    grad_sample_mode: str = "bookkeeping"
    max_physical_batch_size: Count | None = None
    num_workers: Annotated[int, Field(ge=0)] = 0
    device: str = "cpu"
    autocast: Annotated[str, one_of(AUTOCAST)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    threads: Count | None = None
    debug_norms: bool = False
    loggers: list[Annotated[str, one_of(TOOLS)]] = dataclasses.field(
        default_factory=lambda: ["tensorboard"]
    )
    log_private_metrics: bool = False
    evaluate_every: Count = 50
    evaluate_examples: Count | None = None
    checkpoint_every: Count = 50
    plots: bool = True
    output: str = "runs/run"
    overwrite: bool = False

    def validate(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the field, the value and the remedy.
            ImportError: if the package of a logger is missing.
        """
        check_types(self)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs}: give exactly one of them and set "
                "the other to null"
            )
        self._check_noise()
        self._check_noise_options()
        self._check_accountant()
        self._check_loggers()
        try:
            check_mode_name(self.grad_sample_mode)
        except ValueError as error:
            raise ValueError(f"grad_sample_mode: {error}") from error
        if self.privacy.secure and self.seed is not None:
            raise ValueError(
                f"privacy.secure=true with seed={self.seed}: a seed that is written down is a key "
                "that others can find; set seed to null, or privacy.secure to false"
            )
        self.build_strategy()
        self.build_clipping()
        check_scheme(self.scheme, users=self.knows_users, steps=self.steps)
        if (nominal := self.scheme.get("nominal_size")) is not None:
            raise ValueError(
                f"scheme.nominal_size={nominal}: it keeps the number of examples private, which "
                "the splits of a recipe read and its output tells; leave it out, or train with "
                "dptrain.PrivacyEngine"
            )
        if reason := unusable(self.device):
            raise ValueError(f"device={self.device!r} cannot be used here: {reason}")
        self._check_bands()

    def _check_noise(self) -> None:
        """Refuse too many targets, or too few."""
        epsilon, sigma = self.privacy.epsilon, self.privacy.noise_multiplier
        individual = FilterSettings.read(self.individual)
        if individual is None:
            if (epsilon is None) == (sigma is None):
                raise ValueError(
                    f"privacy.epsilon={epsilon} and privacy.noise_multiplier={sigma}: give exactly "
                    "one and set the other to null"
                )
            return
        individual.check_noise(epsilon=epsilon, noise_multiplier=sigma, delta=self.privacy.delta)
        if self.simulate is not None:
            raise ValueError(
                f"simulate={self.simulate:g} with individual.type={individual.type}: with less "
                "noise a filter would leave out other examples than in the full run; set one of "
                "them to null"
            )

    def _check_noise_options(self) -> None:
        """Refuse ways to draw and keep noise that contradict each other, or the machine."""
        try:
            folder = self.build_noise().folder
            if folder is not None:
                check_private_folder(folder)
        except ValueError as error:
            raise ValueError(f"privacy: {error}") from error
        except OSError as error:
            raise ValueError(
                f"privacy.noise_folder: {error.strerror}; null keeps past noise in memory"
            ) from error
        if folder is not None and exact_device(torch.device(self.device)).type != "cpu":
            raise ValueError(
                f"privacy.noise_folder={self.privacy.noise_folder!r} with device={self.device!r}: "
                "past noise can be kept in a file on the CPU only; set it to null, or device "
                "to cpu"
            )

    def _check_loggers(self) -> None:
        """Refuse a logger that is named twice, or whose package is missing."""
        if len(set(self.loggers)) < len(self.loggers):
            raise ValueError(f"loggers={self.loggers}: name each of them once")
        check_installed(self.loggers)

    def _check_bands(self) -> None:
        """Refuse more bands than steps, where the steps follow without reading the data."""
        length, steps = self.scheme.get("epoch_length"), self.steps
        if steps is None and self.epochs is not None and isinstance(length, int | float):
            steps = max(1, round(self.epochs * length))
        for name in ("bands", "inverse_bands"):
            bands = self.strategy.get(name)
            if steps is not None and bands is not None:
                try:
                    check_bands_fit(bands, steps, name=name)
                except ValueError as error:
                    raise ValueError(f"strategy: {error}") from error

    def _check_accountant(self) -> None:
        """Refuse the name of no accountant."""
        if self.privacy.accountant is not None:
            try:
                accountant_named(self.privacy.accountant)
            except ValueError as error:
                raise ValueError(f"privacy.{error}; null is the tightest") from error

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that ``autocast`` names; ``None`` where it is null."""
        return None if self.autocast is None else AUTOCAST[self.autocast]

    @property
    def public_facts(self) -> dict[str, Any]:
        """The settings that loggers show: without the secret seed and the machine's settings."""
        stated = flatten(dataclasses.asdict(self))
        hidden = {"seed", "output", *self.local_names()}
        return {name: value for name, value in stated.items() if name not in hidden}

    def local_names(self) -> list[str]:
        """Fields that tell about the machine, if they are set: none of anybody else's business."""
        stated = flatten(dataclasses.asdict(self))
        found = [name for name in self.paths if stated[name] is not None]
        for name in self.paths_or_names:
            value = stated[name]
            if value is not None and _is_path(value):
                found.append(name)
        return found

    def with_steps(self, dataset_size: int) -> Self:
        """The same settings with the number of steps worked out for N examples."""
        self.validate()
        if self.epochs is None:
            return self
        size = expected_batch_size(self.scheme, dataset_size)
        steps = max(1, round(self.epochs * dataset_size / size))
        return dataclasses.replace(self, steps=steps, epochs=None)

    def with_delta(self, population: int) -> Self:
        """The same settings with δ worked out for so many protected units."""
        if self.privacy.delta is not None:
            return self
        individual = FilterSettings.read(self.individual)
        stated = None if individual is None else individual.delta
        delta = 1 / (2 * population) if stated is None else stated
        privacy = dataclasses.replace(self.privacy, delta=delta)
        return dataclasses.replace(self, privacy=privacy)

    def build_accountant(self, mechanism: MatrixMechanism) -> str | Accountant | None:
        """The one asked for; where certificates are to be kept, the one that makes them.

        Raises:
            ValueError: if nobody accounts for the mechanism, or certificates are to be kept and
                whoever does makes none.
        """
        folder, named = self.privacy.certificates, self.privacy.accountant
        found = find_accountants(mechanism, named)
        if folder is None:
            return named
        if not isinstance(found[0], SimulatedAccountant):
            names = ", ".join(member.name for member in found)
            raise ValueError(
                f"privacy.certificates={folder!r}: only simulated accounting makes certificates, "
                f"and scheme.type={type(mechanism.scheme).__name__} with strategy.type="
                f"{type(mechanism.strategy).__name__} is accounted for without ({names})"
                "; set privacy.certificates to null"
            )
        return dataclasses.replace(found[0], cache=folder)

    def build_filter(self) -> IndividualFilter | None:
        """The individual filter, if there is one; steps and δ have been worked out.

        Raises:
            ValueError: if a field of it is out of range.
        """
        individual = FilterSettings.read(self.individual)
        if individual is None:
            return None
        assert self.steps is not None
        assert self.privacy.delta is not None
        return individual.build(delta=self.privacy.delta, steps=self.steps)

    def noise_multiplier(self) -> float | None:
        """σ, stated or that of the filter's ``start``; ``None`` where it is to be calibrated."""
        individual, built = FilterSettings.read(self.individual), self.build_filter()
        if individual is None or built is None or individual.start is None:
            return self.privacy.noise_multiplier
        return individual.noise_multiplier(built)

    @property
    def reports_individual(self) -> bool:
        """True if the run's folder gets the spending of each example."""
        individual = FilterSettings.read(self.individual)
        return individual is not None and individual.report

    def build_noise(self) -> NoiseOptions:
        """Options of the noise.

        Raises:
            ValueError: if two fields contradict each other.
        """
        folder = self.privacy.noise_folder
        return NoiseOptions(
            secure=self.privacy.secure,
            dtype=NOISE_DTYPES[self.privacy.noise_dtype],
            regenerate=self.privacy.regenerate_noise,
            folder=None if folder is None else os.path.expanduser(folder),
        )

    def build_strategy(self) -> Strategy:
        """The noise strategy, not yet bound to a number of steps."""
        return build_strategy(self.strategy)

    def build_clipping(self) -> ClippingStyle:
        """Options of the clipping."""
        return build_clipping(self.clipping)


def _is_path(value: str) -> bool:
    """True if a folder or hub name is a folder, rather than ``name`` or ``owner/name``."""
    path = pathlib.Path(value)
    return path.is_absolute() or value.startswith((".", "~")) or path.exists()
