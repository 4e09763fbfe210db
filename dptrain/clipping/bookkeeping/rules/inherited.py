"""Layers that a rule which was written for one class of layers does not hold for."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType

from opacus.layers.dp_rnn import RNNLinear
from torch import nn

_MISSING = object()
_READING = ("__getattr__", "__getattribute__")  # what reading an attribute calls


def differs(layer: nn.Module, kind: type[nn.Module]) -> str | None:
    """The reason that a layer computes something else than its parent class, or ``None``.

    The parent's ``forward`` computes the same in a subclass if nothing that it looks at, directly
    or through methods that it calls, is another there: no method, no property in the place of a
    parameter, no function that a library has put on this very layer. And no parameter may be
    trained that it does not look at.

    Returns:
        What differs, to be read after the layer's name.
    """
    names = _looked_at(kind)
    own = vars(layer)
    for name in sorted(names or {"forward"}):
        method = name in own and callable(getattr(type(layer), name, None))
        if method and not _is_own_method(layer, name, own[name]):
            return f"has another {name}() than its class, installed by some library"
    if type(layer) is kind:
        return None
    if isinstance(layer, RNNLinear):
        return "is called on the steps of a packed sequence, which have fewer rows than the batch"
    if names is None:
        return f"is a subclass of {kind.__name__} whose forward() cannot be analyzed"
    for name in sorted(names):
        theirs = inspect.getattr_static(type(layer), name, _MISSING)
        if theirs is not inspect.getattr_static(kind, name, _MISSING):
            called = "()" if callable(theirs) else ""
            return f"is a {kind.__name__} with a {name}{called} of its own"
    trained = [n for n, p in layer.named_parameters(recurse=False) if p.requires_grad]
    listed = set(own.get("_flat_weights_names", ()))  # by recurrent layers
    if others := [name for name in trained if name not in names | listed]:
        return f"is a {kind.__name__} with additional parameters {others}"
    return None


def _is_own_method(layer: nn.Module, name: str, value: object) -> bool:
    """True if it is what the class has, bound to the layer, or a tap of it."""
    theirs = inspect.getattr_static(type(layer), name, None)
    value = getattr(value, "_forward", value)
    return (
        getattr(value, "__func__", _MISSING) is theirs and getattr(value, "__self__", None) is layer
    )


def _looked_at(kind: type[nn.Module]) -> set[str] | None:
    """Names that ``forward`` may look up in the layer, and what it calls there; more than those.

    ``None`` if they cannot be told: of functions that are no plain ones, or have a closure, as
    decorators make them.
    """
    found = {"forward", *_READING}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        # Methods that super() calls are in the classes further up.
        for parent in kind.__mro__:
            if parent in (nn.Module, object) or name not in vars(parent):
                continue
            value = vars(parent)[name]
            value = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if not callable(value):
                continue
            if not isinstance(value, FunctionType) or set(value.__code__.co_freevars) - {
                "__class__"
            }:
                return None
            new = _names(value.__code__) - found
            found |= new
            waiting += new
    return found


def _names(code: CodeType) -> set[str]:
    """Global and attribute names in a function, and texts where attributes are got by them."""
    found = set(code.co_names)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            found |= _names(value)
        elif isinstance(value, str) and "getattr" in code.co_names:
            found.add(value)
    return found
