"""Two processes make the run that one process makes, up to the order in which floats are added."""

import functools
import logging

import numpy as np
import pytest
import torch
from torch import nn

from dptrain.core.randomness import global_state, restore_global_state
from dptrain.distributed.ranks import Ranks
from dptrain.distributed.wrappers import bare_module, check_whole_optimizer
from dptrain.engine.sealed import seal
from tests.helpers import distributed_runs as runs
from tests.helpers.distributed_runs import CASES, MODES
from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train
from tests.helpers.worlds import found_by


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    """What both ranks found, by what they did."""
    for mode in MODES:
        one = runs.interrupted(mode, dropout=0.0, stop=4)
        torch.save(one.state_dict(), folder / f"one_{mode}.pt")
    return functools.partial(found_by(runs.worker, folder, worlds=[2]), 2)


def same(mine, other, tolerance=2e-6):
    if isinstance(mine, dict):
        assert set(mine) == set(other)
        for name in mine:
            same(mine[name], other[name], tolerance)
    elif isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    else:
        assert mine == other


def equal(mine, other):
    same(mine, other, tolerance=0.0)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_release_what_one_does(found, mode, name):
    first, second = found(("case", mode, name))
    equal(first, second)
    alone = runs.run(mode, **CASES[name])
    same(alone, first, tolerance=1e-5)
    if name == "not finite":
        assert first["nonfinite"] == 2 * runs.STEPS
    if name == "gdp filter":  # the budgets decide something, and differently for different rows
        assert first["active"][0] == 24 > first["active"][-1] > 0


def test_a_sampled_filter_charges_the_same(found):
    first, second = found("renyi")
    equal(first, second)
    same(runs.run("hooks", **runs.RENYI), first, tolerance=1e-5)


