"""What the streams over flat rows share: normals, blocks, position, state and refusals."""

from __future__ import annotations

import bisect
import itertools
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch

from dptrain.core import checks
from dptrain.noise.generators.normals import open_normals
from dptrain.noise.generators.threads import for_each
from dptrain.noise.streams.growth import check_growth
from dptrain.noise.streams.history import History, check_private_folder
from dptrain.noise.streams.layout import Block, Layout, Pieces, Shard, blocks_of
from dptrain.noise.streams.rows import round_randomly
from dptrain.noise.streams.stream import NoiseStream
from dptrain.strategies import Strategy

_STATE_FIELDS = {"step", "seed", "strategy", "steps", "layout", "blocks", "buffers"}
_DTYPES = (torch.float32, torch.bfloat16)


class FlatStream(NoiseStream):
    """A stream that works on flat float32 rows, block by block, on as many threads as torch uses.

    A subclass allocates the buffers of a block in ``_allocate``, looks up what a step needs in
    ``_start_step``, and turns z_t into the noise of step t in ``_correlate``, which other
    threads call for other blocks at the same time. The float32 tensors of ``next()`` are views of
    rows that the next call overwrites; the caller may scale them in place.

    **bfloat16 buffers** (``dtype``). The row that is released is the float32 y_t; only what is kept
    of it is rounded, at random and by secret bits, so that its mean is y_t. C·noise is then Z plus
    a small error of mean 0 and not exactly Gaussian: ``notes`` says so, and no guarantee over it is
    exact (docs/theory/noise.md#thm-bfloat16; ``test_bfloat16_buffers_stay_within_their_bound``).

    **Buffers in a file** (``folder``). They are the same tensors, over a file without a name that
    is mapped into memory (``History``), and the noise is the same bit for bit. A checkpoint takes
    as much memory as the buffers have, for the time that it is written.

    Args:
        strategy: the strategy matrix; bound to ``steps`` here if it is not yet.
        steps: n.
        like: tensors whose shapes, dtypes and devices the noise has.
        seed: integer in [0, 2^128).
        secure: draw from a cryptographic generator.
        dtype: of the buffers, ``torch.float32`` or ``torch.bfloat16``.
        per_parameter: a row per parameter, not one for all parameters of a device.
        shard: the slice that the stream owns; see ``shard``. Nothing is allocated for the others.
        pieces: in place of it, what it owns of each flattened tensor: first entry, one past the
            last.
        folder: where the buffers are kept in a file, not in memory; for noise on the CPU.

    Raises:
        ValueError: if the strategy does not fit ``steps`` or its noise grows too large for float32
            (``check_growth``), the seed or the dtype is out of range, ``like`` is empty or holds a
            tensor that is not floating-point, or a device is neither CPU nor CUDA, or not the CPU
            though a folder is given.
        OSError: if others may enter the folder, or it has no room; see ``History``.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        steps: int,
        like: Sequence[torch.Tensor],
        seed: int,
        secure: bool = False,
        dtype: torch.dtype = torch.float32,
        per_parameter: bool = False,
        shard: Shard | None = None,
        pieces: Sequence[Sequence[int]] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.steps = checks.steps(steps)
        self.step = 0
        self.strategy = strategy.bind(self.steps)
        check_growth(self.strategy, self.steps)
        self.normals = open_normals(seed, secure=secure)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype}: buffers are torch.float32 or torch.bfloat16")
        self._dtype = dtype
        self._secure = secure
        self._layout = Layout.of(like, per_parameter=per_parameter)
        for device in self._layout.devices:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"like is on device {device}: noise is drawn on 'cpu' or 'cuda'")
            if folder is not None and device.type != "cpu":
                raise ValueError(
                    f"folder={folder!r} with like on device {device}: past noise is kept in a file "
                    "for noise on the CPU only; leave folder out"
                )
        self._folder = None if folder is None else os.fspath(folder)
        self._open_shard((shard or Shard()) if pieces is None else Pieces.of(pieces, self._layout))

    def _open_shard(self, shard: Shard | Pieces) -> None:
        self._shard = shard
        # Runs of entries of a row lie one after the other in memory, without the gaps.
        spans = shard.spans(self._layout)
        self._blocks = blocks_of(spans, self._layout)
        self._firsts = [[first for first, _ in runs] for runs in spans]
        lengths = [[last - first for first, last in runs] for runs in spans]
        self._starts = [[0, *itertools.accumulate(each)] for each in lengths]
        self._rows = [
            torch.zeros(sum(each), device=device, dtype=torch.float32)
            for each, device in zip(lengths, self._layout.devices, strict=True)
        ]
        self._views = [
            self._view(index, *piece) for index, piece in enumerate(shard.pieces(self._layout))
        ]
        self._history = self._open_history()
        if self._history is None:
            self._buffers = [self._allocate(self._row(block)) for block in self._blocks]
        else:
            self._buffers = self._history.buffers

    def _open_history(self) -> History | None:
        """The file of the buffers, where there is a folder for it and anything to keep.

        Raises:
            ValueError: if the buffers do not begin as zeros, as those of a file do.
        """
        if self._folder is None:
            return None
        one = self._allocate(torch.empty(1))
        if any(bool(buffer.any()) for buffer in one):
            raise ValueError(
                f"folder={self._folder!r} with a {type(self).__name__}, whose buffers do not begin "
                "as zeros: leave folder out"
            )
        blocks = [
            [(*buffer.shape[:-1], block.stop - block.start) for buffer in one]
            for block in self._blocks
        ]
        if not (self._blocks and self._keeps):
            check_private_folder(self._folder)
            return None
        return History(self._folder, blocks, self._dtype)

    def _view(self, index: int, low: int, high: int) -> torch.Tensor:
        """Entries ``low`` to ``high`` of a parameter's noise, in its shape if these are all."""
        shape, (group, offset) = self._layout.shapes[index], self._layout.places[index]
        first = self._at(group, offset + low) if low < high else 0
        view = self._rows[group][first : first + high - low]
        return view.view(shape) if high - low == shape.numel() else view

    def _row(self, block: Block) -> torch.Tensor:
        first = self._at(block.group, block.start)
        return self._rows[block.group][first : first + block.stop - block.start]

    def _at(self, group: int, entry: int) -> int:
        """Where an entry of a flat row lies among those that are owned."""
        run = bisect.bisect_right(self._firsts[group], entry) - 1
        return self._starts[group][run] + entry - self._firsts[group][run]

    @abstractmethod
    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The buffers of a block, as before the first step; ``row`` shows size and device.

        Their dtype is ``self._dtype``, their last dimension that of the entries of ``row`` (by
        which a state is cut for other shards), and what is written to them goes through ``_store``.
        Those of a stream that is to take a ``folder`` are zero.
        """

    def _start_step(self) -> None:
        """Called once before the blocks of step ``self.step``."""

    @abstractmethod
    def _correlate(self, block: Block, row: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        """Overwrite ``row`` (its content is arbitrary) with the noise of step ``self.step``.

        Args:
            block: where the row lies.
            row: float32, its entries.
            buffers: what ``_allocate`` returned for the block.
        """

    def _draw(self, block: Block, out: torch.Tensor, step: int) -> None:
        """``out`` ← the block's entries of row ``step`` of Z."""
        self.normals.fill(out, group=block.group, step=step, start=block.start, size=block.size)

    def _store(self, block: Block, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> None:
        """``out``, a row of a buffer, ← float32 ``values``, rounded as the class says.

        ``index`` tells the rows apart that one step stores.
        """
        kept = values
        if self._dtype is not torch.float32:
            kept = out if self._history is None else torch.empty_like(out)
            round_randomly(
                values, kept, seed=self.normals.seed, step=self.step, index=index, block=block
            )
        if self._history is not None:
            self._history.write(kept, out)
        elif kept is not out:
            out.copy_(kept)

    def __next__(self) -> list[torch.Tensor]:
        if self.step >= self.steps:
            raise RuntimeError(
                f"all {self.steps} rows of noise are spent: a longer run needs a mechanism "
                "(and a guarantee) for more steps"
            )
        if self._history is not None:
            self._history.check_process()
        self._start_step()
        for_each(
            self._advance,
            range(len(self._blocks)),
            entries=sum(
                block.stop - block.start
                for block in self._blocks
                if self._layout.devices[block.group].type == "cpu"
            ),
        )
        self.step += 1
        if self._history is not None and self.step < self.steps:
            self._history.read_ahead()
        return [
            view if dtype is torch.float32 else view.to(dtype)
            for view, dtype in zip(self._views, self._layout.dtypes, strict=True)
        ]

    def _advance(self, index: int) -> None:
        block = self._blocks[index]
        if self._history is not None:
            self._history.begin(index)
        self._correlate(block, self._row(block), self._buffers[index])
        if self._history is not None:
            self._history.end(index)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers, in memory (which is taken as they fill) or in a file."""
        return sum(b.numel() * b.element_size() for buffers in self._buffers for b in buffers)

    @property
    def _keeps(self) -> bool:
        """Whether anything is kept of an entry, be it one of this shard or of another."""
        return any(buffer.numel() for buffer in self._allocate(torch.empty(1)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What bfloat16 buffers do to C·noise; empty for float32, or where nothing is kept."""
        if self._dtype is torch.float32 or not self._keeps:
            return ()
        return (
            "the noise buffers are bfloat16: C·noise is only approximately Gaussian, with an error "
            "of mean 0 (rounding at random, by secret bits) and of less than 2^-7, in "
            "standard deviation at most 2^-8, of every stored entry, which the analysis leaves out",
        )

    def shard(self, rank: int, world: int) -> Self:
        """A new stream for one of ``world`` slices; in a long row they start at multiples of 64."""
        if self.step or self._shard != Shard():
            state = f"at step={self.step}" if self.step else "a shard already"
            raise RuntimeError(
                f"this stream is {state}: open a new one with noise_stream and shard that"
            )
        other = self.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._open_shard(Shard(rank=rank, world=world))
        return other

    @property
    def generator(self) -> str:
        """What draws Z on the devices of this stream, for the guarantee."""
        return self.normals.on({device.type for device in self._layout.devices})

    def state_dict(self) -> dict[str, Any]:
        """Private: whoever reads it can subtract the noise.

        Holds only tensors, integers, strings and lists, so ``torch.load(weights_only=True)`` reads
        it (the seed is hexadecimal text: it does not fit 64 bits). How many shards there are does
        not matter to it: it names the entries that its buffers are for.
        """
        buffers = [[b.clone() for b in buffers] for buffers in self._buffers]
        if self._history is not None:
            self._history.drop()
        return {
            "step": self.step,
            "seed": f"{self.normals.seed:032x}",
            "strategy": self.strategy.coefficient_hash,
            "steps": self.steps,
            "layout": self._describe(),
            "blocks": [[block.group, block.start, block.stop] for block in self._blocks],
            "buffers": buffers,
        }

    def _describe(self) -> dict[str, Any]:
        """Everything besides strategy and length that decides the values of a row."""
        return {
            **self._layout.describe(),
            "generator": self.normals.name,
            "stream": type(self).__name__,
            "dtype": str(self._dtype),
        }

    def load_state_dict(self, *states: dict[str, Any]) -> None:
        """Continue bit for bit, with their seed, from the states of all shards of a stream.

        Args:
            states: of one stream, or of its shards, in any order and as many as there were.

        Raises:
            ValueError: if they were saved for another strategy, another run length, other shapes,
                dtypes or kinds of device, at different steps, or do not hold all of this stream's
                entries; the stream is then left as it was.
        """
        first = _one_of(states)
        here = {
            "steps": self.steps,
            "strategy": self.strategy.coefficient_hash,
            **self._describe(),
        }
        saved = {"steps": first["steps"], "strategy": first["strategy"], **first["layout"]}
        for name, value in here.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the noise state was saved for {name}={saved.get(name)}, this stream has "
                    f"{name}={value}: resume with the model and mechanism of the saved run"
                )
        step = first["step"]
        if not 0 <= step <= self.steps:
            raise ValueError(f"the noise state is at step={step}, outside 0..{self.steps}")
        if self._history is not None:
            self._history.check_process()
        copies = self._copies(_saved_blocks(states, len(self._rows)))
        self.normals = open_normals(int(first["seed"], 16), secure=self._secure)
        self.step = step
        for mine, theirs in copies:
            mine.copy_(theirs)
        if self._history is not None:
            self._history.drop()

    def _copies(
        self, saved: list[list[tuple[int, int, list[torch.Tensor]]]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of this stream's buffers, all entries of them, and of what is saved of these.

        Args:
            saved: by group, in order: first entry, one past the last, and the buffers of a block.
        """
        copies = []
        for block, mine in zip(self._blocks, self._buffers, strict=True):
            blocks = saved[block.group]
            at = block.start
            index = bisect.bisect_right(blocks, at, key=lambda each: each[1])
            while at < block.stop and index < len(blocks) and blocks[index][0] <= at:
                start, stop, theirs = blocks[index]
                end = min(stop, block.stop)
                if len(theirs) != len(mine):
                    raise ValueError(_SHAPES)
                for buffer, other in zip(mine, theirs, strict=True):
                    alike = (buffer.shape[:-1], buffer.dtype) == (other.shape[:-1], other.dtype)
                    if not alike or other.shape[-1] != stop - start:
                        raise ValueError(_SHAPES)
                    into = buffer[..., at - block.start : end - block.start]
                    copies.append((into, other[..., at - start : end - start]))
                at, index = end, index + 1
            if at < block.stop:
                raise ValueError(
                    f"the noise states lack entry {at} of row {block.group}: give those of all "
                    "shards of the stream that was saved"
                )
        return copies


_SHAPES = "the buffers of the noise state do not have the shapes that it states"


def _one_of(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first of some states, which have to be of one stream at one step.

    Raises:
        ValueError: if one is no state, or they differ.
    """
    if not states:
        raise ValueError("there is no noise state: give that of the stream, or of all its shards")
    for state in states:
        if set(state) != _STATE_FIELDS:
            raise ValueError(
                f"not a noise state: it has {sorted(state)}, expected {sorted(_STATE_FIELDS)}"
            )
    first = states[0]
    for name in ("step", "seed", "strategy", "steps", "layout"):
        if any(state[name] != first[name] for state in states):
            raise ValueError(
                f"the noise states differ in {name}: give those of the shards of one stream, saved "
                "after the same step"
            )
    return first


def _saved_blocks(
    states: Sequence[dict[str, Any]], groups: int
) -> list[list[tuple[int, int, list[torch.Tensor]]]]:
    """First entry, one past the last and buffers of the saved blocks of each group, in order.

    Raises:
        ValueError: if the states do not say which entries their buffers are for.
    """
    saved: list[list[tuple[int, int, list[torch.Tensor]]]] = [[] for _ in range(groups)]
    for state in states:
        if len(state["blocks"]) != len(state["buffers"]):
            raise ValueError(_SHAPES)
        for (group, start, stop), buffers in zip(state["blocks"], state["buffers"], strict=True):
            saved[group].append((start, stop, list(buffers)))
    for blocks in saved:
        blocks.sort(key=lambda each: each[:2])
    return saved
