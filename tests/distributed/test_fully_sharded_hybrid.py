"""Rows of ranks that each have a whole model (HSDP) release what one process does, and once."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.test_fully_sharded import check_parts, close
from tests.helpers import fully_sharded_runs, hybrid_runs
from tests.helpers.fully_sharded_runs import SMALL
from tests.helpers.worlds import found_by

pytestmark = pytest.mark.slow  # four ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(scope="module")
def found(folder):
    """What the ranks found, by what they did."""
    of = found_by(hybrid_runs.worker, folder, worlds=[hybrid_runs.RANKS])
    return functools.partial(of, hybrid_runs.RANKS)


@pytest.mark.parametrize("name", hybrid_runs.CASES)
def test_ranks_release_what_one_process_does(found, name):
    """The parameters, the release and the optimizer's state, put together."""
    first, *others = found(name)
    for other in others:
        close(first, other, tolerance=0.0)
    close(first, fully_sharded_runs.case(name, sharded=False))


def test_the_release_has_the_noise_once(found):
    """Against one autograd call for each example, and a stream for the whole model."""
    for one in found("parts of a release"):
        check_parts(one)


@pytest.mark.parametrize("mesh", ["one row", "one column"])
def test_meshes_of_one_row_or_one_column_are_no_exception(found, mesh):
    """All ranks divide one model, or each has a copy of all of it: the noise is there once."""
    for one in found(mesh):
        check_parts(one)


def test_what_leaves_a_rank_is_clipped(found):
    """Its own sum to its row, and of the sum of the row its shards to its column."""
    each = found("sent")
    for rank, one in enumerate(each):
        assert one["longest"] > 1e3 * SMALL
        assert set(one["sent"]) == {"all_to_all_single", "all_reduce"}
        row = rank // hybrid_runs.ROW * hybrid_runs.ROW
        in_row = sum(other["examples"] for other in each[row : row + hybrid_runs.ROW])
        for name, examples in (("all_to_all_single", one["examples"]), ("all_reduce", in_row)):
            ((length, size),) = one["sent"][name]
            assert length <= SMALL * examples * (1 + 1e-5)
            whole = name == "all_to_all_single"  # a part as long as the longest for each of a row
            assert size == (2 * max(one["shards"]) if whole else one["shards"][rank])


def test_a_run_that_stops_ends_in_the_same_bits(found, folder):
    for one in found("checkpoints"):
        for kind in ("whole", "shares", "folder"):
            assert torch.equal(one[kind], one["never stopped"])
        for kind in ("folder, in one row", "shares, in one row"):
            close(one[kind], one["never stopped"])
    alone = fully_sharded_runs.stopping(sharded=False, folder=folder / "saved")
    close(fully_sharded_runs.flat(alone.module), one["never stopped"])
    state = torch.load(folder / "whole.pt", weights_only=True)
    close(fully_sharded_runs.go_on(state, sharded=False), one["never stopped"])


def test_a_checkpoint_has_no_copies(found, folder):
    """Parameters, optimizer and noise, in shares, in a folder and in a whole state."""
    found("checkpoints")
    shares = [torch.load(folder / f"share_{r}.pt", weights_only=True) for r in range(4)]
    size = sum(p.numel() for p in fully_sharded_runs.conv().parameters())
    kept = [sum(t.numel() for t in share["module"].values()) for share in shares]
    assert sum(kept[:2]) == size
    assert kept[2:] == [0, 0]
    assert [bool(share["optimizer"]["state"]) for share in shares] == [True, True, False, False]
    assert [bool(s["private"]["noise"]["blocks"]) for s in shares] == [True, True, False, False]
    whole = torch.load(folder / "whole.pt", weights_only=True)
    assert [bool(n["blocks"]) for n in whole["private"]["noise"]] == [True, True, False, False]
    entries = dcp.FileSystemReader(folder / "saved").read_metadata().state_dict_metadata
    for name, entry in entries.items():
        sizes = [chunk.sizes.numel() for chunk in entry.chunks]
        assert sum(sizes) == entry.size.numel(), name


def test_all_rows_begin_as_the_first(found):
    each = found("rows differ")
    assert not torch.equal(each[0]["before"], each[2]["before"])
    for one in each:
        assert torch.equal(one["after"], each[0]["before"])
        assert torch.equal(one["trained"], each[0]["trained"])


def test_rows_that_are_no_copies_are_refused(found):
    for one in found("one changed"):
        assert "noise, parameters or released steps at the start" in one["error"]


def test_copies_that_drift_apart_are_noticed(found, folder):
    """Before any model is updated, and on all ranks."""
    for one in found("one drifts"):
        assert "the noisy sum of the step" in one["error"]
        assert one["same"]
    lines = (folder / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in lines[1:]] == [0]  # which the file has