def test_gradients_are_scaled_alike_on_all_ranks(found):
    first, second = found("scaled")
    equal(first, second)
    same(runs.scaled(), first, tolerance=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_some_ranks_do_not_use(found, mode):
    first, second = found(("branches", mode))
    assert torch.equal(first, second)
    module = runs.Branches()
    total = torch.zeros_like(flat(module))
    for x, y in runs.halves():
        loss = nn.functional.cross_entropy(module(x[None]), y[None])
        used = module.left if x[0, 0, 0] > 0 else module.right
        grads = torch.autograd.grad(loss, list(used.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        given = dict(zip(used.parameters(), grads, strict=True))
        row = [given.get(p, torch.zeros_like(p)).flatten() for p in module.parameters()]
        total += torch.cat(row) * min(1.0, 1.0 / float(norm))
    assert total[:51].norm() > 0.1
    torch.testing.assert_close(first, total, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_with_another_number_of_processes(found, folder, mode):
    first, second = found(("resumed", mode))
    assert torch.equal(first["whole"], second["whole"])
    # With dropout, too: the masks follow from seed, step and rank.
    assert torch.equal(first["again"], first["whole"])
    assert torch.equal(second["again"], first["whole"])
    one = flat(runs.interrupted(mode, dropout=0.0).module)
    states = [first["plain"], second["plain"]]
    for state in states:
        del state["private"]["rng"]  # nothing depends on it with several ranks
        del state["private"]["checksum"]  # which does
    assert str(states[0]) == str(states[1])
    state = torch.load(folder / f"two_{mode}.pt", weights_only=True)
    state = {
        **first["plain"],
        "private": {**first["plain"]["private"], "rng": state["private"]["rng"]},
    }
    same(flat(runs.interrupted(mode, dropout=0.0, state=seal(state)).module), one, 1e-5)
    same(first["from one"], one, 1e-5)
    assert torch.equal(first["from one"], second["from one"])


def test_dropout_differs_between_ranks(found):
    """Two ranks that were seeded alike would drop the same units of their rows."""
    whole = found(("resumed", "hooks"))[0]["whole"]
    alone = flat(runs.interrupted("hooks", dropout=0.3).module)
    assert not torch.allclose(whole, alone, atol=1e-3)


def test_all_begin_with_the_tensors_of_rank_0(found):
    first, second = found("start")
    equal(first, second)
    assert float(first["1.weight"].abs().max()) == 0.0
    assert bool(first["flag"])
    assert first["count"].tolist() == [0, 7]


def test_noise_is_calibrated_and_seeds_are_drawn_once(found):
    first, second = found("calibrated")
    equal(first, second)


def test_one_file_records_the_steps(found):
    for one in found("ledger"):
        assert one["lines"] == 1 + runs.STEPS == 1 + len(one["digests"])
        assert one["after"]
        assert "released before" in one["error"]
        # No rank is ahead of the file, whose name is told where it failed.
        assert "full.jsonl" in one["lost"] or "IsADirectoryError in open" in one["lost"]
        assert one["unchanged"]
    assert found("ledger")[0]["digests"] == found("ledger")[1]["digests"]


def test_each_rank_for_itself(found):
    for seed, end in enumerate(found("alone")):
        private = make(small_net(), images(), scheme=runs.FULL, seed=seed)
        train(private)
        assert torch.equal(end, flat(private.module))


def test_distributed_data_parallel_is_taken_off_or_refused(found):
    private = runs.build("bookkeeping", scheme=runs.FULL)
    train(private)
    for errors, ends in found("wrapped"):
        assert errors.pop("bookkeeping") == "no error"
        for error in errors.values():
            assert "module=model.module" in error
        same(ends["bookkeeping"], flat(private.module), 1e-5)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("R", "max_grad_norm: 1.0 on 0, 2.0 on 1"),
        ("sigma", "noise_multiplier: 1.0 on 0, 2.0 on 1"),
        ("seed", "differ (seed)"),
        ("lr", "'lr': 0.1"),
        ("length", "TensorDataset of 23"),
        ("contents", "the data set's contents"),
        ("one wrong", "are not in the optimizer"),
        ("bad file", "is a folder"),
        ("bound", "max_grad_norm: 1.0 on 0, 0.5 on 1"),
        ("rate", "optimizer.param_groups"),
        ("round", "what the individual filter admitted"),
        ("older", "step: 1 on 0, 0 on 1"),
        ("another run", "noise, parameters or released steps at the start"),
        ("elsewhere", "rank 0 is at make_private, rank 1 is at the end of a step"),
        ("noise", "the noisy sum of the step"),
    ],
)
def test_ranks_that_differ_all_say_so(found, what, said):
    for one in found("refusals"):
        assert said in one[what]
        assert "12345" not in one["seed"]


def test_what_ranks_exchange(found):
    for one in found("exchanges"):
        assert one["together"].tolist() == [[0.0, 10.0, 11.0], [1.0, 12.0, 13.0]]
        assert all(one[name] for name in ("own", "many", "big"))
        assert torch.equal(one["odd"], torch.full((3, 5), 3.0, dtype=torch.float64))
        assert one["first"] == 40


def test_a_single_process_needs_no_group(caplog, monkeypatch):
    scheme = everything_every_step(24, 1)
    with pytest.raises(ValueError, match="init_process_group"):
        make(small_net(), images(), scheme=scheme, distributed=True)
    with pytest.raises(TypeError, match="distributed"):
        make(small_net(), images(), scheme=scheme, distributed=2)
    assert not caplog.records
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.WARNING):
        make(small_net(), images(), scheme=scheme)
    assert "WORLD_SIZE=2" in caplog.text
    caplog.clear()
    Ranks().log(False)
    assert not caplog.records
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    Ranks().log(False)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text
    ranks = Ranks()
    columns = np.ones((2, 3))
    assert ranks.gather(columns) == (columns, slice(0, 3))
    assert ranks.sum([None], [torch.ones(2)]) == [None]
    assert ranks.agree("make_private", lambda: {}[0], 4) == [(4,)]


def test_generators_of_missing_devices_are_left_out(monkeypatch):
    state = global_state()
    expected = torch.rand(3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    restore_global_state({**state, "cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert torch.equal(torch.rand(3), expected)


class FullyShardedDataParallel(nn.Linear):
    """Goes by the name of torch's."""


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Goes by the name of torch's."""


def test_what_is_divided_among_processes_is_refused():
    sharded = nn.Sequential(FullyShardedDataParallel(2, 2))
    with pytest.raises(ValueError, match=r"'0' is a FullyShardedDataParallel.*\(FSDP2\)"):
        bare_module(sharded, "bookkeeping")
    with pytest.raises(ValueError, match="DataParallel"):
        bare_module(nn.DataParallel(nn.Linear(2, 2)), "hooks")
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer"):
        check_whole_optimizer(ZeroRedundancyOptimizer(sharded.parameters(), lr=0.1), sharded)
