"""Calls of operators, and what rules about them are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dptrain.clipping.owners.maps import EVENT, shared, thin

Map = torch.Tensor


class Call:
    """A call of an operator, with the maps of its tensors as they are before it.

    Attributes:
        func: the operator's overload.
        name: without overload, and without the ending of what works in place.
        writes: whether what it returns are arguments that it wrote into.
        trace: the ``OwnerTrace`` that sees it.
        tensors: among its arguments.
    """

    def __init__(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], trace: Any
    ) -> None:
        self.func, self.args, self.kwargs, self.trace = func, args, kwargs, trace
        self.name, self.writes, self._places = _facts(func)
        self._maps: dict[int, Map] = {}
        self.tensors = list(tensors_in((*args, *kwargs.values())))
        for tensor in self.tensors:
            self._maps[id(tensor)] = trace.owners(tensor)

    def __getitem__(self, argument: str) -> Any:
        """An argument by its name in the operator's schema; its default if it was not given."""
        if argument in self.kwargs:
            return self.kwargs[argument]
        place, default = self._places[argument]
        return self.args[place] if place < len(self.args) else default

    def has(self, argument: str) -> bool:
        """True if the operator has such an argument."""
        return argument in self._places

    def of(self, value: Any) -> Map:
        """The map of a tensor argument; SHARED of what is none."""
        if isinstance(value, torch.Tensor):
            return self._maps[id(value)]
        return shared(())

    def map(self, argument: str) -> Map:
        """The map of the argument of this name."""
        return self.of(self[argument])

    def word(self, index: torch.Tensor) -> Map:
        """Owners of an index, which says where elements are taken from or put.

        Places that several examples decide together (an offset is the sum of the lengths before)
        are unknown and not mixed: the elements themselves may well be one example's.
        """
        owners = self.of(index)
        few = thin(owners)
        if not few.numel() or int(few.min()) > EVENT:
            return owners
        place = int(self.trace.unknown(f"{self.name} by indices of several examples", ())[()])
        return torch.where(few <= EVENT, place, few).expand(owners.shape)

    def maps(self, *, but: Sequence[str] = ()) -> list[Map]:
        """The maps of all tensors, but for some arguments."""
        left_out = {id(t) for name in but for t in tensors_in((self[name],))}
        return [m for key, m in self._maps.items() if key not in left_out]


@functools.cache
def _facts(func: Any) -> tuple[str, bool, dict[str, tuple[int, Any]]]:
    """Name, whether it writes, and its arguments' places and defaults."""
    name = func.overloadpacket.__name__
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    schema = func._schema
    places = {
        a.name: (
            k if not a.kwarg_only else 1 << 20,
            a.default_value if a.has_default_value() else None,
        )
        for k, a in enumerate(schema.arguments)
    }
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return name, writes, places


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def names(text: str) -> list[str]:
    """Names of operators."""
    return text.split()


Rule = Callable[[Call, list[torch.Tensor]], Sequence[Map | None]]


RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operators of these names."""

    def register(found: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, found))
        return found

    return register
