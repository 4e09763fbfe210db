"""Two processes make the run of users that one makes, and no user's mean is cut between them."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

from dptrain.sampling import PerUser
from tests.helpers import distributed_users as runs
from tests.helpers.distributed_users import CASES, MODES, RESUMED
from tests.helpers.engine import flat, small_net
from tests.helpers.worlds import found_by

# Its ranks do all that the module asks for, which takes half a minute.
pytestmark = pytest.mark.slow
STABILITY = 1e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks found, by what they did."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in RESUMED:
        torch.save(runs.interrupted(name, stop=4).state_dict(), folder / f"{name}.pt")
    of = found_by(runs.worker, folder, worlds=[2])
    return lambda *name: of(2, name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_release_what_one_does(found, mode, name):
    first, second = found("run", mode, name)
    alone = runs.run(mode, **CASES[name])
    assert first["steps"] == second["steps"] == alone["steps"] == runs.STEPS
    for what in ("parameters", "released"):
        assert torch.equal(first[what], second[what])
        torch.testing.assert_close(first[what], alone[what], rtol=1e-5, atol=1e-5)


def records_of(name):
    """The rows that are clipped as one, of every step, as one process draws them."""
    scheme, planned = CASES[name]["scheme"], collections.defaultdict(list)
    private = runs.build("bookkeeping", **CASES[name])
    seed = int(private.state_dict()["private"]["loader"]["seed"], 16)
    for step, batch in enumerate(scheme.stream(seed)):
        rows, sizes = scheme.grouped(batch)
        for size in [1] * len(rows) if sizes is None else sizes.tolist():
            planned[step].append(rows[:size].tolist())
            rows = rows[size:]
    return planned


def summed(module, data, groups):
    """Σ clip(mean over the rows of a group, R), one autograd call a row."""
    total = torch.zeros_like(flat(module))
    for rows in groups:
        mean = torch.zeros_like(total)
        for row in rows:
            x, y = data[row]
            loss = nn.functional.cross_entropy(module(x[None]), y[None])
            grads = torch.autograd.grad(loss, list(module.parameters()))
            mean += torch.cat([g.flatten() for g in grads]) / len(rows)
        total += mean * min(1.0, runs.BOUND / (float(mean.norm()) + STABILITY))
    return total


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_sum_is_that_of_whole_records(found, name):
    """In float64 and without noise, against one gradient at a time."""
    scheme = CASES[name]["scheme"]
    module, data = small_net().double(), runs.data_of(scheme, torch.float64)
    planned = records_of(name)
    expected = [summed(module, data, planned[step]) for step in range(runs.STEPS)]
    for mode in MODES:
        for each in found("sums", mode, name):
            assert len(each) == runs.STEPS
            for mine, right in zip(each, expected, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_no_record_is_cut_between_ranks_or_microbatches(found, name):
    scheme = CASES[name]["scheme"]
    ranks = found("records", name)
    seen = collections.defaultdict(list)
    for one in ranks:
        for step, _, weight, rows in one:
            assert weight == bool(rows)  # padding has records of its own, which count nothing
            if rows:
                seen[step].append(rows)
    assert {step: each for step, each in seen.items() if each} == {
        step: each for step, each in records_of(name).items() if each
    }
    if isinstance(scheme, PerUser):
        for step, each in seen.items():
            owners = [scheme.graph.members[rows[0]] for rows in each]
            assert len(set(owners)) == len(owners), step
        assert max(len(rows) for each in seen.values() for rows in each) > 1
    parts = [{(step, part) for step, part, _, _ in one} for one in ranks]
    assert parts[0] == parts[1]
    if "max_physical_batch_size" in CASES[name]:
        most = CASES[name]["max_physical_batch_size"]
        for one in ranks:
            rows = collections.Counter()
            for step, part, _, own in one:
                rows[step, part] += max(1, len(own))
            assert max(rows.values()) <= most


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_of_two_processes_goes_on(found, name):
    first, second = found("resumed", name)
    for one in (first, second):
        assert torch.equal(one["again"], first["whole"])
        assert torch.equal(one["from one"], first["from one"])
    alone = flat(runs.interrupted(name).module)
    torch.testing.assert_close(first["from one"], alone, rtol=1e-5, atol=1e-5)
