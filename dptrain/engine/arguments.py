"""The arguments of a run: each keyword with its type, its default and its sentence, once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from dptrain.engine.options import Gradients, Loading, NoiseOptions
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy

P = ParamSpec("P")
S = TypeVar("S")
A = TypeVar("A")
T = TypeVar("T")


LIMITS: dict[str, dict[str, Any]] = {
    "max_grad_norm": {"above": 0},
    "noise_multiplier": {"minimum": 0},
    "target_epsilon": {"above": 0},
    "target_delta": {"above": 0, "below": 1},
}
"""The range of each number that a run is asked."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CommonArguments:
    """The arguments of a run that are the same in a loop and in a trainer.

    Args:
        max_grad_norm: R > 0, the bound on the L2 norm of an example's gradient.
        scheme: how batches are drawn, and how many steps there are.
        strategy: how noise is correlated; independent (``Identity``) by default.
        mechanism: scheme, strategy and σ in one, for instance from a checkpoint.
        noise_multiplier: σ ≥ 0, in units of R; or let it be calibrated:
        target_epsilon: ε > 0 to be met at ``target_delta``.
        target_delta: δ in (0, 1), below 1/N. With ``noise_multiplier`` it is the default of
            ``private.guarantee()``.
        individual: a privacy budget for every example, which is left out once its own gradients
            have spent it (``dptrain.individual``); needs ``noise_multiplier``, or ``mechanism``.
            The filter holds ε and δ. Rows must reach the model in the loader's order: they say who
            is charged.
        seed: non-negative integer for a reproducible run; ``None`` draws fresh entropy. The global
            generators of torch, numpy and Python are seeded by it as well, for dropout.
        gradients: how per-example gradients are formed, clipped and checked.
        noise: how noise is drawn and kept.
        loading: in what parts a batch comes, and how many steps make an epoch.
    """

    max_grad_norm: float
    scheme: Scheme | None = None
    strategy: Strategy | None = None
    mechanism: MatrixMechanism | None = None
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    target_delta: float | None = None
    individual: IndividualFilter | None = None
    seed: int | None = None
    gradients: Gradients = Gradients()
    noise: NoiseOptions = NoiseOptions()
    loading: Loading = Loading()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunArguments(CommonArguments):
    """The arguments of ``make_private``.

    Args:
        module: the model, also a compiled one. It is what ``private.module`` is, with its class
            and methods, and ``private.detach()`` leaves it as it was; modes hooks and functorch
            return Opacus's module around it.
        optimizer: any torch optimizer over exactly the module's trainable parameters. One that
            scales gradients (``ScaledAdam``) has them scaled before they are clipped, in modes
            hooks and functorch.
        data: a map-style data set with a length N; or a data loader over one, whose collate
            function, workers and pinning are taken over and whose sampler is replaced.
        epochs: with a data loader and ``scheme=None``: Poisson batches with the loader's batch
            size as the expected one, for ``epochs * len(data)`` steps, ``len(data)`` of which are
            an epoch.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    data: Any
    epochs: int | None = None


def takes(
    arguments: Callable[P, A],
    check: Callable[[tuple[Any, ...], dict[str, Any]], None] = lambda _, __: None,
) -> Callable[[Callable[[S, A], T]], Callable[Concatenate[S, P], T]]:
    """Decorate a method of one argument so that it takes the fields of that value as keywords.

    Signature, annotations and the docstring's arguments are those of the fields, for ``help()`` and
    editors as for mypy.

    Args:
        arguments: a dataclass, of no other method.
        check: called with the positional arguments and the keywords before the value is made.
    """

    def decorated(method: Callable[[S, A], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def taking(self: S, /, *args: P.args, **given: P.kwargs) -> T:
            check(args, given)
            return method(self, arguments(*args, **given))

        made: Any = taking
        fields = [*inspect.signature(arguments).parameters.values()]
        fields.sort(key=lambda each: each.default is not each.empty)
        told = inspect.signature(method)
        made.__signature__ = told.replace(parameters=[*told.parameters.values()][:1] + fields)
        hints = typing.get_type_hints(arguments)
        made.__annotations__ = {**hints, "return": told.return_annotation}
        made.__doc__ = _documented(inspect.getdoc(method) or "", arguments)
        # What Python says of a keyword that is missing or unknown is then said of the method.
        arguments.__init__.__qualname__ = method.__qualname__
        return taking

    return decorated


def _documented(text: str, arguments: Any) -> str:
    """The docstring with the arguments of the dataclass, its own before inherited ones."""
    kinds = [kind for kind in arguments.__mro__ if dataclasses.is_dataclass(kind)]
    told = [(inspect.getdoc(kind) or "").partition("\nArgs:\n")[2].rstrip() for kind in kinds]
    head, mark, rest = text.partition("\n\nReturns:\n")
    return "\n".join([head, "", "Args:", *filter(None, told)]) + mark + rest
