"""The table of layers that have a rule, and the rules of all layers of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opacus.layers.dp_rnn import DPRNNBase
from torch import nn

from dptrain.clipping.bookkeeping.rules.exchanged import never_called
from dptrain.clipping.bookkeeping.rules.inherited import differs
from dptrain.clipping.bookkeeping.rules.rule import (
    GradientRule,
    LayerRule,
    PerExampleGradients,
    owned,
)

RULES: dict[type[nn.Module], LayerRule] = {}
"""The rule of every type of layer that bookkeeping knows."""

FINDERS: list[Callable[[nn.Module], LayerRule | None]] = []
"""Functions that find the rule of a layer, of classes that are told by what they have in common."""

_OURS: set[type[nn.Module]] = set()
"""Types whose rules came with dptrain."""


def register_own(kind: type[nn.Module], rule: LayerRule) -> None:
    """Register a rule that comes with dptrain: nobody replaces it by mistake."""
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
        raise TypeError(f"kind={kind!r}: must be a subclass of torch.nn.Module")
    if not isinstance(rule, LayerRule):
        if not callable(rule):
            raise TypeError(f"rule={rule!r}: must be a LayerRule or a function")
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
    """Words that say that a layer has no rule, and why, if a parent class has one."""
    kind = _with_rule(layer)
    why = None if kind is None else differs(layer, kind)
    found = f"{type(layer).__name__} has no rule"
    return found if why is None else f"{found}, as it {why}"


def _with_rule(layer: nn.Module) -> type[nn.Module] | None:
    """The nearest class of a layer that has a rule."""
    return next((kind for kind in type(layer).__mro__ if kind in RULES), None)


def layers_with_rules(
    module: nn.Module, otherwise: Callable[[str], LayerRule]
) -> dict[str, tuple[nn.Module, LayerRule]]:
    """Layers with trainable parameters and their rules, by the layers' names.

    Args:
        otherwise: makes the rule of a layer that has none, of its name.
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
    covered.update(layer for layer, _ in found.values())
    modules = dict(module.named_modules())
    for name in _owners(modules, covered, _users(found)):
        # Whoever is called uses the parameters of what is not.
        caller = name.split(".parametrizations")[0]
        while caller and never_called(modules[caller]):
            caller = caller.rpartition(".")[0]
        if caller not in found:
            found[caller] = modules[caller], otherwise(caller)
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
        # A parameter that a layer within has too (the bias of BERT's head, say) is used there; a
        # use that goes past it is refused in the backward pass.
        within = set(layer.modules())
        if any(within.isdisjoint(used_by.get(p, ())) for p in owned(layer, None).values()):
            found.append(name)
    return found


def _by_opacus(layer: DPRNNBase) -> str:
    """Its linear layers are called on rows of packed sequences, which are not all, nor in order."""
    module = DPRNNBase.__module__
    theirs = next(c.__name__ for c in type(layer).__mro__ if c.__module__ == module)
    return (
        f"{type(layer).__name__} has no rule: use torch.nn.{theirs.removeprefix('DP')}, which "
        "has one and loads its state dict"
    )


def refusals(module: nn.Module, otherwise: Callable[[str], LayerRule]) -> dict[str, str]:
    """Reasons that trainable parameters cannot be handled, by the layers that own them."""
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
            f"{type(modules[name]).__name__} has no rule and is never called itself"
        )
    return found
