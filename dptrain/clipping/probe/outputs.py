"""The tensors in what a module returns, and which of their dimensions has the rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

_DEPTH = 4  # of objects within what a module returns


class Outputs:
    """Gives outputs their rows first, as passes over two numbers of rows showed where these are.

    Final states of recurrent layers have them second, (layers, rows, width), and so has what a
    CTC loss takes, (steps, rows, classes). What all examples share, as a learned scale, has none:
    it gets a copy for each row.
    """

    def __init__(self) -> None:
        self._shapes: dict[int, list[torch.Size]] = {}  # of the outputs, by the number of rows
        self._shared: set[int] = set()  # outputs that follow from parameters alone

    def of(self, value: Any, rows: int, *, note: bool = False) -> Iterator[torch.Tensor]:
        """The floating-point tensors in what a module returned.

        Args:
            value: that it returned.
            rows: that it was run on.
            note: whether this is one of the passes that show where the rows are.
        """
        found = list(_floats(value))
        if note:  # the last of these knows best what follows the rows
            self._shapes[rows] = [y.shape for y in found]
            self._shared.clear()
        for k, y in enumerate(found):
            if hasattr(y, "by_rows"):
                self._shared.add(k)
                yield y.by_rows()
            elif k in self._shared:  # of a pass in which no parameter is followed
                yield y.expand(rows, *y.shape)
            else:
                yield y.movedim(self._dimension(k), 0) if y.dim() else y

    def as_they_are(self, value: Any) -> Iterator[tuple[torch.Tensor, int]]:
        """The tensors that have rows, and the dimension that these are."""
        for k, y in enumerate(_floats(value)):
            if not hasattr(y, "by_rows"):
                yield y, self._dimension(k)

    def _dimension(self, k: int) -> int:
        """The first one that follows the rows; where none does, the first of all."""
        if len({len(shapes) for shapes in self._shapes.values()}) != 1:
            return 0
        several = [(rows, shapes[k]) for rows, shapes in self._shapes.items() if k < len(shapes)]
        if len(several) < 2 or len({len(shape) for _, shape in several}) > 1:
            return 0
        for d in range(len(several[0][1])):
            each = {shape[d] / rows for rows, shape in several}
            if len(each) == 1 and each != {0.0}:
                return d
        return 0


def _floats(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The floating-point tensors in what a module returned."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, PackedSequence):
        items = (value.data,)
    elif isinstance(value, list | tuple):
        items = value
    elif depth and not isinstance(value, type | nn.Module):
        items = [getattr(value, name) for name in attributes(value)]
    for item in items:
        yield from _floats(item, depth - 1)


def attributes(value: Any) -> list[str]:
    """Names of what an object holds."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [(own,) if isinstance(own, str) else tuple(own) for own in slots]
    every = [*itertools.chain(*names), *getattr(value, "__dict__", ())]
    return [n for n in every if n not in ("__dict__", "__weakref__") and hasattr(value, n)]
