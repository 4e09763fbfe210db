"""One operation of torch that tracked tensors meet rows of the batch in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from dptrain.clipping.bookkeeping.shared.tracked import Root


class Unhandled(RuntimeError):
    """An operation that per-example gradients cannot be followed through.

    Attributes:
        layer: whose parameters take part in it.
        of_rows: whether it is for rows that do not follow the batch's.
    """

    layer: nn.Module | None = None
    of_rows = False


class Operation:
    """An operation with its arguments taken apart.

    Attributes:
        leaves: all arguments, one after the other.
        places: of the tracked ones among them.
        factors: rows of the other tensors for each of the batch's, by place; 0 for constants.
    """

    def __init__(
        self,
        session: Any,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: TreeSpec,
        places: list[int],
        factors: dict[int, int],
    ) -> None:
        self.session, self.func, self.leaves, self._spec = session, func, leaves, spec
        self.places, self.factors = places, factors

    @property
    def roots(self) -> list[Root]:
        """The roots of all tracked arguments."""
        return list(dict.fromkeys(p for k in self.places for p in self.leaves[k].roots))

    @property
    def constants(self) -> list[torch.Tensor]:
        """Tensors and numbers that all examples share and that are of no parameters, each once.

        Numbers, too: ``x.max().item()``, or the place of a row that the first example decides, may
        move gradients where it moves no output.
        """
        found = [self.leaves[k].detach() for k, factor in self.factors.items() if not factor]
        for leaf in self.leaves:
            parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
            numbers = [part for part in parts if isinstance(part, int | float)]
            found += [torch.tensor(number, dtype=torch.float64) for number in numbers]
        for k in self.places:
            found += self.leaves[k].constants
        return list({id(c): c for c in found}.values())

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        args: tuple[Any, ...] = self.with_leaves(self.leaves)[0]
        return args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        kwargs: dict[str, Any] = self.with_leaves(self.leaves)[1]
        return kwargs

    def with_leaves(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these leaves."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(leaves, self._spec)
        return found

    @property
    def by_rows(self) -> list[int]:
        """Places of tensors with rows of the batch."""
        return [k for k, factor in self.factors.items() if factor]

    @property
    def factor(self) -> int:
        """Rows for each row of the batch, the same in all tensors that have rows."""
        found = {self.factors[k] for k in self.by_rows}
        if len(found) != 1:
            raise self.session.refusal(self.func, "combines tensors with different numbers of rows")
        return found.pop()

    def run(self, replaced: dict[int, Any] | None = None) -> Any:
        """The result, tracked tensors detached but for those that are replaced."""
        leaves = list(self.leaves)
        for k in self.places:
            leaves[k] = leaves[k].detach()
        for k, value in (replaced or {}).items():
            leaves[k] = value
        args, kwargs = self.with_leaves(leaves)
        return self.func(*args, **kwargs)

    def forget_rows(self) -> None:
        """Drop the batch's tensors: autograd keeps what is needed of them."""
        for k in self.by_rows:
            self.leaves[k] = None

    def place(self, value: Any) -> int | None:
        """Place of an argument among the leaves, or ``None`` if it is not tracked."""
        return next((k for k in self.places if self.leaves[k] is value), None)

    def by_row(self, value: Any) -> bool:
        """True if it is a tensor with rows of the batch."""
        return any(self.leaves[k] is value for k in self.by_rows)

    def repeats_one_row(self, value: torch.Tensor) -> bool:
        """True if all rows of the result are copies of the one that a tracked tensor has."""
        (place,) = self.places[:1]
        source = self.leaves[place]
        return source.dim() < value.dim() or len(source) == 1

    def repeats_second(self, value: torch.Tensor) -> bool:
        """True if the second dimension of the result of what copies rows has copies of one."""
        source = self.leaves[self.places[0]]
        if value.dim() < 2 or source.dim() > value.dim():
            return False
        before = source.dim() - value.dim() + 1  # where the second dimension was
        return before < 0 or source.shape[before] == 1

    def tiles(self, value: torch.Tensor, factor: int) -> bool:
        """True if the result is a tracked tensor of so many rows, again and again."""
        (place,) = self.places[:1]
        source = self.leaves[place]
        repeats = self.func in (torch.Tensor.repeat, torch.tile, torch.Tensor.tile)
        return repeats and source.dim() == value.dim() and len(source) == factor
