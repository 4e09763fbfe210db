"""Models that fully_shard divided release what one process does, and nothing else leaves a rank."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from dptrain.noise import noise_stream
from tests.helpers import fully_sharded_runs as runs
from tests.helpers.worlds import EACH, WORLDS, each_of, found_by

# float32: sums of some ranks' shares in another order than one process's, over a few steps, which
# AdamW divides by their size.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    """What the ranks found, by how many there were and what they did."""
    runs.saved(folder)
    return found_by(runs.worker, folder)


def close(mine, other, tolerance=TOLERANCE):
    """The same structure, and numbers up to rounding."""
    if isinstance(mine, dict):
        assert set(mine) == set(other)
        for name in mine:
            close(mine[name], other[name], tolerance)
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(other)
        for one, two in zip(mine, other, strict=True):
            close(one, two, tolerance)
    elif isinstance(mine, torch.Tensor):
        assert mine.shape == other.shape
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    else:
        assert mine == other


def check_parts(one):
    """A release of ``conv`` is the sum of the clipped gradients and, once, the noise."""
    module = runs.conv()
    trained = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained))
    for x, y in runs.images():
        loss = nn.functional.cross_entropy(module(x[None]), y[None])
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])
        assert gradient.norm() > runs.SMALL  # or nothing would be clipped
        total += gradient * (runs.SMALL / gradient.norm())
    # The factor has 1e-6 in it, so that norms that are rounded down are clipped all the same.
    torch.testing.assert_close(one["without noise"], total, rtol=1e-5, atol=1e-7)
    # One process's: 24 terms in another order, 6e-8 of each sum's size, and seldom of one sign.
    _, alone = runs.one_release(sharded=False, noise_multiplier=0.0)
    assert (one["without noise"] - alone).norm() <= 1e-6 * alone.norm()
    stream = noise_stream(one["strategy"], steps=1, like=trained, seed=one["seed"])
    row = torch.cat([t.flatten() for t in next(stream)]).double() * 2.0**-stream.grid_bits
    # Of sums below 24 R and noise: float32 numbers of 32 R, each off by half of 2^-23 of it.
    noise = (one["with noise"] - one["without noise"]) / runs.SMALL
    torch.testing.assert_close(noise.double(), row, rtol=0, atol=2 * 32 * 2.0**-24)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), each_of(runs.cases))
def test_ranks_release_what_one_process_does(found, world, name):
    """The parameters, the release and the optimizer's state, put together."""
    first, *others = found(world, name)
    for other in others:
        close(first, other, tolerance=0.0)
    close(first, runs.case(name, sharded=False))


@pytest.mark.slow
@pytest.mark.parametrize("world", EACH)
def test_the_release_is_clipped_gradients_and_the_noise_of_the_seed(found, world):
    """Against one autograd call for each example, and a stream for the whole model."""
    for one in found(world, "parts of a release"):
        check_parts(one)


@pytest.mark.parametrize("world", EACH)
def test_gradients_in_half_precision_are_clipped_and_added_up_in_float32(found, world):
    """Against one autograd call for each example of the model in bfloat16, as torch gathers it."""
    module = runs.conv().bfloat16()
    trained = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained))
    for x, y in runs.images():
        loss = nn.functional.cross_entropy(module(x[None].bfloat16()), y[None])
        grads = torch.autograd.grad(loss, trained)
        gradient = torch.cat([g.flatten() for g in grads]).float()
        total += gradient * (runs.SMALL / gradient.norm())
    for one in found(world, "in half"):
        assert one["kept in"]
        assert one["computed in"]
        # 8 bits of each number of an example's gradient, and of what it is made of.
        assert (one["release"] - total).norm() < 2e-2 * total.norm()
        assert one["release"].norm() <= runs.SMALL * 24


@pytest.mark.parametrize("world", EACH)
def test_a_shard_without_noise_would_show(found, world):
    """The comparison above fails in just the entries of the rank that is made to leave it out."""
    for one in found(world, "a shard without noise"):
        differ = one["left out"] != one["right"]
        assert bool(differ.any())
        assert torch.equal(differ, one["its entries"])


