"""Running a module so that nothing of it, nor of the random generators, shows it afterwards."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.core import ModuleState, put_back, remember_globals, restore_global_state

_HOOKS = [
    name
    for name, value in vars(nn.Module()).items()
    if "hooks" in name and "state_dict" not in name and value == {}
]


def replay() -> Callable[[], None]:
    """Puts Python's, numpy's and torch's generators back to what they are now, when called."""
    state = remember_globals()()
    return lambda: restore_global_state(state)


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Run such that nothing that a forward pass leaves in the module is there afterwards.

    Whatever a step's watch compares (``ModuleState``) is put back: tensors are exchanged for copies
    meanwhile, so that not even their versions tell; lists, dicts, sets, queues and attributes hold
    the very objects again that they held; arrays, byte arrays and generators hold what they did;
    and so do gradients and attributes of parameters, and hooks. Values that are written into
    parameters are not put back.

    Args:
        module: the one to be run; its parameters are used as they are.
    """
    state = ModuleState(module)
    before = [(c, dict(c) if isinstance(c, dict) else list(c)) for c in state.containers]
    again = [put_back(value) for value in state.held]
    carried = [(p, p.grad, dict(vars(p))) for p in state.parameters]
    exchanged = _Exchanged()
    try:
        for container, held in before:
            exchanged.within(container, held)
        for p in state.parameters:
            p.grad = None
        yield
    finally:
        for container, held in before:
            _restore(container, held)
        for held_again in again:
            held_again()
        for p, gradient, own in carried:
            _restore(vars(p), own)
            p.grad = gradient


def attached(layers: Sequence[nn.Module]) -> tuple[tuple[int, str, Any], ...]:
    """Hooks and forwards of the layers' own: the layer's place, the kind, and the code that runs.

    Hooks that are registered anew for every batch are the same if their code is.
    """
    found: list[tuple[int, str, Any]] = []
    for place, layer in enumerate(layers):
        own = vars(layer)
        for name in _HOOKS:
            if own[name]:
                found.append((place, name, tuple([_code(hook) for hook in own[name].values()])))
        if "forward" in own:
            forward = own["forward"]
            found.append((place, "forward", _code(forward)))
    return tuple(found)


def _code(function: Any) -> Any:
    """Key that tells a function from others, except from those with the same code."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))


@contextlib.contextmanager
def eagerly(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context without compiled code, which would be compiled anew for a few rows."""
    compiled = any("_orig_mod" in m._modules or m._compiled_call_impl for m in layers)
    if not compiled:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class _Exchanged:
    """Copies of tensors, the same one wherever a tensor is."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def within(self, container: Any, held: Any) -> None:
        """Exchange the tensors of a list, dict, set or queue."""
        if isinstance(container, set):
            for value in held:
                if (new := self.of(value)) is not value:
                    container.remove(value)
                    container.add(new)
            return
        items = held.items() if isinstance(held, dict) else enumerate(held)
        for key, value in items:
            if (new := self.of(value)) is not value:
                _kind(container).__setitem__(container, key, new)

    def of(self, value: Any) -> Any:
        """The value, or a copy of a tensor or of what holds one and cannot be written into."""
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            if id(value) not in self._seen:
                self._seen[id(value)] = value, self._copied(value)
            return self._seen[id(value)][1]
        if isinstance(value, tuple | frozenset):
            items = [self.of(item) for item in value]
            if any(a is not b for a, b in zip(items, value, strict=True)):
                return getattr(value, "_make", type(value))(items)
        return value

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            found.grad = self.of(tensor.grad)
        vars(found).update({name: self.of(value) for name, value in vars(tensor).items()})
        return found


def _restore(container: Any, held: Any) -> None:
    """Make the container hold the very objects that it held, in the same order."""
    if isinstance(container, dict):
        kind = _kind(container)
        if list(container) != list(held):
            kind.clear(container)
        for key, value in held.items():
            if key not in container or container[key] is not value:
                kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        container.clear()
        container.update(held)
    elif list(map(id, container)) != list(map(id, held)):
        container.clear()
        container.extend(held)


def _kind(container: Any) -> Any:
    """The plain class of a container, past methods that its own class may have in their place."""
    kinds = (collections.OrderedDict, dict, list, collections.deque)
    return next(kind for kind in kinds if isinstance(container, kind))
