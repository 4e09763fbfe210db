"""Parameters that know what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from dptrain.clipping.bookkeeping.operations.roots import Root


class Session(Protocol):
    """What tracked tensors belong to: a layer's call.

    Attributes:
        rows: that the model is fed.
        without_rows: whether no tensor at hand has rows of the batch.
    """

    rows: int
    without_rows: bool

    def operate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The operation's result, with whatever gradients it leads to observed."""

    def each_row(self, tracked: Tracked, factor: int, dims: int) -> torch.Tensor:
        """A tracked tensor with a copy for every row, to meet tensors of so many dimensions."""

    def each_second(self, tracked: Tracked) -> torch.Tensor:
        """Likewise, for a tensor whose second dimension has the rows."""

    def observed(
        self, op: Any, output: torch.Tensor, kept: Sequence[torch.Tensor], uses: Any
    ) -> torch.Tensor:
        """The output of an operation on rows, with the uses of its tracked tensors."""

    def note_written(self, roots: Sequence[Root], constants: Sequence[torch.Tensor]) -> None:
        """Take note of what was written into a tracked tensor."""

    def written(self) -> tuple[list[Root], list[torch.Tensor]]:
        """What was written into tracked tensors: of these roots, and these constants."""

    def refusal(self, func: Callable[..., Any], what: str) -> RuntimeError:
        """Why an operation cannot be followed."""


class Tracked(torch.Tensor):
    """A parameter, or what was computed of parameters alone, which all examples share.

    It is a tensor with autograd's graph back to the parameters. Each operation of torch that it
    takes part in goes through ``Session.operate``: what comes of tracked tensors and constants is
    tracked again; where it meets rows of the batch, every row gets gradients of its own. What goes
    past that (a custom autograd function, scripted code) leaves a gradient at the parameter itself,
    and is refused there.

    Attributes:
        session: of the layer that the parameters belong to.
        roots: what it was made of.
        whole: whether it is a parameter itself, its one root.
        constants: other tensors and numbers that it was made of, which must be the same for
            all batches.
        used: whether rows of the batch have met it.
        repeats: whether all entries of its second dimension were copies of one when it was made.
        made: the version that it had then; writing into it makes another.
        second: whether these are as many as the rows, whatever their number is.
    """

    session: Session
    roots: Sequence[Root]
    whole: bool
    constants: Sequence[torch.Tensor]
    used: bool
    repeats: bool
    made: int
    second: bool

    @property
    def still_repeats(self) -> bool:
        """Whether all entries of the second dimension are copies of one, and none was written."""
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
    session: Session,
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
