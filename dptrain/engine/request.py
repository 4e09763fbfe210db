"""The request for a run: every argument checked, in one order, before anything is built."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dptrain.accounting.base import check_delta
from dptrain.clipping import choose_mode, parameter_groups
from dptrain.core import checks
from dptrain.distributed import (
    FullySharded,
    bare_module,
    check_not_prepared,
    check_whole_optimizer,
    is_divided,
)
from dptrain.engine.arguments import LIMITS, RunArguments
from dptrain.engine.options import GROUPS, Gradients, Loading, NoiseOptions
from dptrain.engine.sliced import whole_because
from dptrain.engine.validation import check_mode, check_module, check_optimizer, check_public
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import FlatStream, noise_stream
from dptrain.sampling import Poisson, PrivateLoader, Scheme, check_microbatches
from dptrain.sampling.loading import check_length, check_sampler, length_of
from dptrain.strategies import Identity, Strategy

_DELTA = "below 1/N, often 1/(2N) for N examples"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunRequest(RunArguments):
    """The arguments of ``make_private``, every value checked and in its one type.

    The module is without torch's DistributedDataParallel, the strategy bound to the scheme's steps,
    both those of ``mechanism`` where that is given; ``gradients`` has the mode that was chosen, and
    ``loading`` the steps of an epoch of the loader's.

    Attributes:
        parameters: the trainable ones, in the optimizer's order.
        groups: the number of each parameter's group in the clipping style.
        divided: the module, where ``fully_shard`` has divided it among the ranks.
    """

    scheme: Scheme
    strategy: Strategy
    parameters: list[nn.Parameter]
    groups: list[int]
    divided: FullySharded | None = None

    @property
    def delta(self) -> float | None:
        """δ that guarantees are stated at unless another is asked for."""
        if self.target_delta is None and self.individual is not None:
            return self.individual.target_delta
        return self.target_delta

    @property
    def open_noise(self) -> Callable[..., FlatStream]:
        """``noise_stream`` with the options of the run."""
        options = self.noise
        return functools.partial(
            noise_stream,
            secure=options.secure,
            dtype=options.dtype,
            regenerate=options.regenerate,
            folder=options.folder,
        )

    @classmethod
    def checked(cls, asked: RunArguments) -> RunRequest:
        """The request, or the first thing that is wrong with it: see ``make_private``.

        The order is that of how far a mistake reaches: each argument's type and range; arguments
        that contradict each other; the module, the optimizer, the data; the plan of steps; the
        noise stream. No example is read, and nothing of the user's is changed.
        """
        asked = _in_range(asked)
        _check_amount(asked)
        if asked.mechanism is not None:
            _check_only_mechanism(asked)
        _check_secret(asked.noise, asked.seed)

        data, optimizer, gradients = asked.data, asked.optimizer, asked.gradients
        module = bare_module(asked.module, gradients.mode)
        check_whole_optimizer(optimizer, module)
        check_not_prepared(optimizer=optimizer, data=data)
        check_module(module)
        check_public(module, gradients.public)
        mode = choose_mode(gradients.mode, module)
        check_mode(module, mode)
        gradients = dataclasses.replace(gradients, mode=mode)
        divided = FullySharded(module) if FullySharded.there(module) else None
        if divided is not None:
            _check_built_after(optimizer)
        check_optimizer(optimizer, module)
        _check_sliced(asked.noise, optimizer)
        if divided is not None:
            _check_divided(asked.noise, optimizer, module)
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        groups = parameter_groups(gradients.clipping, module, parameters)

        dataset = _dataset_of(data)
        scheme, loading = _planned(asked)
        check_length(dataset, scheme)
        _check_sum(scheme, gradients)
        check_microbatches(loading.max_physical_batch_size, loading.microbatches, scheme.group_size)
        if isinstance(data, DataLoader):
            check_sampler(data)
        if asked.target_delta is not None:
            check_delta(asked.target_delta, scheme, name="target_delta", large="refuse")
        given = asked.strategy if asked.mechanism is None else asked.mechanism.strategy
        strategy = Identity() if given is None else given
        if asked.individual is not None:
            asked.individual.check_plan(scheme, strategy)
        settled: dict[str, Any] = {
            "module": module,
            "parameters": parameters,
            "groups": groups,
            "scheme": scheme,
            "strategy": strategy.bind(scheme.steps),
            "gradients": gradients,
            "loading": loading,
            "divided": divided,
        }
        request = cls(**{**vars(asked), **settled})
        # Whatever the stream refuses is to be refused before minutes of calibration.
        request.open_noise(request.strategy, steps=scheme.steps, like=[torch.empty(1)], seed=0)
        return request


def _in_range(asked: RunArguments) -> RunArguments:
    """The arguments with numbers as such; refuse those of another type or out of range.

    ``None`` passes where it stands for a default.
    """
    a_filter = "GDPFilter(target_epsilon=..., target_delta=..., max_steps=...)"
    for name, kind, example in (
        ("scheme", Scheme, ""),
        ("strategy", Strategy, ""),
        ("mechanism", MatrixMechanism, ""),
        ("individual", IndividualFilter, a_filter),
        ("gradients", Gradients, "Gradients(mode='hooks')"),
        ("noise", NoiseOptions, "NoiseOptions(secure=True)"),
        ("loading", Loading, "Loading(max_physical_batch_size=64)"),
    ):
        value = getattr(asked, name)
        if value is not None or name in GROUPS:
            checks.instance(name, value, kind, example=example)
    seed = None if asked.seed is None else checks.integer("seed", asked.seed, minimum=0)
    remedies = {"target_epsilon": "e.g. 8", "target_delta": _DELTA}
    found: dict[str, Any] = {
        name: checks.number(name, value, remedy=remedies.get(name, ""), **limits)
        for name, limits in LIMITS.items()
        if (value := getattr(asked, name)) is not None or name == "max_grad_norm"
    }
    return dataclasses.replace(asked, seed=seed, **found)


def _planned(asked: RunArguments) -> tuple[Scheme, Loading]:
    """The scheme that is given, or that ``epochs`` of a loader stand for, and how batches come."""
    scheme = asked.scheme if asked.mechanism is None else asked.mechanism.scheme
    if scheme is None:
        return _poisson_like(asked.data, asked.epochs, asked.loading)
    if asked.epochs is not None:
        raise ValueError(
            f"epochs={asked.epochs}: the scheme already fixes the number of steps; leave epochs out"
        )
    return scheme, asked.loading


def _check_amount(asked: RunArguments) -> None:
    """Refuse a noise level that is stated twice, or not at all."""
    sigma, epsilon = asked.noise_multiplier, asked.target_epsilon
    stated = sigma is not None or asked.mechanism is not None
    if asked.individual is not None and not (stated and epsilon is None):
        given = f"target_epsilon={epsilon}" if epsilon else "no noise level"
        raise ValueError(
            f"{given} with individual=: the target belongs to the filter, and the noise level "
            "decides when it starts to leave examples out. Set noise_multiplier=, for instance "
            "GDPFilter.noise_multiplier(full_norm_steps=...), or mechanism="
        )
    if asked.mechanism is not None:
        return
    if sigma is not None and epsilon is not None:
        raise ValueError(
            f"noise_multiplier={sigma} and target_epsilon={epsilon} are both "
            "given: state the noise or the target, not both"
        )
    if sigma is None and epsilon is None:
        raise ValueError("state noise_multiplier=, or target_epsilon= and target_delta=")
    if epsilon is not None and asked.target_delta is None:
        raise ValueError(f"target_epsilon= needs target_delta=: {_DELTA}")


def _check_only_mechanism(asked: RunArguments) -> None:
    """Refuse arguments beside ``mechanism=`` that it already fixes."""
    others = ("scheme", "strategy", "noise_multiplier", "target_epsilon")
    if given := [name for name in others if getattr(asked, name) is not None]:
        raise ValueError(f"mechanism= already fixes {given}: leave them out")


def _check_sum(scheme: Scheme, gradients: Gradients) -> None:
    """Refuse a loss that is divided by a private number.

    A mean's 1/n is undone before gradients are clipped, but not the roundings of what it went
    through on the way back: in bfloat16 they moved the sum of everybody's gradients by hundreds of
    R for one example more (docs/theory/limits.md#thm-ideal-noise)."""
    if scheme.nominal_size is not None and gradients.reduction == "mean":
        raise ValueError(
            f"scheme has nominal_size={scheme.nominal_size}, so the number of rows in a batch is "
            "private, and Gradients(loss='mean') divides by it, so that the rounding of every "
            "gradient would depend on that number. Use a loss with reduction='sum', "
            "Gradients(loss='sum'), and the learning rate divided by the expected batch size, "
            f"which is public ({scheme.expected_batch_size:.6g})"
        )


def _check_secret(noise: NoiseOptions, seed: int | None) -> None:
    """Refuse a seed beside secure noise."""
    if noise.secure and seed is not None:
        raise ValueError(
            "secure=True with a seed: the seed is the key of the noise, and a seed in a script "
            "can be guessed or found. Leave seed out to draw 128 bits from the operating system "
            "(a checkpoint keeps them), or use NoiseOptions(secure=False)"
        )


def _check_sliced(noise: NoiseOptions, optimizer: torch.optim.Optimizer) -> None:
    """Refuse to cut the state of an optimizer that has to see whole parameters."""
    if noise.shard == "all" and (reason := whole_because(optimizer)):
        raise ValueError(
            f"NoiseOptions(shard='all'): {reason}, so no rank can update a slice of a parameter. "
            "Use NoiseOptions(shard='noise'), which divides the noise and keeps the whole "
            "optimizer on every rank"
        )


def _check_built_after(optimizer: Any) -> None:
    """Refuse an optimizer of the parameters that a model had before it was divided."""
    held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    if held and not any(is_divided(p) for p in held):
        raise ValueError(
            "the optimizer holds the parameters that the module had before it was divided: build "
            "the optimizer after fully_shard, which replaces them"
        )


def _check_divided(
    noise: NoiseOptions, optimizer: torch.optim.Optimizer, module: nn.Module
) -> None:
    """Refuse what a model that ``fully_shard`` divided cannot be trained with."""
    given = "module was divided by fully_shard"
    if noise.shard not in ("auto", "all"):
        raise ValueError(
            f"{given}, so no rank has a whole sum to add noise to, and "
            f"NoiseOptions(shard={noise.shard!r}) does not apply: leave it out"
        )
    if reason := whole_because(optimizer):
        raise ValueError(
            f"{given}, and {reason}, so no rank can update its shards: use an optimizer that works "
            "entry by entry, such as AdamW"
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise ValueError(
                f"{given}, and its layer {name!r} is a {type(layer).__name__}, which keeps "
                "references to parameters that fully_shard replaces: keep the whole model on each "
                "rank, without fully_shard"
            )


def _dataset_of(data: Any) -> Any:
    """The data set that is given, or that of the loader."""
    if isinstance(data, PrivateLoader):
        raise TypeError(
            "data= is the private loader of another run: pass the data loader that run was made "
            "from, or data=loader.dataset. Keep that loader under another name; the guarantees of "
            "runs on the same data add up"
        )
    if isinstance(data, DataLoader):
        return data.dataset
    if isinstance(data, torch.Tensor | np.ndarray):
        raise TypeError(
            f"data= is a {type(data).__name__} of shape {tuple(data.shape)}, which is not a data "
            "set: pass torch.utils.data.TensorDataset(inputs, targets), or TensorDataset(inputs) "
            "if there are no targets"
        )
    if not isinstance(data, Dataset) and not hasattr(type(data), "__getitem__"):
        raise TypeError(
            f"data= is a {type(data).__name__}: must be a map-style data set with a length, or a "
            "DataLoader over one"
        )
    return data


def _poisson_like(data: Any, epochs: Any, loading: Loading) -> tuple[Scheme, Loading]:
    """Poisson batches of a loader's size for so many of its epochs, and the steps of one."""
    if not isinstance(data, DataLoader) or epochs is None or data.batch_size is None:
        raise ValueError(
            "scheme=None derives Poisson sampling from a data loader, which needs data= to be a "
            "DataLoader (with a batch_size) and epochs=. Pass both, or set scheme=, for instance "
            "dptrain.Poisson.for_batch_size(...)"
        )
    dataset_size, epoch = length_of(data.dataset), len(data)
    if isinstance(epochs, float):
        remedy = (
            f"write epochs={int(epochs)}"
            if epochs.is_integer()
            else (
                "state a part of an epoch by its number of steps, "
                f"scheme=dptrain.Poisson.for_batch_size(batch_size={data.batch_size}, "
                f"dataset_size={dataset_size}, steps=...), where an epoch has {epoch} steps"
            )
        )
        raise TypeError(f"{checks.named('epochs', epochs)} must be an integer: {remedy}")
    epochs = checks.integer("epochs", epochs, maximum=checks.MOST_STEPS // max(1, epoch))
    scheme = Poisson.for_batch_size(
        batch_size=data.batch_size,
        dataset_size=dataset_size,
        steps=epochs * epoch,
    )
    steps = loading.steps_per_epoch or epoch
    return scheme, dataclasses.replace(loading, steps_per_epoch=steps)
