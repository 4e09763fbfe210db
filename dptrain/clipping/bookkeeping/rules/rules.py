"""Rules: from what a layer saw to the uses of its parameters; the table of layers that have one."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import nn
from torch.nn.utils import parametrize
from typing_extensions import override

from dptrain.clipping.bookkeeping.rules.inherited import differs
from dptrain.clipping.bookkeeping.uses.uses import Materialized, Use

PerExampleGradients = Callable[
    [nn.Module, tuple[Any, ...], torch.Tensor], Mapping[str, torch.Tensor]
]
Found = Mapping[str, Use] | Mapping[nn.Parameter, Use]
Uses = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], Found]


class Observe(Protocol):
    """Makes the gradient of an output known: ``uses`` is called with it in the backward pass."""

    def __call__(
        self,
        output: torch.Tensor,
        inputs: Sequence[Any],
        uses: Uses,
        *,
        factor: int | None = None,
        shared: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The output to go on with, of which the gradient is taken.

        Args:
            output: one row per example, or a fixed number of them one after the other.
            inputs: what ``uses`` is given, if the rule keeps inputs.
            uses: as ``LayerRule.uses``.
            factor: rows of the output an example, where the rule knows.
            shared: tensors that the gradients depend on and that no example may move.
        """

    def rows(self) -> int | None:
        """Rows that the model is fed; ``None`` without a batch."""

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trainable parameters that the rule is responsible for, by their names."""

    def guarded(self, why: str) -> contextlib.AbstractContextManager[Any]:
        """The layer's parameters with a way back, on which every gradient is refused.

        Args:
            why: the refusal.
        """

    def each(self, name: str, rows: int) -> torch.Tensor:
        """The layer's parameter with a row for each example, a view of shape (rows, *p.shape).

        What autograd finds for the rows of a trainable one are its per-example gradients, which are
        taken in as they are. For operations that cost the same with parameters an example.

        Args:
            name: of the parameter in the layer.
            rows: examples.
        """


class LayerRule(abc.ABC):
    """How the gradients of a type of layer follow from its inputs and its output's gradient.

    Attributes:
        recurses: whether the rule also covers the parameters of the layer's children.
        arranges: whether it is there for what is called within, and covers no parameters.
        half: whether ``uses`` takes half precision as it is, and sums it in float32 itself.
        name: of the layer that it is for, of a rule that is for one.
    """

    recurses = False
    arranges = False
    half = False
    name = ""

    def holders(self, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Modules whose own parameters the rule covers, by their names in the layer."""
        if self.recurses:
            yield from layer.named_modules(remove_duplicate=False)
        else:
            yield "", layer

    def refusal(self, layer: nn.Module) -> str | None:
        """Why this very layer cannot be handled, or ``None``."""
        return None

    def keeps_inputs(self, layer: nn.Module) -> bool:
        """Whether ``uses`` looks at the inputs; they are not kept alive otherwise."""
        return True

    def forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        inputs: tuple[Any, ...],
        observe: Observe,
    ) -> Any:
        """The layer's output, observed; the covered parameters are detached during the call.

        Args:
            layer: the layer.
            forward: its own forward.
            inputs: all arguments of the call, in the order of the signature.
            observe: to be called with every output of what the parameters are used for. Each is
                observed with the uses of the parameters that made it, the trainable ones.
        """
        output = forward(*inputs)
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{type(layer).__name__} returned a {type(output).__name__}: a rule is for layers "
                "that return one tensor, unless it has its own forward()"
            )
        return observe(output, inputs, self._all_uses)

    def second(self, layer: nn.Module) -> Collection[int]:
        """Places of the arguments that have the rows in their second dimension."""
        return ()

    def alike(self, layer: nn.Module, dims: int) -> int:
        """How many of the first dimensions of its only input are nothing but positions to a layer.

        The layer computes the same for these in any order. So where the examples are in the second
        of several, it is run with them in the first.

        Args:
            layer: the layer.
            dims: of the input.
        """
        return 1

    def _all_uses(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """The uses, which have to be there: a parameter that is left out would not be trained."""
        found = self.uses(layer, inputs, gradient)
        own = layer._parameters.items()
        if missing := [n for n, p in own if p is not None and p.requires_grad and n not in found]:
            raise RuntimeError(f"the rule of {type(layer).__name__} gave no use of {missing}")
        return found

    @abc.abstractmethod
    def uses(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        """The use of each trainable parameter that the layer owns, by its name.

        Args:
            layer: the layer; its parameters may be read.
            inputs: positional arguments of the call, detached; empty where none are kept. One row
                per example in the first dimension of each tensor.
            gradient: of the reduced loss by the layer's output, one row per example.
        """


class WeightRule(LayerRule):
    """A rule of which only the weight's gradient needs the inputs; a bias needs none."""

    def keeps_inputs(self, layer: nn.Module) -> bool:
        """Whether the weight is trained."""
        return bool(layer.weight.requires_grad)


class GradientRule(LayerRule):
    """A rule that forms the per-example gradients of a layer.

    Args:
        per_example: from (layer, inputs, gradient), as in ``LayerRule.uses``, to gradients of
            shape (rows, *p.shape) by the parameters' names; frozen ones may be left out.
    """

    def __init__(self, per_example: PerExampleGradients) -> None:
        self.per_example = per_example

    @override
    def uses(
        self, layer: nn.Module, inputs: tuple[Any, ...], gradient: torch.Tensor
    ) -> Mapping[str, Use]:
        found = dict(self.per_example(layer, inputs, gradient))
        uses: dict[str, Use] = {}
        for name, p in layer.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if name not in found:
                raise RuntimeError(
                    f"the rule of {type(layer).__name__} gave no per-example gradients of {name!r}"
                )
            expected = (len(gradient), *p.shape)
            if found[name].shape != expected:
                raise RuntimeError(
                    f"the rule of {type(layer).__name__} gave per-example gradients of {name!r} of "
                    f"shape {tuple(found[name].shape)}, expected {expected}"
                )
            uses[name] = Materialized(found[name].detach().to(gradient.dtype))
        return uses


RULES: dict[type[nn.Module], LayerRule] = {}
"""The rule of every type of layer that bookkeeping knows."""

FINDERS: list[Callable[[nn.Module], LayerRule | None]] = []
"""Functions that find the rule of a layer, of classes that are told by what they have in common."""

_OURS: set[type[nn.Module]] = set()
"""Types whose rules came with dptrain."""


def register_own(kind: type[nn.Module], rule: LayerRule) -> None:
    """A rule that comes with dptrain: nobody replaces it by mistake."""
    RULES.setdefault(kind, rule)
    _OURS.add(kind)


def register_layer(
    kind: type[nn.Module], rule: LayerRule | PerExampleGradients, *, replace: bool = False
) -> None:
    """Make ``Gradients(mode="bookkeeping")`` handle layers of the type ``kind``.

    And of its subclasses, where neither ``forward`` nor anything that it looks up in the layer is
    another there.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return x * self.weight
        >>> def gradients(layer, inputs, gradient):      # x and gradient: (rows, positions, width)
        ...     return {"weight": (inputs[0] * gradient).sum(1)}
        >>> dptrain.register_layer(Scale, gradients)

    Whether a rule is right decides whether the guarantee is: check it with
    ``check_layer_rule``.

    Args:
        kind: has parameters of its own and returns one tensor with one row per example.
        rule: a ``LayerRule``, or a function that returns per-example gradients.
        replace: whether the rule may take the place of one that comes with dptrain.

    Raises:
        TypeError: if one of the two is something else.
        ValueError: if ``kind`` has a rule that comes with dptrain, without ``replace``.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"kind={kind!r}: expected a subclass of torch.nn.Module")
    if not isinstance(rule, LayerRule):
        if not callable(rule):
            raise TypeError(f"rule={rule!r}: expected a LayerRule, or a function")
        rule = GradientRule(rule)
    if kind in _OURS and not replace:
        raise ValueError(
            f"kind={kind.__name__}: dptrain has a rule for it, that of "
            f"{type(RULES[kind]).__name__}; register yours for a subclass, or pass replace=True to "
            "use it for every such layer of this process"
        )
    RULES[kind] = rule


def rule_of(layer: nn.Module) -> LayerRule | None:
    """The rule for a layer: its type's, or that of the nearest parent whose forward it has."""
    kind = _with_rule(layer)
    if kind is not None:
        return None if differs(layer, kind) else RULES[kind]
    return next((rule for find in FINDERS if (rule := find(layer)) is not None), None)


def without_rule(layer: nn.Module) -> str:
    """That a layer has no rule, and why where its parents have one."""
    kind = _with_rule(layer)
    why = None if kind is None else differs(layer, kind)
    found = f"{type(layer).__name__} has no rule"
    return found if why is None else f"{found}, as it {why}"


def _with_rule(layer: nn.Module) -> type[nn.Module] | None:
    """The nearest class of a layer that has a rule."""
    return next((kind for kind in type(layer).__mro__ if kind in RULES), None)


def owned(layer: nn.Module, rule: LayerRule | None) -> dict[str, nn.Parameter]:
    """Trainable parameters that a layer's rule is responsible for, by their names in the layer."""
    holders = [("", layer)] if rule is None else list(rule.holders(layer))
    return {
        f"{prefix}.{name}" if prefix else name: p
        for prefix, holder in holders
        for name, p in holder._parameters.items()
        if p is not None and p.requires_grad
    }


def never_called(module: nn.Module) -> bool:
    """Whether a module has no forward of its own: lists of layers or parameters, and the like.

    Whoever holds it uses its parameters.
    """
    found = getattr(type(module), "forward", None)  # TorchScript has none there
    return found is nn.Module.forward and "forward" not in vars(module)


def not_called(prefix: str, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A layer, and what holds parameters for it without being called by itself."""
    yield prefix, layer
    for name, child in layer.named_children():
        if name == "parametrizations":  # torch.nn.utils.parametrize: called to have the weights
            yield from child.named_modules(prefix=joined(prefix, name))
        elif never_called(child):
            yield from not_called(joined(prefix, name), child)


def past_their_own(others: Collection[str]) -> str:
    """That a layer uses the parameters of these within it, where there are some."""
    if not others:
        return ""
    some = " and ".join(repr(name) for name in list(others)[:3])
    more = f" and of {len(others) - 3} more layers" if len(others) > 3 else ""
    return f" that uses parameters of {some}{more} within it past their own forward"


class Exchanged:
    """Modules with other tensors in the place of their own parameters, within the context.

    Recurrent layers list theirs a second time, and list what they find in such a context: that
    is put back as well.

    Args:
        holders: modules, by their names.
        change: what stands for a parameter, by its full name and itself.
    """

    def __init__(
        self,
        holders: Iterable[tuple[str, nn.Module]],
        change: Callable[[str, nn.Parameter], torch.Tensor],
    ) -> None:
        # The attributes themselves: nn.Module looks at each that is set, for longer than all of
        # this takes. A call may come within one of another layer that has changed them too.
        self._kept = [
            (prefix, own, {name: own[name] for name in _LISTED if name in own})
            for prefix, own in ((prefix, vars(m)) for prefix, m in holders)
        ]
        self._change = change

    def __enter__(self) -> None:
        for prefix, own, before in self._kept:
            own["_parameters"] = {
                name: None if p is None else self._change(joined(prefix, name), p)
                for name, p in before["_parameters"].items()
            }

    def __exit__(self, *_: object) -> None:
        for _prefix, own, before in self._kept:
            own.update(before)


_LISTED = ("_parameters", "_flat_weights", "_flat_weight_refs")


def detached(holders: Iterable[tuple[str, nn.Module]]) -> Exchanged:
    """Modules with their own parameters detached."""
    return Exchanged(holders, lambda _, p: p.detach())


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Past ``parametrize.cached()``: weights that were computed before a call are not followed."""
    module: Any = parametrize
    kept = module._cache_enabled, module._cache
    try:
        module._cache_enabled, module._cache = 0, {}
        yield
    finally:
        module._cache_enabled, module._cache = kept


def joined(prefix: str, name: str) -> str:
    """The name of what has a name within something of another, which may be none."""
    return ".".join(part for part in (prefix, name) if part)


def layers_with_rules(
    module: nn.Module, otherwise: Callable[[str, nn.Module], LayerRule] | None = None
) -> dict[str, tuple[nn.Module, LayerRule]]:
    """Layers with trainable parameters and their rules, by the layers' names.

    Args:
        module: holds the layers.
        otherwise: makes the rule of a layer that has none, of its name and itself; ``None``: such
            layers are left out.
    """
    found: dict[str, tuple[nn.Module, LayerRule]] = {}
    covered: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if layer in covered or (rule := rule_of(layer)) is None:
            continue
        if rule.recurses:
            covered.update(layer.modules())
        if owned(layer, rule) or rule.arranges:
            found[name] = layer, rule
    if otherwise is None:
        return found
    covered.update(layer for layer, _ in found.values())
    modules = dict(module.named_modules())
    for name in _owners(modules, covered, _users(found)):
        # Whoever is called uses the parameters of what is not.
        caller = name.split(".parametrizations")[0]
        while caller and never_called(modules[caller]):
            caller = caller.rpartition(".")[0]
        if caller not in found:
            found[caller] = modules[caller], otherwise(caller, modules[caller])
    return found


def _users(found: Mapping[str, tuple[nn.Module, LayerRule]]) -> dict[nn.Parameter, set[nn.Module]]:
    """The layers whose rules cover a parameter, by the parameters."""
    used_by: dict[nn.Parameter, set[nn.Module]] = {}
    for layer, rule in found.values():
        for p in owned(layer, rule).values():
            used_by.setdefault(p, set()).add(layer)
    return used_by


def _owners(
    modules: Mapping[str, nn.Module],
    covered: set[nn.Module],
    used_by: Mapping[nn.Parameter, set[nn.Module]],
) -> list[str]:
    """Modules with trainable parameters that no layer among them or within them covers."""
    found = []
    for name, layer in modules.items():
        if layer in covered:
            continue
        # What a layer within has too (the bias of BERT's head, say) is used there; a use that goes
        # past it is refused in the backward pass.
        within = set(layer.modules())
        if any(within.isdisjoint(used_by.get(p, ())) for p in owned(layer, None).values()):
            found.append(name)
    return found


def _by_opacus(layer: DPRNNBase) -> str:
    """Its linear layers are called on rows of packed sequences, which are not all, nor in order."""
    module = DPRNNBase.__module__
    theirs = next(c.__name__ for c in type(layer).__mro__ if c.__module__ == module)
    return (
        f"{type(layer).__name__} has no rule; use torch.nn.{theirs.removeprefix('DP')}, which has "
        "one and loads its state dict"
    )


def refusals(
    module: nn.Module, otherwise: Callable[[str, nn.Module], LayerRule] | None = None
) -> dict[str, str]:
    """Why trainable parameters cannot be handled, by the names of the layers that own them."""
    rules = layers_with_rules(module, otherwise)
    found = {
        name: why
        for name, (layer, rule) in rules.items()
        if (why := rule.refusal(layer)) is not None
    }
    covered = {holder for layer, rule in rules.values() for _, holder in rule.holders(layer)}
    modules = dict(module.named_modules())
    for name, layer in modules.items():
        if isinstance(layer, DPRNNBase) and any(p.requires_grad for p in layer.parameters()):
            found[name or "(the module itself)"] = _by_opacus(layer)
    for name in _owners(modules, covered, _users(rules)):
        found[name or "(the module itself)"] = (
            f"{type(modules[name]).__name__} has no rule, nor is it called by itself"
        )
    return found
