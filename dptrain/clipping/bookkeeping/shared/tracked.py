"""Parameters that know what is done with them, and what shared values are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from dptrain.clipping.base.rows import summing_dtype
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.use import Materialized, Use


@dataclasses.dataclass(frozen=True, eq=False)
class Root:
    """A place in autograd's graph that gradients of shared values are pulled back to.

    No root lies behind another, so that their gradients add up.

    Attributes:
        parameter: behind it.
        edge: into the graph, where it begins.
        ids: rows of the parameter that were looked up, one after the other; ``None``: it is the
            parameter itself.
        padding: the id that gets no gradient.
    """

    parameter: nn.Parameter
    edge: GradientEdge
    ids: torch.Tensor | None = None
    padding: int | None = None

    @classmethod
    def of(cls, view: torch.Tensor, parameter: nn.Parameter) -> Root:
        """A view of a parameter."""
        return cls(parameter, get_gradient_edge(view))

    @classmethod
    def looked_up(
        cls, rows: torch.Tensor, parameter: nn.Parameter, ids: torch.Tensor, padding: int | None
    ) -> Root:
        """Rows of a table, by a view of it that nothing else was made of."""
        return cls(parameter, get_gradient_edge(rows), ids.flatten().clone(), padding)

    def use(self, gradients: torch.Tensor) -> Use:
        """The parameter's, from gradients by this place of shape (rows, *shape of what is here)."""
        # An operation may have had less precision.
        gradients = gradients.to(summing_dtype(self.parameter))
        if self.ids is None:
            return Materialized(gradients)
        length, width = self.parameter.shape
        gradients = gradients.reshape(len(gradients), len(self.ids), width)
        if self.padding is not None:
            gradients = gradients.masked_fill((self.ids == self.padding)[:, None], 0.0)
        return Gathered(self.ids.expand(len(gradients), -1), gradients, length)


class Tracked(torch.Tensor):
    """A parameter, or what was computed of parameters alone, which all examples share.

    It is a tensor with autograd's graph back to the parameters. Each operation of torch that it
    takes part in goes through its session: what comes of tracked tensors and constants is tracked
    again; where it meets rows of the batch, every row gets gradients of its own. What goes
    past that (a custom autograd function, scripted code) leaves a gradient at the parameter itself,
    and is refused there.

    Attributes:
        roots: what it was made of.
        whole: whether it is a parameter itself, its one root.
        constants: other tensors and numbers that it was made of, which must be the same for
            all batches.
        used: whether rows of the batch have met it.
        repeats: whether all entries of its second dimension were copies of one when it was made.
        made: the version that it had then; writing into it makes another.
        second: whether these are as many as the rows, whatever their number is.
    """

    session: Any
    roots: Sequence[Root]
    whole: bool
    constants: Sequence[torch.Tensor]
    used: bool
    repeats: bool
    made: int
    second: bool

    @property
    def still_repeats(self) -> bool:
        """True if all entries of the second dimension are copies of one, and none was written."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.repeats and self._version == self.made

    def by_rows(self) -> torch.Tensor:
        """The same with a copy for every row, in a new first dimension."""
        return self.session.each_row(self, 1, self.dim() + 1)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return operate(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().clone()


def track(
    value: torch.Tensor,
    session: Any,
    roots: Sequence[Root],
    *,
    whole: bool = False,
    constants: Sequence[torch.Tensor] = (),
) -> Tracked:
    """The value, tracked; its graph leads to the roots."""
    found = value.as_subclass(Tracked)
    found.session, found.roots, found.whole = session, roots, whole
    found.constants, found.used = constants, False
    found.repeats, found.second = False, False
    found.made = found._version
    return found


def operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation with tracked tensors among its arguments, by the first one's session.

    Or by that of a call under way on what all examples share, of which no tensor has rows.
    """
    sessions = [leaf.session for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tracked)]
    session = next((each for each in sessions if each.without_rows), sessions[0])
    return session.operate(func, args, kwargs)