@pytest.mark.parametrize("world", EACH)
def test_what_leaves_a_rank_is_clipped(found, world):
    """Of examples with gradients of 10^4 R no more than R each is sent, and no rank keeps more."""
    for one in found(world, "sent"):
        assert one["longest gradient"] > 1e3 * runs.SMALL
        # Each rank sends one message a microbatch, the sum of what its examples contribute.
        assert len(one["sums"]) == one["microbatches"] > 1
        for sent, examples in zip(one["sums"], one["examples"], strict=True):
            assert sent <= runs.SMALL * examples * (1 + 1e-5)
        assert max(one["sums"]) > 0.1 * runs.SMALL
        assert one["other calls"] == []  # of what adds tensors up between ranks
        assert one["gradients"] == []  # left in p.grad, of shards or of whole parameters


@pytest.mark.parametrize("world", EACH)
def test_each_rank_keeps_the_state_of_its_shards(found, world):
    each = found(world, "memory")
    for what in ("noise", "optimizer"):
        total = sum(one[what] for one in each)
        assert total == each[0]["whole"][what] > 10_000
        for one in each:
            assert one[what] <= 1.05 * total / world


@pytest.mark.parametrize("world", EACH)
def test_any_number_of_ranks_goes_on(found, folder, world):
    """From one process (which has no shards), two or four, with the state whole or in shares."""
    each = found(world, "resumed")
    never_stopped = each[0]["never stopped"]
    for one in each:
        assert torch.equal(one["never stopped"], never_stopped)
        assert torch.equal(one["whole"], never_stopped)  # as many as before: bit for bit
        assert torch.equal(one[world], never_stopped)
        for before in (1, *WORLDS[: WORLDS.index(world)]):
            close(one[before], never_stopped)
        assert "a list of all shares, each once" in one["one share"]
    paths = [folder / f"share_{world}_{rank}.pt" for rank in range(world)]
    shares = [torch.load(path, weights_only=True) for path in reversed(paths)]
    close(runs.go_on(shares, sharded=False), never_stopped)
    state = torch.load(folder / f"whole_{world}.pt", weights_only=True)
    close(runs.go_on(state, sharded=False), never_stopped)
    sizes = [sum(v.numel() for v in share["module"].values()) for share in shares]
    assert sum(sizes) == sum(v.numel() for v in state["module"].values())


@pytest.mark.parametrize("world", EACH)
def test_a_repeat_is_the_same_bits(found, world):
    for one in found(world, "repeated"):
        assert one["same"]
        assert "released before" in one["other"]


REFUSED = {
    "placement": "without shard_placement_fn",
    "offload": "leave offload_policy= out",
    "other meshes": "layers are divided by several meshes",
    "half the ranks": "give fully_shard a mesh of all ranks",
    "each for itself": "leave PrivacyEngine(distributed=False) out",
    "hooks": "use Gradients(mode='bookkeeping')",
    "no root": "fully_shard(model)",
    "ignored": "without ignored_params",
    "optimizer before": "build the optimizer after fully_shard",
    "off": "NoiseOptions(shard='off') does not apply",
    "Adafactor": "use an optimizer that works entry by entry",
    "LSTM": "without fully_shard",
    "compiled": "leave module.compile() out",
}


OF_FOUR = ("other meshes", "half the ranks")


@pytest.mark.parametrize(
    ("world", "name"),
    each_of(
        lambda world: OF_FOUR if world > 2 else [name for name in REFUSED if name not in OF_FOUR]
    ),
)
def test_refusals_name_the_remedy(found, world, name):
    for one in found(world, "refusals"):
        assert one[name].startswith("ValueError: "), one[name]
        assert REFUSED[name] in one[name]


def test_gradients_past_the_layers_are_refused(found):
    for one in found(2, "past the layers"):
        assert "a gradient reached the shards of a parameter" in one[4]
        assert "is used outside the layer that owns it" in one[5]
        assert one["grads"] == []


def test_a_module_that_mixes_examples_is_refused_on_all_ranks(found):
    first, second = found(2, "mixed")
    assert "changed when another" in first["error"]
    assert "changed when another" in second["error"]
    one, other = found(2, "one rank fails")
    assert other["error"] == "RuntimeError: odd"
    place = r"RuntimeError in \w+ \(\w+\.py, line \d+\)"  # and not what it says
    assert re.search(rf"because other ranks failed \(rank 1: {place}\)", one["error"])


def test_after_detach_it_is_an_ordinary_model(found):
    """Gradients are reduced again, and are the mean of all ranks'."""
    first, second = found(2, "detached")
    assert first["hooks"] == second["hooks"] == 0
    torch.testing.assert_close(first["gradients"], second["gradients"])
    torch.testing.assert_close(first["gradients"], first["expected"], rtol=1e-5, atol=1e-6)
