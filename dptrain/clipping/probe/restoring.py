"""Running a module so that nothing of it, nor of the random generators, shows it afterwards."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dptrain.core import remember_globals, restore_global_state

# What makes a module one: layers, parameters, hooks.
_STRUCTURE = frozenset(vars(nn.Module())) - {"_buffers"}
_HOOKS = [name for name, value in vars(nn.Module()).items() if "hooks" in name and value == {}]
_CONTAINERS = (list, dict, set, tuple, collections.OrderedDict, collections.deque)
_COPIED = (np.ndarray, bytearray, random.Random, np.random.Generator, np.random.RandomState)


def replay() -> Callable[[], None]:
    """Puts Python's, numpy's and torch's generators back to what they are now, when called."""
    state = remember_globals()()
    return lambda: restore_global_state(state)


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Run on copies of all that a forward pass may leave in the module, which is dropped then.

    Buffers and plain attributes: tensors, arrays, generators, and lists, dictionaries, sets and
    queues of them. The originals are put back as the very objects that they were, so that not even
    their versions tell; so is what parameters carry, ``p.grad`` among it, and hooks. Objects of
    other kinds, and values that are written into parameters, are not copied.

    Args:
        module: the one to be run; its parameters are used as they are.
    """
    seen: dict[int, Any] = {}
    kept = []
    hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
    parameters = list(module.parameters())
    carried = [(p, p.grad, dict(vars(p))) for p in parameters]
    for layer in module.modules():
        own = vars(layer)
        kept.append((own, dict(own)))
        hooks += [(own[name], dict(own[name])) for name in _HOOKS]
    try:
        for own, before in kept:
            own.update({n: _copied(v, seen) for n, v in before.items() if n not in _STRUCTURE})
        for p in parameters:
            p.grad = None
        yield
    finally:
        for own, before in kept:
            own.clear()
            own.update(before)
        for held, those in hooks:  # in place: handles know the very object
            if held != those:
                held.clear()
                held.update(those)
        for p, gradient, own in carried:
            vars(p).clear()
            vars(p).update(own)
            p.grad = gradient


def attached(layers: Sequence[nn.Module]) -> Iterator[tuple[int, str, Any]]:
    """Hooks and forwards of the layers' own: the layer's place, the kind, and the code that runs.

    Hooks that are registered anew for every batch are the same if their code is.
    """
    for place, layer in enumerate(layers):
        own = vars(layer)
        for name in _HOOKS:
            if own[name] and "state_dict" not in name:
                yield place, name, tuple(_code(hook) for hook in own[name].values())
        if "forward" in own:
            yield place, "forward", _code(own["forward"])


def _code(function: Any) -> Any:
    """What tells a function from others, and not from another with the same code."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))


@contextlib.contextmanager
def eagerly(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Without compiled code, which would be compiled anew for a few rows."""
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl for m in layers)
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    """The value, or a copy where it can be written to."""
    if id(value) in seen:
        return seen[id(value)]
    found: Any = value
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        found = value.detach().clone().requires_grad_(value.requires_grad)
    elif isinstance(value, torch.Generator):
        found = torch.Generator(device=value.device)
        found.set_state(value.get_state())
    elif isinstance(value, _COPIED):
        found = copy.deepcopy(value)
    elif type(value) in _CONTAINERS:
        found = _copied_container(value, seen)
    seen[id(value)] = found
    return found


def _copied_container(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, tuple):
        items = tuple(_copied(item, seen) for item in value)
        return items if _differ(items, value) else value
    if isinstance(value, set):
        return set(value)  # of what can be hashed, and is not written to
    clone = copy.copy(value)
    seen[id(value)] = clone  # it may hold itself
    if isinstance(clone, dict):
        clone.update({key: _copied(item, seen) for key, item in value.items()})
    else:
        for k, item in enumerate(value):
            clone[k] = _copied(item, seen)
    return clone


def _differ(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return any(a is not b for a, b in zip(ours, theirs, strict=True))
