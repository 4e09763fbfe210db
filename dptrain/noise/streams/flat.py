"""The base of streams over flat rows: normals, blocks, grid, position, state and refusals."""

from __future__ import annotations

import bisect
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch

from dptrain.core import checks, on_processor
from dptrain.noise.generators.normals import Normals
from dptrain.noise.generators.threads import for_each
from dptrain.noise.streams.grid import (
    check_growth,
    finest_bits,
    grid_of,
    largest_deviation,
    stored_bits,
)
from dptrain.noise.streams.history import History, check_private_folder
from dptrain.noise.streams.kernels import add_past, put_all_on_grid
from dptrain.noise.streams.layout import Block, Layout, Pieces, Shard, blocks_of
from dptrain.noise.streams.rows import round_randomly, scratch
from dptrain.strategies import Strategy

_log = logging.getLogger(__name__)

_STATE_FIELDS = {"step", "seed", "strategy", "steps", "layout", "blocks", "buffers"}
_DTYPES = (torch.float32, torch.bfloat16)


class FlatStream(ABC):
    """Draws the rows of C^-1 Z, one a step, with Z i.i.d. standard normal, on a public grid.

    All streams give C·noise = Z up to the grid (docs/theory/noise.md#thm-streams;
    ``test_strategy_times_noise_is_z``), and what ``release`` returns is as private as
    C x + σ z up to what docs/theory/noise.md#thm-release counts. The noise has unit variance per
    entry of Z; ``release`` scales grid and noise by σ·R, so a schedule of R stays right. Row t is a
    pure function of (seed, t, shapes). Where C has more rows than columns (a tree), C^-1 stands for
    its left inverse.

    Rows are flat, and are worked on block by block, on as many threads as torch uses. A subclass
    allocates the buffers of a block in ``_allocate``, looks up what a step needs in
    ``_start_step``, and turns z_t into the noise of step t in ``_correlate``, which other
    threads call for other blocks at the same time. ``release`` adds the noise to the sums block by
    block, while it is in cache: no row of it is ever whole.

    **The grid.** Noise is a whole number of 2^-``grid_bits``, and z_t one of the finer
    2^-``_bits``. What a subclass takes from earlier rows is rounded to the finer grid, added to
    z_t, and the total rounded to the coarser one; so the rounding to what is kept is
    post-processing, and only that to the finer grid counts
    (docs/theory/noise.md#thm-release). Where a subclass keeps ``_exact = torch.int32`` numbers, the
    coarser grid is the finest whose numbers fit; otherwise the two are the same.

    **bfloat16 buffers** (``dtype``). The noise that is released is y_t; only what is kept
    of it is rounded, at random and by secret bits, so that its mean is y_t. C·noise is then Z plus
    a small error of mean 0 and not exactly Gaussian: ``notes`` says so, and no guarantee over it is
    exact (docs/theory/noise.md#thm-bfloat16; ``test_bfloat16_buffers_stay_within_their_bound``).

    **Other devices.** For parameters on neither the CPU nor CUDA the noise is that of the CPU, bit
    for bit, and so is everything of this class: drawn and kept there, and sums are sent there and
    back, which is told once (``exact_device`` says why).

    **Buffers in a file** (``folder``). They are the same tensors, over a file without a name that
    is mapped into memory (``History``), and the noise is the same bit for bit. A checkpoint takes
    as much memory as the buffers have, for the time that it is written.

    Args:
        strategy: the strategy matrix; bound to ``steps`` here if it is not yet.
        steps: n.
        like: tensors whose shapes, dtypes and devices the noise has.
        seed: integer in [0, 2^128).
        secure: draw from a cryptographic generator.
        dtype: ``torch.float32`` for buffers that are exact, or ``torch.bfloat16``.
        per_parameter: a row per parameter, not one for all parameters of a device.
        shard: the slice that the stream owns; see ``shard``. Nothing is allocated for the others.
        pieces: in place of it, what it owns of each flattened tensor: first entry, one past the
            last.
        folder: where the buffers are kept in a file, not in memory; for noise on the CPU.

    Attributes:
        steps: n.
        step: index (from 0) of the row that the next call draws.
        grid_bits: j, where the noise is in units of 2^-j.
        normals: what draws Z.

    Raises:
        ValueError: if the strategy does not fit ``steps`` or its noise grows too large
            (``check_growth``), the seed or the dtype is out of range, ``like`` is empty or holds a
            tensor that is not floating-point or without memory (``"meta"``), or one on CUDA though
            a folder is given.
        OSError: if others may enter the folder, or it has no room; see ``History``.
    """

    _exact: ClassVar[torch.dtype] = torch.float64
    """Of exact buffers: ``torch.int32`` where rounding to a coarser grid does not last."""

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
        self.normals = Normals(seed, secure=secure)
        if dtype not in _DTYPES:
            raise ValueError(f"dtype={dtype}: must be torch.float32 or torch.bfloat16")
        self._dtype = dtype
        self._kept = self._exact if dtype is torch.float32 else dtype
        self._secure = secure
        self._layout = Layout.of(like, per_parameter=per_parameter)
        self._tell_of_the_way()
        for device in self._layout.devices:
            if device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"like is on device {device}, where tensors have no numbers to add noise to"
                )
            if folder is not None and device.type != "cpu":
                raise ValueError(
                    f"folder={folder!r} with parameters on device {device}: past noise can be kept "
                    "in a file on the CPU only; leave folder out"
                )
        deviation = self._largest_deviation()
        self._bits = self.grid_bits = finest_bits(deviation)
        if self._kept is torch.int32 and self._keeps:
            self.grid_bits = min(self._bits, stored_bits(self._kept_deviation(deviation)))
        self._folder = None if folder is None else os.fspath(folder)
        self._open_shard((shard or Shard()) if pieces is None else Pieces.of(pieces, self._layout))

    def _tell_of_the_way(self) -> None:
        """Warn of the cost of noise that is drawn elsewhere than where it is added."""
        away = {
            str(home)
            for home, (group, _) in zip(self._layout.homes, self._layout.places, strict=True)
            if home != self._layout.devices[group]
        }
        if away:
            _log.warning(
                "the parameters are on %s, where noise cannot be drawn exactly: it is drawn and "
                "kept on the CPU, and every step sends the clipped sums there and back (8 bytes a "
                "float32 parameter). The noise, and the guarantee, are those of a run on the CPU",
                ", ".join(sorted(away)),
            )

    def _open_shard(self, shard: Shard | Pieces) -> None:
        self._shard = shard
        # Runs of entries of a row lie one after the other in memory, without the gaps.
        spans = shard.spans(self._layout)
        self._blocks = blocks_of(spans, self._layout)
        self._firsts = [[first for first, _ in runs] for runs in spans]
        lengths = [[last - first for first, last in runs] for runs in spans]
        self._starts = [[0, *itertools.accumulate(each)] for each in lengths]
        self._pieces = list(shard.pieces(self._layout))
        self._segments = self._cut_blocks()
        self._history = self._open_history()
        if self._history is None:
            self._buffers = [self._allocate(self._empty(block)) for block in self._blocks]
        else:
            self._buffers = self._history.buffers

    def _open_history(self) -> History | None:
        """The file of the buffers, where there is a folder for it and anything to keep."""
        if self._folder is None:
            return None
        one = self._allocate(torch.empty(1))
        if any(bool(buffer.any()) for buffer in one):
            raise ValueError(
                f"folder={self._folder!r} with a {type(self).__name__}, whose buffers do not start "
                "at zero: leave folder out"
            )
        blocks = [
            [(*buffer.shape[:-1], block.stop - block.start) for buffer in one]
            for block in self._blocks
        ]
        if not (self._blocks and self._keeps):
            check_private_folder(self._folder)
            return None
        return History(self._folder, blocks, self._kept)

    def _cut_blocks(self) -> list[list[tuple[int, int, int, int]]]:
        """For each block, the entries of the tensors' pieces that it holds, and their place in it.

        Returns:
            For each block: (index of the tensor, first entry of its piece, one past the last, where
            that first entry stands in the block).
        """
        firsts = [block.start for block in self._blocks]
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in self._blocks]
        of_group = [
            [n for n, block in enumerate(self._blocks) if block.group == group]
            for group in range(len(self._layout.sizes))
        ]
        for index, (low, high) in enumerate(self._pieces):
            group, offset = self._layout.places[index]
            mine = of_group[group]
            at = offset + low
            position = bisect.bisect_right(mine, at, key=lambda n: firsts[n]) - 1
            while at < offset + high:
                number = mine[position]
                block = self._blocks[number]
                end = min(block.stop, offset + high)
                begin = at - offset - low
                found[number].append((index, begin, begin + end - at, at - block.start))
                at, position = end, position + 1
        return found

    def _empty(self, block: Block) -> torch.Tensor:
        """A tensor without memory that shows size and device of a block."""
        device = self._layout.devices[block.group]
        return torch.empty((), dtype=torch.float64, device=device).expand(block.stop - block.start)

    @abstractmethod
    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The buffers of a block, as before the first step; ``row`` shows size and device.

        Their dtype is ``self._kept``, their last dimension that of the entries of ``row`` (by
        which a state is cut for other shards), and what is written to them goes through ``_store``.
        Those of a stream that is to take a ``folder`` are zero.
        """

    def _start_step(self) -> None:  # noqa: B027
        """Called once before the blocks of step ``self.step``."""

    @abstractmethod
    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        """Overwrite ``noise`` (its content is arbitrary) with the noise of step ``self.step``.

        Args:
            block: where the entries lie.
            noise: float64, one number an entry; what is left there are whole numbers of
                2^-``grid_bits``.
            buffers: what ``_allocate`` returned for the block.
        """

    def _largest_deviation(self) -> float:
        """The largest standard deviation of a step's noise, or a bound."""
        return largest_deviation(self.strategy, self.steps)

    def _kept_deviation(self, deviation: float) -> float:
        """The largest standard deviation of what is kept; ``deviation`` is that of the noise."""
        return deviation

    def _draw(self, block: Block, out: torch.Tensor, step: int, *, scale: float = 1.0) -> None:
        """``out`` ← the block's entries of row ``step`` of Z times ``scale``, in 2^-``_bits``."""
        self.normals.fill(
            out,
            group=block.group,
            step=step,
            start=block.start,
            size=block.size,
            bits=self._bits,
            scale=scale,
        )

    def _settle(self, noise: torch.Tensor, buffer: torch.Tensor, weights: Sequence[float]) -> None:
        """Add Σ_s ``weights[s]``·``buffer[s]`` to z, and round to the grid.

        Args:
            noise: whole numbers of 2^-``_bits``, as drawn; overwritten with those of
                2^-``grid_bits``.
            buffer: what is kept of earlier rows.
            weights: of its first rows.
        """
        if not len(weights) and self._bits == self.grid_bits:
            return
        if self._kept is torch.bfloat16:  # in units of 1
            weights = [weight * 2.0**self.grid_bits for weight in weights]
        add_past(noise, buffer, weights, 2.0 ** (self._bits - self.grid_bits))

    def _store(self, block: Block, values: torch.Tensor, out: torch.Tensor, index: int = 0) -> None:
        """``out``, a row of a buffer, ← whole numbers, rounded as the class says.

        ``index`` tells the rows apart that one step stores.
        """
        kept = values
        if self._kept is torch.bfloat16:
            kept = out if self._history is None else torch.empty_like(out)
            round_randomly(
                (values * 2.0**-self.grid_bits).float(),
                kept,
                seed=self.normals.seed,
                step=self.step,
                index=index,
                block=block,
            )
        if self._history is not None:
            self._history.write(kept.to(self._kept), out)
        elif kept is not out:
            out.copy_(kept)

    def __next__(self) -> list[torch.Tensor]:
        """The next row in units of 2^-``grid_bits``, an int64 tensor per parameter with its shape.

        To look at, where it is drawn; ``release`` is what adds it to sums.

        Raises:
            RuntimeError: after ``steps`` rows; more noise than was accounted for is refused.
        """
        sizes = [high - low for low, high in self._pieces]
        rows = [
            torch.empty(size, dtype=torch.int64, device=self._layout.devices[group])
            for size, (group, _) in zip(sizes, self._layout.places, strict=True)
        ]

        def keep(number: int, noise: torch.Tensor) -> None:
            for index, first, last, at in self._segments[number]:
                rows[index][first:last].copy_(noise[at : at + last - first])

        self._advance(keep)
        return [
            row.view(shape) if len(row) == shape.numel() else row
            for row, shape in zip(rows, self._layout.shapes, strict=True)
        ]

    def release(self, sums: Sequence[torch.Tensor | None], deviation: float) -> list[torch.Tensor]:
        """Sums on the grid, with the next row of noise: what may leave the machine.

        With h = ``deviation``·2^-``grid_bits`` it is h·(⌊sum/h⌉ + noise), a whole number times h
        that is rounded to the dtype of the sum: post-processing of the whole number
        (docs/theory/noise.md#thm-release). Noise that is added to a sum in floating point instead
        tells what the sum was (docs/guides/floating-point.md).

        Args:
            sums: clipped sums, a tensor per parameter with its shape, overwritten where it is
                contiguous and on the device that noise is drawn on; ``None`` for a parameter that
                has none.
            deviation: σ·R; 0 for no noise.

        Returns:
            The noisy sums, in the dtypes and on the devices of the sums.

        Raises:
            RuntimeError: after ``steps`` rows; more noise than was accounted for is refused.
            ValueError: if there is not a sum for each parameter.
        """
        sizes = [high - low for low, high in self._pieces]
        if [None if total is None else total.numel() for total in sums] != [
            None if total is None else size for total, size in zip(sums, sizes, strict=True)
        ]:
            raise ValueError(
                f"the sums have {[None if t is None else t.numel() for t in sums]} entries, and "
                f"the stream has noise for {sizes}: pass tensors of the same shapes as those it "
                "was opened with"
            )
        shapes = [
            shape if size == shape.numel() else (size,)
            for size, shape in zip(sizes, self._layout.shapes, strict=True)
        ]
        flat = [
            torch.zeros(size, dtype=dtype, device=self._layout.devices[group])
            if total is None
            else total.detach().reshape(-1).to(self._layout.devices[group])
            for total, size, dtype, (group, _) in zip(
                sums, sizes, self._layout.dtypes, self._layout.places, strict=True
            )
        ]

        grid = grid_of(deviation, self.grid_bits)

        def add(number: int, noise: torch.Tensor) -> None:
            if grid:
                segments = self._segments[number]
                parts = [flat[index][first:last] for index, first, last, _ in segments]
                put_all_on_grid(parts, noise, grid)

        self._advance(add)
        return [
            each.view(shape).to(home) if total is None else each.view(total.shape).to(total.device)
            for each, shape, home, total in zip(flat, shapes, self._layout.homes, sums, strict=True)
        ]

    def _advance(self, sink: Callable[[int, torch.Tensor], None]) -> None:
        """Make a step, and hand the noise of each block on, in whatever order.

        Args:
            sink: called with the number of a block and its noise, which is gone afterwards; by
                other threads for other blocks at the same time.
        """
        if self.step >= self.steps:
            raise RuntimeError(
                f"all {self.steps} rows of noise are used up: a longer run needs a mechanism (and "
                "a guarantee) for more steps"
            )
        if self._history is not None:
            self._history.check_process()
        self._start_step()

        def advance(number: int) -> None:
            block = self._blocks[number]
            if self._history is not None:
                self._history.begin(number)
            device = self._layout.devices[block.group]
            noise = scratch("noise", block.stop - block.start, device)
            self._correlate(block, noise, self._buffers[number])
            if self._history is not None:
                self._history.end(number)
            sink(number, noise)

        for_each(
            advance,
            range(len(self._blocks)),
            entries=sum(
                block.stop - block.start
                for block in self._blocks
                if on_processor(self._layout.devices[block.group])
            ),
        )
        self.step += 1
        if self._history is not None and self.step < self.steps:
            self._history.read_ahead()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers, in memory (which is taken as they fill) or in a file."""
        return sum(b.numel() * b.element_size() for buffers in self._buffers for b in buffers)

    @property
    def rounding_error(self) -> float | None:
        """An upper bound on the rounding error of a number of Z, in standard deviations.

        The noise is ⌊z_t + u_t⌉ for a u_t that is computed of earlier rows, and the bound is on
        what u_t is off from -Σ_{l≥1} C_{t,t-l} y_{t-l}, y the noise itself, in units of z_t's
        standard deviation (docs/theory/noise.md#thm-release). ``None``, as here, where it is not
        known, which the guarantee of a run tells.
        """
        return None

    @property
    def _keeps(self) -> bool:
        """True if anything is kept of an entry, be it one of this shard or of another."""
        return any(buffer.numel() for buffer in self._allocate(torch.empty(1)))

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on bfloat16 buffers of C·noise; empty for exact ones, or where nothing is kept."""
        if self._dtype is torch.float32 or not self._keeps:
            return ()
        return (
            "the noise buffers are bfloat16: C·noise is only approximately Gaussian, with an error "
            "of mean 0 (rounding at random, by secret bits) and of less than 2^-7, in "
            "standard deviation at most 2^-8, of every stored entry, which the analysis leaves out",
        )

    def shard(self, rank: int, world: int) -> Self:
        """A new stream for one of ``world`` equal slices of the flattened parameters.

        Its tensors are those entries of each flattened parameter that the slice holds
        (``shard_pieces``): one-dimensional and maybe empty, or of the parameter's shape where these
        are all of its entries. Put together, the tensors of all ranks are this stream's (up to the
        last bits: some processors round products by position). Memory and work are those of the
        slice. Every rank must use the same seed. In a long row slices
        start at multiples of 64.

        Raises:
            ValueError: unless 0 ≤ rank < world.
            RuntimeError: if this stream has been used, or is a shard already.
        """
        if self.step or self._shard != Shard():
            state = f"at step={self.step}" if self.step else "a shard already"
            raise RuntimeError(
                f"this stream is {state}: open a new one with noise_stream and shard that one"
            )
        other = self.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._open_shard(Shard(rank=rank, world=world))
        return other

    @property
    def generator(self) -> str:
        """The name of what draws Z on the devices of this stream, for the guarantee."""
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
            "dtype": str(self._kept),
            "grid_bits": self.grid_bits,
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
        if "grid_bits" not in saved:
            raise ValueError(
                "the noise state was saved by an earlier version of dptrain, whose noise lies on "
                "another grid: finish the run with that version, or start it anew"
            )
        for name, value in here.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the noise state was saved for {name}={saved.get(name)}, but this stream has "
                    f"{name}={value}: resume with the model and mechanism of the saved run"
                )
        step = first["step"]
        if not 0 <= step <= self.steps:
            raise ValueError(f"the noise state is at step={step}, outside 0..{self.steps}")
        if self._history is not None:
            self._history.check_process()
        copies = self._copies(_saved_blocks(states, len(self._layout.sizes)))
        self.normals = Normals(int(first["seed"], 16), secure=self._secure)
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
                    "shards of the saved stream"
                )
        return copies


_SHAPES = "the buffers of the noise state do not have the shapes recorded in it"


def _one_of(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first of some states, which have to be of one stream at one step."""
    if not states:
        raise ValueError(
            "there is no noise state: give the state of the stream, or of all its shards"
        )
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
    """First entry, one past the last and buffers of the saved blocks of each group, in order."""
    saved: list[list[tuple[int, int, list[torch.Tensor]]]] = [[] for _ in range(groups)]
    for state in states:
        if len(state["blocks"]) != len(state["buffers"]):
            raise ValueError(_SHAPES)
        for (group, start, stop), buffers in zip(state["blocks"], state["buffers"], strict=True):
            saved[group].append((start, stop, list(buffers)))
    for blocks in saved:
        blocks.sort(key=lambda each: each[:2])
    return saved
