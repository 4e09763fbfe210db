"""The tensors in what a module returns, where their rows are, and gradients to take back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
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


def weigh(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradient of Σ w·y − cos y by y, in y's dtype; 0 where y is not finite.

    w + sin y is bounded, and changes with y wherever that is. It is written down at once: autograd
    would hold six tensors of the size of y on the way to it, and what a decoder returns is the
    largest tensor there is.
    """
    y = y.detach()
    found = y.to(torch.promote_types(y.dtype, torch.float32)).sin()
    return found.add_(w.to(found)).masked_fill_(~y.isfinite(), 0.0).to(y.dtype)


def weigh_rows(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], rows: int
) -> None:
    """Multiply the gradients of a row by a number that follows from all that was made of the row.

    A loss may put together what a row's outputs hold, so that a number that is another row's moves
    the gradients of all of them. The factor is 1 and half the mean cosine of the angles between
    what outputs have of the row and a random direction: within [½, 3/2], whatever their size.

    Args:
        outputs: with their rows first, or without any.
        gradients: of their shapes, changed in place.
    """
    generator = torch.Generator().manual_seed(1)
    by_rows = [k for k, y in enumerate(outputs) if y.dim() and len(y) == rows]
    cosines = torch.zeros(rows)
    for k in by_rows:
        y = outputs[k].detach().reshape(rows, -1)
        y = y.to(torch.promote_types(y.dtype, torch.float32)).nan_to_num(0.0, 0.0, 0.0)
        v = torch.randn(y.shape[1], generator=generator).to(y)
        lengths = (y.norm(dim=1) * v.norm()).clamp(min=torch.finfo(y.dtype).tiny)
        cosines += ((y @ v) / lengths).cpu().float()
    for g in (gradients[k] for k in by_rows):
        factors = (1 + cosines / (2 * len(by_rows))).to(g)
        g.mul_(factors.view(-1, *[1] * (g.dim() - 1)))


def take_back(outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    """Backward from those outputs that have a graph, if there are any."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
