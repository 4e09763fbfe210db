"""What the streams over flat rows share: normals, blocks, position, state and refusals."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch

from dptrain.core import checks
from dptrain.noise.generators.normals import open_normals
from dptrain.noise.generators.threads import for_each
from dptrain.noise.streams.growth import check_growth
from dptrain.noise.streams.layout import Block, Layout, Shard
from dptrain.noise.streams.rows import round_randomly
from dptrain.noise.streams.stream import NoiseStream
from dptrain.strategies import Strategy

_STATE_FIELDS = {"step", "seed", "strategy", "steps", "layout", "buffers"}
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

    Args:
        strategy: the strategy matrix; bound to ``steps`` here if it is not yet.
        steps: n.
        like: tensors whose shapes, dtypes and devices the noise has.
        seed: integer in [0, 2^128).
        secure: draw from a cryptographic generator.
        dtype: of the buffers, ``torch.float32`` or ``torch.bfloat16``.
        per_parameter: a row per parameter, not one for all parameters of a device.
        shard: the slice that the stream owns; see ``shard``.

    Raises:
        ValueError: if the strategy does not fit ``steps`` or its noise grows too large for float32
            (``check_growth``), the seed or the dtype is out of range, ``like`` is empty or holds a
            tensor that is not floating-point, or a device is neither CPU nor CUDA.
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
        self._open_shard(shard or Shard())

    def _open_shard(self, shard: Shard) -> None:
        self._shard = shard
        self._blocks = shard.blocks(self._layout)
        self._rows = [
            torch.zeros(size, device=device, dtype=torch.float32)
            for size, device in zip(self._layout.sizes, self._layout.devices, strict=True)
        ]
        self._views = self._layout.views(self._rows)
        self._buffers = [
            self._allocate(self._rows[block.group][block.start : block.stop])
            for block in self._blocks
        ]

    @abstractmethod
    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The buffers of a block, as before the first step; ``row`` shows size and device.

        Their dtype is ``self._dtype``, and what is written to them goes through ``_store``.
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
        if self._dtype is torch.float32:
            out.copy_(values)
        else:
            round_randomly(
                values, out, seed=self.normals.seed, step=self.step, index=index, block=block
            )

    def __next__(self) -> list[torch.Tensor]:
        if self.step >= self.steps:
            raise RuntimeError(
                f"all {self.steps} rows of noise are spent: a longer run needs a mechanism "
                "(and a guarantee) for more steps"
            )
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
        return [
            view if dtype is torch.float32 else view.to(dtype)
            for view, dtype in zip(self._views, self._layout.dtypes, strict=True)
        ]

    def _advance(self, index: int) -> None:
        block = self._blocks[index]
        row = self._rows[block.group][block.start : block.stop]
        self._correlate(block, row, self._buffers[index])

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers; the operating system commits them as they fill."""
        return sum(b.numel() * b.element_size() for buffers in self._buffers for b in buffers)

    @property
    def notes(self) -> tuple[str, ...]:
        """What bfloat16 buffers do to C·noise; empty for float32, or where nothing is kept."""
        if self._dtype is torch.float32 or not self.buffer_bytes:
            return ()
        return (
            "the noise buffers are bfloat16: C·noise is only approximately Gaussian, with an error "
            "of mean 0 (rounding at random, by secret bits) and of less than 2^-7, in "
            "standard deviation at most 2^-8, of every stored entry, which the analysis leaves out",
        )

    def shard(self, rank: int, world: int) -> Self:
        """A new stream for one of ``world`` slices; in a long row they start at multiples of 64."""
        if self.step or self._shard != Shard():
            state = f"at step={self.step}" if self.step else f"shard {self._shard.rank} already"
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
        it (the seed is hexadecimal text: it does not fit 64 bits).
        """
        return {
            "step": self.step,
            "seed": f"{self.normals.seed:032x}",
            "strategy": self.strategy.coefficient_hash,
            "steps": self.steps,
            "layout": self._describe(),
            "buffers": [[b.clone() for b in buffers] for buffers in self._buffers],
        }

    def _describe(self) -> dict[str, Any]:
        """Everything besides strategy and length that decides the values of a row."""
        return {
            **self._layout.describe(),
            "generator": self.normals.name,
            "stream": type(self).__name__,
            "dtype": str(self._dtype),
            "rank": self._shard.rank,
            "world": self._shard.world,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue bit for bit from ``state``, with its seed.

        Raises:
            ValueError: if it was saved for another strategy, another run length, other shapes,
                dtypes or kinds of device, or another shard; the stream is then left as it was.
        """
        if set(state) != _STATE_FIELDS:
            raise ValueError(
                f"not a noise state: it has {sorted(state)}, expected {sorted(_STATE_FIELDS)}"
            )
        here = {
            "steps": self.steps,
            "strategy": self.strategy.coefficient_hash,
            **self._describe(),
        }
        saved = {"steps": state["steps"], "strategy": state["strategy"], **state["layout"]}
        for name, value in here.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the noise state was saved for {name}={saved.get(name)}, this stream has "
                    f"{name}={value}: resume with the model and mechanism of the saved run"
                )
        theirs = [list(buffers) for buffers in state["buffers"]]
        if _shapes(theirs) != _shapes(self._buffers):
            raise ValueError("the buffers of the noise state do not have the shapes that it states")
        step = state["step"]
        if not 0 <= step <= self.steps:
            raise ValueError(f"the noise state is at step={step}, outside 0..{self.steps}")
        self.normals = open_normals(int(state["seed"], 16), secure=self._secure)
        self.step = step
        for mine, saved_buffers in zip(self._buffers, theirs, strict=True):
            for buffer, other in zip(mine, saved_buffers, strict=True):
                buffer.copy_(other)


def _shapes(buffers: list[list[torch.Tensor]]) -> list[list[tuple[torch.Size, torch.dtype]]]:
    return [[(b.shape, b.dtype) for b in group] for group in buffers]
