"""Tensors of which each rank has a piece: their sums are scattered, and they are gathered again."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dptrain.clipping.base import summing_dtype
from dptrain.distributed.transport import bucket_length, device_for, reported

Pieces = Sequence[Sequence[tuple[int, int]]]
"""For each rank, the first entry and one past the last of its piece of each flattened tensor."""

# torch 2.13 gave both another name and warns of the old one.
_REDUCE: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@torch.no_grad()
def reduce_pieces(
    tensors: Sequence[torch.Tensor | None],
    like: Sequence[torch.Tensor],
    pieces: Pieces,
    *,
    rank: int,
    group: Any = None,
) -> list[torch.Tensor]:
    """See ``Ranks.scatter_sums``; ``rank`` and ``pieces`` are of the process group."""
    found: dict[int, torch.Tensor] = {}
    kinds = [(summing_dtype(tensor), tensor.device) for tensor in like]
    for dtype, device, members in _alike(kinds):
        cut = _Cut(members, pieces)
        flat = {i: t.reshape(-1) for i in members if (t := tensors[i]) is not None}
        own = torch.zeros(cut.sizes[rank], dtype=dtype, device=device)
        for start, stop in cut.buckets():
            length = stop - start
            sent = torch.zeros(len(pieces) * length, dtype=dtype, device=device)
            for source, index, (low, high), at in cut.within(start, stop):
                if index in flat:
                    first = source * length + at - start
                    sent[first : first + high - low] = flat[index][low:high]
            sent = sent.to(device_for(device))
            got = _reduced(sent, len(pieces), group)
            mine = own[start:stop]
            mine.copy_(got[: len(mine)])
        for index, at in cut.starts(rank):
            low, high = pieces[rank][index]
            piece = own[at : at + high - low]
            shape = like[index].shape
            found[index] = piece.view(shape) if high - low == shape.numel() else piece
    return [found[index] for index in range(len(like))]


def _reduced(sent: torch.Tensor, world: int, group: Any) -> torch.Tensor:
    """This rank's part of the sum over the ranks of vectors of ``world`` parts of one length."""
    if sent.device.type == "cpu":
        # A reduce-scatter of gloo's is an all-reduce of which most is thrown away: twice the
        # traffic. So each rank is sent the others' parts, and adds them up in the ranks' order.
        parts = torch.empty_like(sent)
        with reported():
            dist.all_to_all_single(parts, sent, group=group)
        return parts.view(world, -1).sum(0)
    got = sent.new_empty(len(sent) // world)
    with reported():
        _REDUCE(got, sent, group=group)
    return got


@torch.no_grad()
def collect_pieces(
    own: Sequence[torch.Tensor], into: Sequence[torch.Tensor], pieces: Pieces, *, rank: int
) -> None:
    """See ``Ranks.gather_pieces``."""
    kinds = [(tensor.dtype, tensor.device) for tensor in into]
    for dtype, device, members in _alike(kinds):
        cut = _Cut(members, pieces)
        # Through detach() a write is seen by whoever watches the version of a parameter.
        whole = {i: into[i].detach() for i in members}
        flat = {i: t.view(-1) if t.is_contiguous() else t.flatten() for i, t in whole.items()}
        mine = {i: own[i].detach().reshape(-1) for i in members}
        for start, stop in cut.buckets():
            length = stop - start
            sent = torch.zeros(length, dtype=dtype, device=device)
            for source, index, (low, high), at in cut.within(start, stop):
                if source == rank:
                    first = low - pieces[rank][index][0]
                    sent[at - start : at - start + high - low] = mine[index][
                        first : first + high - low
                    ]
            sent = sent.to(device_for(device))
            got = torch.empty(len(pieces) * length, dtype=dtype, device=sent.device)
            with reported():  # bytes: not every backend knows every dtype
                _GATHER(got.view(torch.uint8), sent.view(torch.uint8))
            for source, index, (low, high), at in cut.within(start, stop):
                first = source * length + at - start
                flat[index][low:high].copy_(got[first : first + high - low])
        for index, tensor in whole.items():
            if not tensor.is_contiguous():
                tensor.copy_(flat[index].view_as(tensor))


def _alike(
    kinds: Sequence[tuple[torch.dtype, torch.device]],
) -> Iterator[tuple[torch.dtype, torch.device, list[int]]]:
    """Indices of tensors of one dtype and device at a time, the same on every rank."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    for (dtype, device), members in found.items():
        yield dtype, device, members


@dataclasses.dataclass(frozen=True)
class _Cut:
    """The pieces of some tensors, one after the other in a vector for each rank.

    The collectives take as much of every rank: the vectors are sent in buckets of as many numbers
    of each, and the shorter ones end in zeros.

    Attributes:
        pieces: of all ranks and all tensors.
    """

    members: list[int]
    pieces: Pieces

    def __post_init__(self) -> None:
        ends = [
            list(itertools.accumulate(each[i][1] - each[i][0] for i in self.members))
            for each in self.pieces
        ]
        object.__setattr__(self, "_ends", ends)
        object.__setattr__(self, "sizes", [each[-1] if each else 0 for each in ends])

    _ends: list[list[int]] = dataclasses.field(init=False)
    sizes: list[int] = dataclasses.field(init=False)

    def starts(self, rank: int) -> Iterator[tuple[int, int]]:
        """Each tensor, and where its piece begins in the rank's vector."""
        yield from zip(self.members, [0, *self._ends[rank]], strict=False)

    def buckets(self) -> Iterator[tuple[int, int]]:
        """First number and one past the last of the vectors, as they travel together."""
        longest = max(self.sizes)
        step = bucket_length(longest, len(self.pieces))
        for start in range(0, longest, step):
            yield start, min(start + step, longest)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, tuple[int, int], int]]:
        """Pieces between the two: the rank, the tensor, its entries, their place in the vector."""
        for rank, ends in enumerate(self._ends):
            position = bisect.bisect_right(ends, start)
            while position < len(ends):
                index = self.members[position]
                low, high = self.pieces[rank][index]
                begin = ends[position] - (high - low)
                if begin >= stop:
                    break
                first, last = max(begin, start), min(ends[position], stop)
                if first < last:
                    yield rank, index, (low + first - begin, low + last - begin), first
                position += 1
