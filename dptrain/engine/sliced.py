"""An optimizer that steps on a rank's pieces of the parameters, and keeps state for those only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dptrain.distributed import local_of
from dptrain.engine.joined import JoinedOptimizer, single_optimizers

_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
PIECES = "pieces"
"""Where a state of an optimizer says which entries it is for; without it, for all."""


def whole_because(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why an optimizer needs whole parameters; ``None`` if it works entry by entry.

    torch's own are known by their very class, since one that is derived may do anything. A class of
    a user's says ``elementwise = True`` if its ``step`` changes an entry of a parameter by that
    entry, its gradient and its state alone, with state tensors that are of the parameter's shape or
    the same for all of its entries.
    """
    for single in single_optimizers(optimizer):
        name = type(single).__name__
        if hasattr(single, "scales"):
            return f"{name} scales per-example gradients by state that each rank needs as a whole"
        if type(single) not in _ELEMENTWISE and not vars(type(single)).get("elementwise", False):
            return (
                f"{name} is not known to work entry by entry (set elementwise = True in a class of "
                "your own that does)"
            )
    return None


class SlicedOptimizer:
    """The user's optimizer, whose groups hold pieces of the parameters while it steps.

    A piece is a parameter of its own over the same memory, so that the optimizer's class, hooks,
    groups and schedulers do what they always do, on fewer entries. Between steps the groups hold
    the user's parameters. The state belongs to the pieces, and ``state_dict()`` of the user's
    optimizer is that of the pieces with their place (``PIECES``); ``load_state_dict()`` takes that
    of any pieces that hold all of these, and whole ones.

    Args:
        optimizer: works entry by entry (``whole_because``).
        pieces: for each, the first entry and one past the last.

    Attributes:
        parameters: the pieces as parameters, of the shape of the whole where they are that. Empty
            ones never have a gradient, which every optimizer passes over.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        self.optimizer = optimizer
        self.pieces = list(pieces)
        self._whole = list(parameters)
        self.parameters = [
            nn.Parameter(_piece(p, low, high))
            for p, (low, high) in zip(parameters, pieces, strict=True)
        ]
        self._to_piece: dict[Any, Any] = dict(zip(self._whole, self.parameters, strict=True))
        self._to_whole: dict[Any, Any] = dict(zip(self.parameters, self._whole, strict=True))
        self._place = dict(zip(self.parameters, self.pieces, strict=True))
        self._left: dict[str, Any] | None = None  # the state, when detached
        singles = list(single_optimizers(optimizer))
        stepped = any(single.state for single in singles)
        before = optimizer.state_dict() if stepped else None
        for single in singles:
            single.state.clear()
        self._handles = [handle for single in singles for handle in self._hooked(single)]
        if before is not None:
            optimizer.load_state_dict(before)

    def detach(self) -> None:
        """The optimizer is the user's again; what it kept for the pieces is for ``state`` only."""
        self._left = self.state
        for handle in self._handles:
            handle.remove()
        for single in single_optimizers(self.optimizer):
            for piece in self.parameters:
                single.state.pop(piece, None)
        self._handles = []

    @property
    def state(self) -> dict[str, Any]:
        """The state of the pieces; after ``detach`` as it was then."""
        return self.optimizer.state_dict() if self._left is None else self._left

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of these pieces, from the states of all ranks that saved it or a whole."""
        if len(states) == 1:
            self.optimizer.load_state_dict(dict(states[0]))
        else:
            self.optimizer.load_state_dict(for_each_part(self.optimizer, states, self._cut))

    def step(self) -> None:
        """The optimizer steps on the pieces, whose gradients are set; they are taken off then."""
        for whole, piece, (low, high) in zip(
            self._whole, self.parameters, self.pieces, strict=True
        ):
            piece.data = _piece(whole, low, high)  # the user may have given it other memory
            if low == high:
                piece.grad = None
        with contextlib.ExitStack() as stack:
            for single in single_optimizers(self.optimizer):
                stack.enter_context(self._in_groups(single))
            self.optimizer.step()
        for piece in self.parameters:
            piece.grad = None

    @contextlib.contextmanager
    def _in_groups(self, single: torch.optim.Optimizer) -> Iterator[None]:
        self._exchange(single, self._to_piece)
        try:
            yield
        finally:
            self._exchange(single, self._to_whole)

    @staticmethod
    def _exchange(single: torch.optim.Optimizer, other: Mapping[Any, Any]) -> None:
        for group in single.param_groups:
            group["params"] = [other.get(p, p) for p in group["params"]]

    def _hooked(self, single: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Hook an optimizer so that the states it saves and loads are those of the pieces."""

        def saved(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            places = self._places(single)
            self._exchange(single, self._to_whole)
            return {**state, PIECES: {index: list(place) for index, place in places.items()}}

        def given(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            sizes = [len(group["params"]) for group in single.param_groups]
            if [len(group["params"]) for group in state["param_groups"]] != sizes:
                raise ValueError(
                    "the optimizer state has other groups of parameters than this optimizer, "
                    f"which has {sizes} parameters per group"
                )
            cut = self._cut(single, [state])
            self._exchange(single, self._to_piece)
            return cut

        def loaded(_: Any) -> None:
            self._exchange(single, self._to_whole)

        return [
            single.register_state_dict_pre_hook(lambda _: self._exchange(single, self._to_piece)),
            single.register_state_dict_post_hook(saved),
            single.register_load_state_dict_pre_hook(given),
            single.register_load_state_dict_post_hook(loaded),
        ]

    def _cut(
        self, single: torch.optim.Optimizer, states: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        wanted = {
            index: (*self._place[self._to_piece[p]], p)
            for index, p in enumerate(all_of(single))
            if p in self._to_piece
        }
        return cut_state(states, wanted)

    def _places(self, single: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
        """The place of each piece in the groups, by the index that a state has it under."""
        return {
            index: self._place[piece]
            for index, piece in enumerate(all_of(single))
            if piece in self._place
        }


def joined_states(
    optimizer: torch.optim.Optimizer, states: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One state for the whole parameters of an optimizer, of the states of all their pieces."""

    def whole(single: torch.optim.Optimizer, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        wanted = {index: (0, p.numel(), p) for index, p in enumerate(all_of(single))}
        state = cut_state(found, wanted)
        del state[PIECES]
        return state

    return for_each_part(optimizer, states, whole)


def nothing_of(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of pieces, without the pieces."""
    return for_each_part(optimizer, [state], lambda _, found: {**found[0], "state": {}, PIECES: {}})


def for_each_part(
    optimizer: torch.optim.Optimizer,
    states: Sequence[Mapping[str, Any]],
    made: Callable[[torch.optim.Optimizer, Sequence[Mapping[str, Any]]], dict[str, Any]],
) -> dict[str, Any]:
    """The result of ``made`` for an optimizer's states, or for those of each joined optimizer."""
    if not isinstance(optimizer, JoinedOptimizer):
        return made(optimizer, states)
    parts = [state.get("parts", []) for state in states]
    if any(len(each) != len(optimizer.parts) for each in parts):
        raise ValueError(
            f"the optimizer states do not come from {len(optimizer.parts)} joined optimizers: join "
            "the same optimizers in the same order"
        )
    each = zip(optimizer.parts, zip(*parts, strict=True), strict=True)
    return {"parts": [for_each_part(part, found, made) for part, found in each]}


def in_pieces(state: Mapping[str, Any]) -> bool:
    """True if a state of an optimizer is one of slices."""
    return PIECES in state or any(in_pieces(part) for part in state.get("parts", []))


def cut_state(
    states: Sequence[Mapping[str, Any]], wanted: Mapping[int, tuple[int, int, torch.Tensor]]
) -> dict[str, Any]:
    """The state of some pieces, out of the states of other pieces of the same parameters.

    Args:
        states: of one optimizer of torch, as saved whole or by several ranks.
        wanted: for each parameter of the groups by its index, the first entry and one past the last
            of the piece, and the whole parameter; those left out are taken as they are.
    """
    found: dict[Any, dict[str, Any]] = {}
    for index in sorted({index for state in states for index in state["state"]}):
        sources = [
            (state.get(PIECES, {}).get(index), state["state"][index])
            for state in states
            if index in state["state"]
        ]
        if index not in wanted:
            found[index] = copy.deepcopy(sources[0][1])
            continue
        low, high, like = wanted[index]
        if low == high and like.numel():
            continue
        whole = (0, like.numel())
        held = [(tuple(place or whole), values) for place, values in sources]
        found[index] = {
            name: _assembled(index, name, [(p, v[name]) for p, v in held], (low, high), like)
            for name in held[0][1]
        }
    return {**states[0], "state": found, PIECES: {i: [a, b] for i, (a, b, _) in wanted.items()}}


def _assembled(
    index: int,
    name: str,
    sources: Sequence[tuple[tuple[int, int], Any]],
    piece: tuple[int, int],
    like: torch.Tensor,
) -> Any:
    """A value of the state for a piece: cut out of tensors of the pieces' shapes, or the first."""
    whole = (0, like.numel())

    def for_each_entry(place: tuple[int, int], value: Any) -> bool:
        expected = like.shape if place == whole else (place[1] - place[0],)
        return isinstance(value, torch.Tensor) and value.shape == expected

    place, first = sources[0]
    if not for_each_entry(place, first) or (place == piece == whole):
        return copy.deepcopy(first)
    low, high = piece
    out = torch.empty(high - low, dtype=first.dtype, device=first.device)
    held = torch.zeros(high - low, dtype=torch.bool)
    for (start, stop), value in sources:
        begin, end = max(start, low), min(stop, high)
        if begin < end and for_each_entry((start, stop), value):
            out[begin - low : end - low] = value.reshape(-1)[begin - start : end - start]
            held[begin - low : end - low] = True
    if not bool(held.all()):
        raise ValueError(
            f"the optimizer state lacks {int((~held).sum())} entries of {name!r} of parameter "
            f"{index}: give the states of all ranks of the saved run"
        )
    return laid_out_like(like, out.view(like.shape)) if piece == whole else out


def laid_out_like(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` in the memory order of another tensor of its shape.

    torch's fused optimizers go through parameter, gradient and state in the order of memory, as
    autograd makes gradients in that of the parameter; a tensor in another order (channels last,
    say) they would pair with the wrong entries, without a word.
    """
    if values.stride() == like.stride() or (like.is_contiguous() and values.is_contiguous()):
        return values
    return torch.empty_like(like, dtype=values.dtype, device=values.device).copy_(values)


def all_of(single: torch.optim.Optimizer) -> list[Any]:
    """The parameters of an optimizer, in the order of the indices of its state."""
    return [p for group in single.param_groups for p in group["params"]]


def _piece(p: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Entries of a parameter: its own memory where that is in order, or a copy."""
    data = local_of(p)
    if data.numel() < p.numel():  # no rank has the rest of a parameter that fully_shard divided
        return data.reshape(-1)
    if high - low == p.numel():
        return data
    return data.reshape(-1)[low:high]
