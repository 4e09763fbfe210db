"""What ranks hold and send, by the formulas, by counting, and by what was published."""

import pathlib

import pytest
import torch
from torch import nn

from dptrain.noise import noise_stream
from dptrain.planning import footprint
from dptrain.strategies import BISR, BandMF, Identity, Tree
from scripts.bench import footprint as bench
from scripts.results import rows_of

ROOT = pathlib.Path(__file__).parents[2]
KEPT = ("history", "optimizer", "gradients")
# Above what is counted: a batch, activations and work space, less than a layer has.
ABOVE = 4 * bench.WIDTH * (bench.WIDTH + 1)


def published():
    path = ROOT / "scripts/bench/results/footprint.json"
    return rows_of(path, "footprint"), rows_of(path, "footprint_measured")


def assert_holds(row):
    """The formula is what the ranks were found to hold at the highest moment, and to send."""
    formula, ranks = row["formula"], row["measured"]
    assert len(ranks) == row["ranks"]
    for found in ranks:
        assert found["parameters"] == formula["parameters"]
        assert found["sent"] == formula["sent"]
        assert 0 < found["messages"] < 1000 * (row["ranks"] - 1)
    for part in KEPT:  # the formula is that of the longest slice
        assert max(found[part] for found in ranks) == formula[part], part
    assert 0 <= max(found["peak"] for found in ranks) - formula["peak"] <= ABOVE
    whole = footprint(
        bench.MEASURED[row["strategy"]],
        steps=bench.MEASURED_STEPS,
        parameters=formula["parameters"] // 4,
    )
    if row["shard"] != "off":  # nothing is there twice, or missing
        assert sum(found["history"] for found in ranks) == whole.history
    if row["shard"] == "auto":
        assert sum(found["optimizer"] for found in ranks) == whole.optimizer


@pytest.mark.slow
@pytest.mark.parametrize(("world", "names"), [(2, list(bench.MEASURED)), (4, ["16 bands"])])
def test_formulas_are_what_ranks_hold_and_send(world, names):
    rows = bench.run_ranks(world, names)
    assert len(rows) == len(names) * len(bench.SHARDS)
    for row in rows:
        assert_holds(row)


@pytest.mark.slow
def test_what_was_published_is_what_the_formulas_say():
    planned, measured = published()
    for row in measured:
        assert_holds(row)
        again = footprint(
            bench.MEASURED[row["strategy"]],
            steps=bench.MEASURED_STEPS,
            parameters=row["formula"]["parameters"] // 4,
            ranks=row["ranks"],
            shard=bench.SHARDS[row["shard"]],
            backend="gloo",
        )
        assert again.to_dict() == row["formula"]
    assert {row["ranks"] for row in measured} == {2, 4}
    for row in planned[0]["ranks"].values():
        found = bench.planned(bench.MODELS[row["model"]], row["ranks"], row["strategy"])
        assert found.to_dict().items() <= row.items()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [Identity(), BandMF(bands=3), BISR(inverse_bands=3), Tree()])
def test_history_is_that_of_a_stream_of_the_model(strategy, dtype):
    shapes = [torch.zeros(300, 20), torch.zeros(7)]
    stream = noise_stream(strategy, steps=12, like=shapes, seed=0, dtype=dtype)
    found = footprint(strategy, steps=12, parameters=6007, noise_dtype=dtype)
    assert found.history == stream.buffer_bytes


def test_a_single_process_sends_nothing_and_divides_nothing():
    for shard in ("all", "noise", "off"):
        found = footprint(BandMF(bands=3), steps=9, parameters=1000, shard=shard)
        assert found.sent == 0
        assert (found.history, found.optimizer) == (8000, 8000)
        # Clipped sums become the release in place.
        assert (found.sums, found.exchange, found.gradients) == (4000, 0, 4000)
        assert found.kept == 4000 + 8000 + 8000
        assert found.peak == found.kept + 4000


def test_the_state_of_an_optimizer_is_asked_of_it():
    def of(optimizer):
        return footprint(Identity(), steps=9, parameters=100, optimizer=optimizer).optimizer

    assert of(torch.optim.SGD) == 0
    assert of(lambda p: torch.optim.SGD(p, momentum=0.9)) == 400
    assert of(lambda p: torch.optim.Adam(p, amsgrad=True)) == 1200


def test_half_precision_has_sums_and_noise_in_full():
    given = {"steps": 9, "parameters": 1 << 16, "ranks": 4, "dtype": torch.bfloat16}
    sliced = footprint(BandMF(bands=3), **given)
    quarter = 1 << 14
    assert sliced.parameters == 2 << 16
    assert sliced.history == 2 * 4 * quarter
    assert sliced.optimizer == 2 * 2 * quarter
    assert sliced.sent == 3 * quarter * (4 + 2)  # sums are float32, parameters are not
    # The release in half precision lies beside the noisy sums of which it is made.
    large = {**given, "parameters": 10**8, "shard": "off"}
    assert footprint(BandMF(bands=3), **large).sums == (4 + 2) * 10**8


def test_microbatches_are_added_up_beside_one_another():
    given = {"steps": 9, "parameters": 10_000_000, "ranks": 512}
    one, two, many = (footprint(Identity(), **given, microbatches=k) for k in (1, 2, 9))
    assert two == many
    assert two.sums == 120_000_000  # float32 beside float64
    assert two.peak > one.peak


def test_mistakes_are_named():
    def refused(match, error=ValueError, **options):
        with pytest.raises(error, match=match):
            footprint(Identity(), **{"steps": 9, "parameters": 10, **options})

    refused("ranks=0", ranks=0)
    refused("parameters", parameters=0)
    refused("shard='auto'", shard="auto")
    refused("backend='mpi'", backend="mpi")
    refused("float64", dtype=torch.float64)
    refused("optimizer", TypeError, optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    refused("optimizer", TypeError, optimizer=lambda parameters: None)
