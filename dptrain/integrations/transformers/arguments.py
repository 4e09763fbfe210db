"""The arguments of a private run beside ``TrainingArguments``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dptrain.core import checks
from dptrain.engine import LIMITS
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy

# What ``make_private`` calls the numbers that are asked for.
_NUMBERS = {
    "epsilon": "target_epsilon",
    "delta": "target_delta",
    "noise_multiplier": "noise_multiplier",
    "per_example_max_grad_norm": "max_grad_norm",
}


def _option(default: Any, text: str) -> Any:
    """A field that ``HfArgumentParser`` shows with its help."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(kw_only=True)
class PrivacyArguments:
    """The guarantee that is wanted, and how it is met; read by ``HfArgumentParser`` too.

    Attributes:
        epsilon: ε > 0 that the noise is calibrated to, at ``delta``.
        delta: δ in (0, 1), below 1/N for N examples, often 1/(2N).
        noise_multiplier: σ ≥ 0 in units of R, instead of ``epsilon``.
        per_example_max_grad_norm: R > 0, the bound on the L2 norm of *one example's* gradient. It
            may be given as ``max_grad_norm=`` too, the engine's name for it; ``TrainingArguments``
            has a field of that name, which clips the mean gradient of a batch and is not used.
        scheme: how batches are drawn: the name of a scheme; its fields as a mapping (``{"type":
            "MinSep", "min_sep": 16}``) or as JSON text; or a ``Scheme``, which states the steps and
            the batch size itself. Without a ``Scheme``, steps and batch size are those of
            ``TrainingArguments``.
        strategy: how noise is correlated, likewise: a name, a mapping, JSON, or a ``Strategy``.
        user_column: column of the training data with the user of an example, or a list of its
            users: users are protected and not examples, and ``scheme`` has to be one of users. It
            is taken away before examples reach the collator.
        accountant: one by name, instead of the tightest that applies.
        secure_noise: draw noise from cryptographic bits on a GPU too, as on a CPU anyway; slower.
        ledger: file that records released steps, so that a resumed run cannot release a step in two
            versions.
        noise_seed: makes the run reproducible and its noise known to whoever knows the number. For
            tests; ``None`` draws fresh secret seeds, and ``TrainingArguments.seed`` is never used
            for noise or sampling.
        public_evaluation: says that evaluation data, which no noise protects, hold nothing of the
            people who are protected. Without it, evaluation on rows of the training data is refused
            or kept from all that is released, and so are data that cannot be compared with them.
        log_training_loss: also send figures of the training batches to the services of
            ``report_to``. They are computed without noise and are not covered by the guarantee.

    Raises:
        TypeError, ValueError: naming the argument, the value and the remedy.
    """

    epsilon: float | None = _option(None, "target ε; the noise is calibrated to it")
    delta: float | None = _option(None, "δ, below 1/N for N examples")
    noise_multiplier: float | None = _option(
        None, "noise multiplier σ in units of the clipping norm, instead of epsilon"
    )
    per_example_max_grad_norm: float = _option(
        1.0, "clipping norm: bound on the norm of one example's gradient"
    )
    # HfArgumentParser takes the first of these types where the second is None.
    scheme: str | None | dict[str, Any] | Scheme = _option(  # noqa: RUF009, RUF036
        "Poisson", "sampling scheme: a name, or JSON with its fields"
    )
    strategy: str | None | dict[str, Any] | Strategy = _option(  # noqa: RUF009, RUF036
        "Identity", "noise correlation strategy: a name, or JSON with its fields"
    )
    user_column: str | None = _option(None, "column of the data set with the users of each example")
    accountant: str | None = _option(None, "name of the accountant; the tightest one by default")
    secure_noise: bool = _option(False, "use cryptographically secure noise on a GPU too")
    ledger: str | None = _option(None, "file that records the released steps")
    noise_seed: int | None = _option(
        None, "for tests only: anyone who knows the seed can subtract the noise"
    )
    public_evaluation: bool = _option(
        False, "state that the evaluation data come from other people"
    )
    log_training_loss: bool = _option(
        False, "send the loss of training batches, which is not private, to loggers"
    )

    # No option of a command line, where TrainingArguments has it.
    max_grad_norm: dataclasses.InitVar[float | None] = None

    def __post_init__(self, max_grad_norm: float | None) -> None:
        owner = type(self).__name__
        if max_grad_norm is not None:
            if self.per_example_max_grad_norm != 1.0:
                raise ValueError(
                    f"{owner}: max_grad_norm={max_grad_norm} and "
                    f"per_example_max_grad_norm={self.per_example_max_grad_norm} are two names of "
                    "the same bound: set one of them"
                )
            self.per_example_max_grad_norm = max_grad_norm
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError(
                f"{owner}: set epsilon= and delta= to calibrate the noise to them, or "
                "noise_multiplier="
            )
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"{owner}: epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier} are "
                "both given: state the target or the noise, not both"
            )
        if self.delta is None:
            raise ValueError(
                f"{owner}: delta= is missing: set a number below 1/N for N examples, often 1/(2N)"
            )
        for name, asked in _NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                setattr(self, name, checks.number(name, value, owner=owner, **LIMITS[asked]))
        for flag in ("secure_noise", "public_evaluation", "log_training_loss"):
            checks.flag(flag, getattr(self, flag), owner=owner)
        self.scheme = _settings("scheme", self.scheme, Scheme, owner)
        self.strategy = _settings("strategy", self.strategy, Strategy, owner)
        if self.user_column is not None:
            checks.instance("user_column", self.user_column, str, owner=owner)
        if self.noise_seed is not None:
            self.noise_seed = checks.integer("noise_seed", self.noise_seed, minimum=0, owner=owner)

    @property
    def asked(self) -> dict[str, float | None]:
        """The guarantee that is wanted, as a checkpoint keeps it."""
        return {name: getattr(self, name) for name in ("epsilon", "delta", "noise_multiplier")}


def _settings(name: str, value: Any, kind: type, owner: str) -> Any:
    """A value of the kind as it is; anything else as the mapping that a configuration writes."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{owner}: {name}={value!r} is not valid JSON: {error}") from error
    if isinstance(value, str):
        return {"type": value}
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(
        f"{checks.named(name, value, owner)} must be the name of a {name}, a mapping with its "
        f"'type' and fields, or a {kind.__name__}"
    )
