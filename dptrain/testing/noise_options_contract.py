"""The contract of every noise stream under its options: groups, buffers, regeneration, shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dptrain.noise import FlatStream
from dptrain.noise.generators import chunk_length
from dptrain.testing.noise_checks import SEED, NoiseChecks, units
from dptrain.testing.requiring import require

_ROUNDING = 2.0**-7  # rounding at random to bfloat16 is off by less than this, relatively


class NoiseOptionsContract(NoiseChecks):
    """Checks of ``per_parameter``, ``dtype``, ``regenerate`` and ``shard`` for one strategy.

    Attributes:
        regenerates: whether ``regenerate=True`` is served.
    """

    regenerates: bool = True

    # -- a group per parameter -------------------------------------------------------------------

    def test_per_parameter_solves_with_the_normals_of_each_parameter(self) -> None:
        like = [torch.zeros(s, device=self.device) for s in ((3, 4), (), (7,))]
        stream = self.open(like=like, per_parameter=True)
        rows = self.rows(stream, self.steps)
        for group, parameter in enumerate(like):
            noise = units(torch.stack([row[group].flatten() for row in rows]), stream)
            self.assert_solves(noise, self.draw_z(SEED, parameter.numel(), group=group), stream)

    def test_per_parameter_differs_only_in_the_second_parameter(self) -> None:
        ours = self.rows(self.open(per_parameter=True), self.steps)
        whole = self.rows(self.open(like=self.like()[:1]), self.steps)
        self.assert_equal([row[:1] for row in ours], whole)

    # -- bfloat16 buffers ------------------------------------------------------------------------

    def rounding_bound(self, noise: np.ndarray, z: np.ndarray) -> np.ndarray | None:
        """A bound on |C·noise - Z| for bfloat16 buffers; ``None`` where none is known.

        By default that of a ring buffer: Σ_{j≥1} |C_{t,t-j}| 2^-7 |y_{t-j}|.
        """
        dense = self.bound().columns(self.steps, np.arange(self.steps))
        if len(dense) != self.steps:
            return None
        return np.asarray(np.abs(np.tril(dense, -1)) @ np.abs(noise) * _ROUNDING)

    def test_bfloat16_buffers_stay_within_their_bound(self) -> None:
        like = [torch.zeros(500, device=self.device)]
        stream = self.open(like=like, dtype=torch.bfloat16)
        full = self.open(like=like)
        # Exact buffers hold 32 bits a number, or 64 where what is rounded off would last.
        require(full.buffer_bytes in (2 * stream.buffer_bytes, 4 * stream.buffer_bytes))
        require(full.notes == ())
        require(bool(stream.notes) == bool(stream.buffer_bytes))
        require(all("bfloat16" in note for note in stream.notes))
        noise, z = self.matrix(stream), self.draw_z(SEED, 500)
        bound = self.rounding_bound(noise, z)
        if bound is not None:
            error = np.abs(self.bound().apply(noise) - z)
            scale = max(1.0, float(self.bound().column_norms(self.steps).max()))
            require(np.all(error <= bound + self.rounding(stream)[:, None] + 1e-12 * scale))
        if stream.buffer_bytes:
            require(not np.array_equal(noise, self.matrix(full)))

    def test_bfloat16_buffers_shift_no_mean(self) -> None:
        like = [torch.zeros(20_000, device=self.device)]
        rounded = self.matrix(self.open(like=like, dtype=torch.bfloat16))
        error = rounded - self.matrix(self.open(like=like))
        deviation = error.std(axis=1) / np.sqrt(error.shape[1])
        require(np.all(np.abs(error.mean(axis=1)) <= 6 * deviation + 1e-9))
        # Were it shrinking what it stores, the error would follow the noise.
        product = error * rounded
        deviation = product.std(axis=1) / np.sqrt(error.shape[1])
        require(np.all(np.abs(product.mean(axis=1)) <= 6 * deviation + 1e-9))

    def test_bfloat16_buffers_restore_bit_for_bit(self) -> None:
        stream = self.open(dtype=torch.bfloat16)
        self.rows(stream, self.steps // 2)
        resumed = self.open(SEED + 1, dtype=torch.bfloat16)
        self.rows(resumed, 3)
        resumed.load_state_dict(stream.state_dict())
        rest = self.steps - self.steps // 2
        self.assert_equal(self.rows(resumed, rest), self.rows(stream, rest))

    def test_refuses_the_state_of_buffers_of_another_dtype(self) -> None:
        with pytest.raises(ValueError, match="bfloat16"):
            self.open().load_state_dict(self.open(dtype=torch.bfloat16).state_dict())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, "bfloat16"])
    def test_refuses_other_buffers(self, dtype: torch.dtype) -> None:
        with pytest.raises((TypeError, ValueError), match=r"dtype=.*bfloat16"):
            self.open(dtype=dtype)

    # -- regeneration ----------------------------------------------------------------------------

    def test_regenerated_noise_is_the_buffered_noise(self) -> None:
        if not self.regenerates:
            with pytest.raises(ValueError, match="regenerate"):
                self.open(regenerate=True)
            return
        like = [torch.zeros(40, device=self.device), torch.zeros(3, 2, device=self.device)]
        stream = self.open(like=like, regenerate=True)
        require(stream.buffer_bytes == 0)
        require(stream.notes == ())
        noise = self.matrix(stream)
        self.assert_solves(noise, self.draw_z(SEED, 46), stream)
        kept = self.open(like=like)
        require(kept.grid_bits <= stream.grid_bits)
        apart = np.abs(self.factor()) @ (self.rounding(stream) + self.rounding(kept))
        require(np.all(np.abs(noise - self.matrix(kept)) <= apart[:, None] + 2.0**-50 * abs(noise)))

    def test_regenerated_noise_restores_bit_for_bit(self) -> None:
        if not self.regenerates:
            return
        stream = self.open(regenerate=True)
        self.rows(stream, self.steps // 2)
        resumed = self.open(SEED + 1, regenerate=True)
        resumed.load_state_dict(stream.state_dict())
        rest = self.steps - self.steps // 2
        self.assert_equal(self.rows(resumed, rest), self.rows(stream, rest))
        with pytest.raises(RuntimeError, match=str(self.steps)):
            next(stream)
        with pytest.raises(ValueError, match="dtype"):
            self.open(regenerate=True, dtype=torch.bfloat16)

    # -- shards ----------------------------------------------------------------------------------

    def assert_put_together(
        self, shards: list[FlatStream], whole: FlatStream, steps: int, dtype: torch.dtype
    ) -> None:
        """The shards' entries, one rank's after the other's, are those of the whole stream.

        To the bit where buffers are exact. The products of bfloat16 ones are rounded by position on
        some processors, and a last bit may decide how such a number is rounded to what is kept.
        """
        for _ in range(steps):
            expected = next(whole)
            parts = [next(shard) for shard in shards]
            for index, tensor in enumerate(expected):
                pieces = [part[index] for part in parts]
                for piece in pieces:
                    require(piece.dtype == tensor.dtype)
                    require(piece.shape in (tensor.shape, (piece.numel(),)))
                found = torch.cat([piece.flatten() for piece in pieces if tensor.numel()] or pieces)
                self.assert_same(found, tensor, whole, dtype)

    def assert_same(
        self, a: torch.Tensor, b: torch.Tensor, stream: FlatStream, dtype: torch.dtype
    ) -> None:
        """Equal numbers; where buffers are bfloat16, within a unit of these."""
        if dtype is torch.float32:
            require(torch.equal(a.flatten(), b.flatten()))
        else:
            apart = np.abs(units(a.flatten(), stream) - units(b.flatten(), stream))
            require(np.all(apart <= 0.05))

    def assert_shards_add_up(self, world: int, steps: int, **options: object) -> None:
        """The shards' entries together are the whole stream, and its state is divided."""
        whole = self.open(**options)  # type: ignore[arg-type]
        shards = [self.open(**options).shard(rank, world) for rank in range(world)]  # type: ignore[arg-type]
        require(sum(shard.buffer_bytes for shard in shards) == whole.buffer_bytes)
        require(all(shard.notes == whole.notes for shard in shards))
        self.assert_put_together(shards, whole, steps, options.get("dtype", torch.float32))  # type: ignore[arg-type]

    @pytest.mark.parametrize("world", [1, 2, 3, 30])  # the last one is more than there are entries
    def test_shards_add_up(self, world: int) -> None:
        self.assert_shards_add_up(world, self.steps if world < 30 else 3)
        self.assert_shards_add_up(world, 4, per_parameter=True)
        self.assert_shards_add_up(world, 9, dtype=torch.bfloat16)
        if self.regenerates:
            self.assert_shards_add_up(world, 4, regenerate=True)

    def test_shards_of_a_long_row_divide_the_state(self) -> None:
        size = chunk_length(torch.device(self.device)) + 40_001
        like = [torch.zeros(size, device=self.device), torch.zeros(7, device=self.device)]
        self.assert_shards_add_up(3, 3, like=like)
        self.assert_shards_add_up(2, 2, like=like, dtype=torch.bfloat16)
        whole = self.open(like=like)
        for rank in range(3):
            share = self.open(like=like).shard(rank, 3).buffer_bytes
            require(share <= whole.buffer_bytes * (1 / 3 + 1e-3))

    def test_a_shard_is_opened_without_the_others(self) -> None:
        opened = [self.open(shard=(rank, 3)) for rank in range(3)]
        cut = [self.open().shard(rank, 3) for rank in range(3)]
        for one, other in zip(opened, cut, strict=True):
            self.assert_equal(self.rows(one, 4), self.rows(other, 4))

    @pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 30)])
    def test_as_many_other_shards_go_on(self, before: int, after: int) -> None:
        """Of any number, from the states of all that there were."""
        size = chunk_length(torch.device(self.device)) + 10_001
        kinds: tuple[dict[str, Any], ...] = ({}, {"dtype": torch.bfloat16})
        for options in kinds:
            like = [torch.zeros(size, device=self.device), torch.zeros(7, device=self.device)]
            for shapes in ([*self.like(), *like[1:]], like):
                more: dict[str, Any] = {"like": shapes, **options}
                saved = [self.open(**more).shard(rank, before) for rank in range(before)]
                for shard in saved:
                    self.rows(shard, 4)
                states = [shard.state_dict() for shard in reversed(saved)]
                resumed = [self.open(SEED + 1, **more).shard(r, after) for r in range(after)]
                whole = self.open(SEED + 2, **more)
                for stream in (*resumed, whole):
                    stream.load_state_dict(*states)
                    require(stream.step == 4)
                dtype = options.get("dtype", torch.float32)
                self.assert_put_together(resumed, whole, 3, dtype)
                never_stopped = self.open(**more)
                self.rows(never_stopped, 7)
                for mine, other in zip(next(whole), next(never_stopped), strict=True):
                    self.assert_same(mine, other, whole, dtype)

    def test_refuses_states_of_shards_that_are_no_whole(self) -> None:
        one, other = (self.open().shard(rank, 2) for rank in range(2))
        self.rows(one, 2)
        self.rows(other, 3)
        with pytest.raises(ValueError, match="differ in step"):
            self.open().load_state_dict(one.state_dict(), other.state_dict())
        next(one)
        with pytest.raises(ValueError, match="there is no noise state"):
            self.open().load_state_dict()
        foreign = self.open(SEED + 1).shard(1, 2)
        self.rows(foreign, 3)
        with pytest.raises(ValueError, match="differ in seed"):
            self.open().load_state_dict(one.state_dict(), foreign.state_dict())

    def test_a_shard_restores_and_refuses_the_state_of_another(self) -> None:
        shard = self.open().shard(1, 2)
        self.rows(shard, 4)
        state = shard.state_dict()
        resumed = self.open(SEED + 1).shard(1, 2)
        resumed.load_state_dict(state)
        require(resumed.step == 4)
        rest = self.steps - 4
        self.assert_equal(self.rows(resumed, rest), self.rows(shard, rest))
        for other in (self.open().shard(0, 2), self.open().shard(1, 3), self.open()):
            with pytest.raises(ValueError, match="all shards"):
                other.load_state_dict(state)
            require(other.step == 0)

    @pytest.mark.parametrize(
        ("rank", "world", "name"),
        [
            (2, 2, "rank=2"),
            (-1, 2, "rank=-1"),
            (0, 0, "world=0"),
            (0, -2, "world=-2"),
            (0.5, 2, "rank=0.5"),
            (0, "2", "world='2'"),
            (True, 2, "rank=True"),
        ],
    )
    def test_refuses_what_is_no_rank(self, rank: int, world: int, name: str) -> None:
        with pytest.raises((TypeError, ValueError), match=name):
            self.open().shard(rank, world)

    def test_only_a_new_whole_stream_can_be_sharded(self) -> None:
        stream = self.open()
        next(stream)
        with pytest.raises(RuntimeError, match="step=1"):
            stream.shard(0, 2)
        with pytest.raises(RuntimeError, match="a shard already"):
            self.open().shard(1, 2).shard(0, 2)
