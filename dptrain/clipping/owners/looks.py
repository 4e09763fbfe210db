"""The look of a call: all that a program may go by that is not a number of an example."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dptrain.core import modules_of

_DEPTH = 3  # of containers and objects within one another
_MOST = 32  # items of a container that are looked at
_ALWAYS_PLAIN = frozenset((type(None), bool, int, float, str))
# Attributes that every module has, but for its mode, and that training puts there.
_SKIPPED = frozenset(vars(nn.Module())) - {"training"} | {"forward"}


def look_of_call(module: nn.Module, args: Any, kwargs: Mapping[str, Any], rows: int) -> Any:
    """Hashable: types and shapes but for the rows, plain values, and those that layers hold.

    Buffers and other tensors of the module are known by the version that they are in.
    """
    modules = modules_of(module)
    seen: dict[int, Any] = {}
    layers: list[Any] = []
    for m in modules:
        for name, value in vars(m).items():
            if name not in _SKIPPED:
                plain = type(value) in _ALWAYS_PLAIN or (
                    type(value) is tuple and _ALWAYS_PLAIN.issuperset(map(type, value))
                )
                layers.append((name, value if plain else _plain(value, 0, _DEPTH, seen)))
        layers.append(len(m._modules))
    buffers = [_plain(b, 0, 1, seen) for m in modules if m._buffers for b in m._buffers.values()]
    hooks = len(nn.modules.module._global_forward_hooks) + len(
        nn.modules.module._global_forward_pre_hooks
    )
    arguments = _plain(args, rows, _DEPTH, seen), _plain(dict(kwargs), rows, _DEPTH, seen)
    inference = torch.is_inference_mode_enabled()
    return hash((arguments, tuple(layers), tuple(buffers), hooks, inference))


def _plain(value: Any, rows: int, depth: int, seen: dict[int, Any]) -> Any:
    """What a program may go by in a value.

    Args:
        rows: of an argument of the call; 0 for what layers hold.
        depth: of containers and objects that are looked into.
        seen: what was found of objects that layers hold, such as one configuration of them all.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes | enum.Enum):
        return value
    if isinstance(value, PackedSequence):
        value = value.data
    if isinstance(value, torch.Tensor):
        if rows:  # an argument, of other numbers every time
            shape = tuple(value.shape)
            d = next((d for d in (0, 1) if shape[d : d + 1] == (rows,)), None)
            return "tensor", value.dtype, shape if d is None else (*shape[:d], *shape[d + 1 :]), d
        version = None if value.is_inference() else value._version
        return "tensor", value.dtype, tuple(value.shape), version
    if depth == 0 or isinstance(value, nn.Module):
        return type(value)
    if isinstance(value, (dict, Mapping)):
        items = list(value.items())[:_MOST]
        return "mapping", tuple([(str(k), _plain(v, rows, depth - 1, seen)) for k, v in items])
    if isinstance(value, list | tuple | set | frozenset):
        return "items", tuple([_plain(v, rows, depth - 1, seen) for v in list(value)[:_MOST]])
    if isinstance(value, functools.partial):
        return "partial", _plain([value.func, value.args, value.keywords], rows, depth, seen)
    if callable(value) and hasattr(value, "__code__"):
        return value.__code__
    if not rows and depth == _DEPTH:
        if id(value) not in seen:
            seen[id(value)] = _of_object(value, rows, depth, seen)
        return seen[id(value)]
    return _of_object(value, rows, depth, seen)


def _of_object(value: Any, rows: int, depth: int, seen: dict[int, Any]) -> Any:
    own = getattr(value, "__dict__", None)
    return type(value), None if not own else _plain(dict(own), rows, depth - 1, seen)
