"""How rows are cut: blocks cover a shard, shards cover the parameters."""

import itertools

import pytest
import torch

from dptrain.noise import noise_stream, shard_pieces
from dptrain.noise.generators.normals import CHUNK
from dptrain.noise.streams.layout import Layout, Shard
from dptrain.strategies import BLT, BSR, BandMF, Identity


@pytest.mark.parametrize("total", [0, 1, 5, 4096, 100_003, 10_000_000])
@pytest.mark.parametrize("world", [1, 2, 7, 64])
def test_bounds_partition_the_parameters(total, world):
    bounds = [Shard(rank=rank, world=world).bounds(total) for rank in range(world)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= (1 if total < 4096 * world else 128)


@pytest.mark.parametrize("per_parameter", [False, True])
@pytest.mark.parametrize("world", [1, 3, 11])
def test_blocks_cover_every_entry_once_within_chunks(per_parameter, world):
    like = [torch.empty(CHUNK + 5), torch.empty(0), torch.empty(3, 7), torch.empty(2 * CHUNK)]
    layout = Layout.of(like, per_parameter=per_parameter)
    seen = [torch.zeros(size, dtype=torch.int32) for size in layout.sizes]
    for rank in range(world):
        for block in Shard(rank=rank, world=world).blocks(layout):
            seen[block.group][block.start : block.stop] += 1
            assert block.start < block.stop
            assert block.start // CHUNK == (block.stop - 1) // CHUNK
            assert block.size == layout.sizes[block.group]
    assert all(torch.all(counts == 1) for counts in seen)


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_pieces_cover_every_parameter_once(world):
    like = [torch.empty(3, 50), torch.empty(()), torch.empty(0, 4), torch.empty(70_001)]
    pieces = [shard_pieces(like, rank=rank, world=world) for rank in range(world)]
    for index, tensor in enumerate(like):
        seen = torch.zeros(tensor.numel(), dtype=torch.int32)
        for each in pieces:
            low, high = each[index]
            seen[low:high] += 1
        assert torch.all(seen == 1)
    sizes = [sum(high - low for low, high in each) for each in pieces]
    assert max(sizes) <= sum(t.numel() for t in like) / world + 64


@pytest.mark.parametrize("opened", [True, False])
def test_a_shard_has_memory_for_its_slice_only(opened):
    """The row that is released is cut like the buffers."""
    like = [torch.empty(40_000), torch.empty(60_000)]
    options = {"steps": 9, "like": like, "seed": 0}
    for rank in range(4):
        if opened:
            stream = noise_stream(BSR(bands=5), **options, shard=(rank, 4))
        else:
            stream = noise_stream(BSR(bands=5), **options).shard(rank, 4)
        row = next(stream)
        storage = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in row}
        # A row to look at takes 8 bytes a number, the four that are kept 4 each.
        held = sum(storage.values()) + stream.buffer_bytes
        assert held <= 1.05 * 100_000 / 4 * (8 + 4 * 4)
        expected = shard_pieces(like, rank=rank, world=4)
        assert [t.numel() for t in row] == [high - low for low, high in expected]


def test_a_shard_draws_its_slice_only():
    drawn = []
    stream = noise_stream(
        BSR(bands=2), steps=3, like=[torch.empty(8 * CHUNK)], seed=0, shard=(1, 4)
    )

    class Recorded:
        name, seed = "recorded", 0

        def fill(self, out, *, group, step, start=0, size=None, bits, scale=1.0):
            drawn.append((start, start + len(out)))
            out.zero_()

    stream.normals = Recorded()
    next(stream)
    assert sorted(drawn) == [(2 * CHUNK, 3 * CHUNK), (3 * CHUNK, 4 * CHUNK)]


def rows_of(sizes, world):
    """Pieces as ``fully_shard`` makes them of matrices: some rows each, with gaps between."""
    found = []
    for rank in range(world):
        own = []
        for rows, length in sizes:
            each = -(-rows // world)
            own.append(tuple(min(place * each, rows) * length for place in (rank, rank + 1)))
        found.append(own)
    return found


@pytest.mark.sample(every=10)
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"secure": True}])
@pytest.mark.parametrize(
    "strategy", [Identity(), BandMF(bands=3), BLT(buffers=2, max_participations=2, min_sep=2)]
)
def test_pieces_with_gaps_are_the_bits_of_the_whole_and_of_any_others(strategy, options):
    sizes = [(5, 100), (2, 30), (7, 60_000), (1, 3)]  # the third begins and ends within chunks
    like = [torch.empty(size) for size in sizes]
    options = {"steps": 4, "like": like, "seed": 5, **options}
    whole = noise_stream(strategy, **options)
    streams = [noise_stream(strategy, **options, pieces=each) for each in rows_of(sizes, 3)]
    expected = [[t.clone() for t in next(whole)] for _ in range(4)]

    def compare(streams, pieces, rows):
        for stream, each in zip(streams, pieces, strict=True):
            for mine, row, (low, high) in zip(next(stream), rows, each, strict=True):
                assert mine.numel() == high - low
                assert torch.equal(mine.flatten(), row.flatten()[low:high])

    for step in range(2):
        compare(streams, rows_of(sizes, 3), expected[step])
    total = sum(stream.buffer_bytes for stream in streams)
    assert total == noise_stream(strategy, **options).buffer_bytes
    states = [stream.state_dict() for stream in streams]
    others = [noise_stream(strategy, **options, pieces=each) for each in rows_of(sizes, 2)]
    for other in others:
        other.load_state_dict(*states)
    compare(others, rows_of(sizes, 2), expected[2])
    one = noise_stream(strategy, **options)
    one.load_state_dict(*(other.state_dict() for other in others))
    compare([one], [[(0, t.numel()) for t in like]], expected[3])


def test_pieces_that_do_not_fit_are_refused():
    options = {"steps": 2, "like": [torch.empty(4), torch.empty(2, 3)], "seed": 0}
    for pieces, text in (
        ([(0, 4)], "must have one per tensor"),
        ([(0, 4), (0, 7)], r"pieces\[1\]=\(0, 7\)"),
        ([(3, 2), (0, 6)], r"pieces\[0\]=\(3, 2\)"),
    ):
        with pytest.raises(ValueError, match=text):
            noise_stream(Identity(), **options, pieces=pieces)
    with pytest.raises(ValueError, match="leave one of the two out"):
        noise_stream(Identity(), **options, pieces=[(0, 4), (0, 6)], shard=(0, 1))
