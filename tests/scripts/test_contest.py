"""Contests of ways to train: what is run, what is not run again, and what is made of it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import statistics

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Identity, Poisson
from recipes.data import Split
from scripts.results import read, rows_of
from scripts.utility import results as results_module
from scripts.utility.contest import ACCURACY, LOSS, NOT_RUN, SEEDS, Contest, Job, Method, by_method
from scripts.utility.lines import Lines
from scripts.utility.results import Results
from scripts.utility.training import resized

SIZE, STEPS = 200, 3


def load(root):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SIZE, 1, 2, 2, generator=generator)
    whole = TensorDataset(points, (points.sum((1, 2, 3)) > 0).long())
    return Split(train=whole, test=TensorDataset(*whole[:20]), channels=1, classes=2, image_size=2)


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))


def poisson(size):
    return Poisson(probability=0.1, dataset_size=size, steps=STEPS)


def methods(epsilon):
    ours = Method(title="ours", scheme=poisson, strategy=Identity())
    return {"opacus": Method(title="Opacus"), "ours": ours}


CONTEST = Contest(
    title="Tiny",
    script=__file__,
    tables={"tiny": by_method({"opacus": "Opacus", "ours": "ours"}, ACCURACY + SEEDS, NOT_RUN)},
    load=load,
    dataset_size=SIZE,
    network=network,
    methods=methods,
    epsilons=(4.0,),
    rates=(0.1, 1.0),
    tuning_seeds=(9,),
    seeds=(0, 1),
    steps=STEPS,
    epoch_length=10,
    delta=1e-3,
    max_grad_norm=1.0,
    momentum=0.9,
    physical_batch_size=7,
)


class _Here:
    """A pool of this very process."""

    def Pool(self, processes):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def imap_unordered(self, function, work):
        return map(function, work)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(results_module.multiprocessing, "get_context", lambda _: _Here())
    threads = torch.get_num_threads()
    yield Results(CONTEST, tmp_path / "tiny")
    torch.set_num_threads(threads)


def _jobs(*, tuning):
    rates, seeds = (CONTEST.rates, (9,)) if tuning else ((0.1,), CONTEST.seeds)
    return [
        Job(method=method, epsilon=4.0, rate=rate, seed=seed, tuning=tuning)
        for method in ("opacus", "ours")
        for rate in rates
        for seed in seeds
    ]


@pytest.mark.slow
def test_finished_runs_are_kept_and_not_run_again(results, tmp_path, monkeypatch):
    jobs = _jobs(tuning=True)
    results.complete(jobs[:2], tmp_path, 1)
    trained = []
    worked = results_module._worked
    monkeypatch.setattr(
        results_module, "_worked", lambda work: (trained.append(work[2]), worked(work))[1]
    )
    results.complete(jobs, tmp_path, 1)
    assert trained == jobs[2:]
    kept = [line for line in results.lines.read().values() if line["kind"] != "noise"]
    assert {tuple(job.key.values()) for job in jobs} == {
        tuple(line[name] for name in results_module.KEY) for line in kept
    }


@pytest.mark.slow
def test_both_libraries_add_the_same_noise_and_tuning_has_it_too(results):
    ours = results.noise("ours", 4.0)
    smaller = resized(ours, methods(4.0)["ours"], 180)
    theirs = results.noise("opacus", 4.0)
    # One mechanism, two accountants that bound it from above, each to a fraction of a percent.
    assert ours["noise_multiplier"] == pytest.approx(theirs, rel=0.01)
    assert smaller["noise_multiplier"] == ours["noise_multiplier"]
    assert smaller["scheme"]["dataset_size"] == 180
    assert smaller["scheme"]["probability"] == ours["scheme"]["probability"]


@pytest.mark.slow
def test_the_table_is_of_the_best_rate_and_fresh_seeds(results, tmp_path, capsys):
    results.complete(_jobs(tuning=False), tmp_path, 1)
    assert results.rows() == [{"epsilon": "4"}]  # nothing is chosen yet
    results.complete(_jobs(tuning=True), tmp_path, 1)
    for job in _jobs(tuning=True):  # .1 is to be the best, whatever came out
        results.add(job, {"accuracy": 1 - job.rate / 2, "loss": 1, "seconds": 1})
    rows = results.rows()
    scores = [results.run(job)["accuracy"] for job in _jobs(tuning=False) if job.method == "ours"]
    cell = rows[0]["ours"]
    assert cell["lr"] == 0.1
    assert cell["seeds"] == 2
    assert cell["mean"] == pytest.approx(statistics.mean(scores))
    # Student's t with one degree of freedom: 12.706 standard errors of the mean.
    assert cell["half_width"] == pytest.approx(12.7062 * statistics.stdev(scores) / 2**0.5)
    results.publish(rows)
    assert f"| 4 | {100 * rows[0]['opacus']['mean']:.1f} ± " in capsys.readouterr().out
    assert rows_of(tmp_path / "tiny.json", "tiny") == rows


def test_a_method_may_bear_larger_rates_than_the_others(tmp_path):
    def one_bears_more(epsilon):
        both = dict(methods(epsilon))
        return both | {"ours": dataclasses.replace(both["ours"], rates=(*CONTEST.rates, 3.0))}

    wider = Results(dataclasses.replace(CONTEST, methods=one_bears_more), tmp_path / "wider")
    for method, rates in (("opacus", (0.1, 1.0)), ("ours", (0.1, 1.0, 3.0))):
        for rate in rates:
            assert wider.best_rate(method, 4.0) is None  # not all are there
            job = Job(method=method, epsilon=4.0, rate=rate, seed=9, tuning=True)
            wider.add(job, {"accuracy": rate / 10, "loss": 1, "seconds": 1})
        assert wider.best_rate(method, 4.0) == rates[-1]


@pytest.mark.parametrize("first", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("best", [0.01, 0.05, 0.3, 1.0])
def test_a_search_goes_from_its_first_rate_to_the_best(first, best, tmp_path):
    """Scores that rise to one rate and fall; what is beyond its neighbors is not run."""
    ladder = (0.01, 0.03, 0.05, 0.1, 0.3, 1.0)

    def searched(epsilon):
        ours = methods(epsilon)["ours"]
        return {"ours": dataclasses.replace(ours, rates=ladder, first_rate=first)}

    results = Results(dataclasses.replace(CONTEST, methods=searched), tmp_path / "ladder")
    tried = []
    while jobs := results.tuning("ours", 4.0):
        assert results.best_rate("ours", 4.0) is None
        for job in jobs:
            tried.append(job.rate)
            score = 1 - abs(ladder.index(job.rate) - ladder.index(best)) / 10
            results.add(job, {"accuracy": score, "loss": 1, "seconds": 1})
    assert results.best_rate("ours", 4.0) == best
    ends = sorted((ladder.index(first), ladder.index(best)))
    assert sorted(tried) == list(ladder[max(ends[0] - 1, 0) : ends[1] + 2])


def test_a_run_that_diverged_is_the_worst(tmp_path):
    results = Results(dataclasses.replace(CONTEST, score="loss"), tmp_path / "nan")
    for rate, loss in zip(CONTEST.rates, (math.nan, 2.0), strict=True):
        job = Job(method="ours", epsilon=4.0, rate=rate, seed=9, tuning=True)
        results.add(job, {"accuracy": 0.1, "loss": loss, "seconds": 1})
    assert results.best_rate("ours", 4.0) == CONTEST.rates[1]


@pytest.mark.slow
def test_a_fresh_seed_takes_the_rates_that_others_chose(results, tmp_path):
    results.complete(_jobs(tuning=True), tmp_path, 1)
    again = Results(dataclasses.replace(CONTEST, seeds=(7,)), tmp_path / "again")
    rate = results.best_rate("ours", 4.0)
    job = Job(method="ours", epsilon=4.0, rate=rate, seed=7, tuning=False)
    again.complete([job], tmp_path, 1)
    assert again.rows() == [{"epsilon": "4"}]
    cell = again.rows(results)[0]["ours"]
    assert (cell["lr"], cell["seeds"], cell["half_width"]) == (rate, 1, None)


def test_a_contest_of_its_own_runs_is_scored_by_its_loss(tmp_path, monkeypatch, capsys):
    """What schemes are made of is asked for once, with the folder of the data."""
    monkeypatch.setattr(results_module.multiprocessing, "get_context", lambda _: _Here())
    threads = torch.get_num_threads()
    asked = []

    def population(root):
        asked.append(root)
        return SIZE

    kinds = []

    def run(contest, root, job, noise, device, earlier):
        assert device == "cpu"
        kinds.append((job.tuning, earlier and earlier["loss"]))
        assert noise["scheme"]["dataset_size"] == SIZE
        return {"loss": 1 + job.rate + job.seed, "accuracy": job.rate, "seconds": 2.0}

    own = dataclasses.replace(
        CONTEST, load=None, network=None, run=run, population=population, score="loss",
        tables={"own": by_method({"ours": "ours"}, LOSS)},
    )  # fmt: skip
    results = Results(own, tmp_path / "own")
    jobs = [
        Job(method="ours", epsilon=4.0, rate=rate, seed=seed, tuning=tuning)
        for tuning, rates, seeds in ((True, own.rates, (9,)), (False, (0.1,), own.seeds))
        for rate in rates
        for seed in seeds
    ]
    results.complete(jobs[:1], tmp_path, 1)
    results.complete(jobs, tmp_path, 1)
    torch.set_num_threads(threads)
    # A run of the same kind that was finished before these began.
    first = 1 + jobs[0].rate + 9
    assert kinds == [(job.tuning, first if job.tuning and job != jobs[0] else None) for job in jobs]
    assert asked == [tmp_path]
    assert results.best_rate("ours", 4.0) == 0.1  # the least loss, though the least accuracy
    rows = results.rows()
    cell = rows[0]["ours"]
    assert cell["mean"] == pytest.approx(1.6)
    assert cell["accuracy"]["mean"] == pytest.approx(0.1)
    assert cell["tuning"]["tried"] == {"0.1": 10.1, "1": 11.0}
    results.publish(rows)
    assert "1.6000 ± 6.3531" in capsys.readouterr().out
    assert read(tmp_path / "own.json")["machine"].startswith(f"{len(jobs)} runs on one core each; ")


def test_lines_that_others_add_at_the_same_time_are_kept_in_order(tmp_path):
    """Each has the lock by a descriptor of its own, as processes have."""
    path = tmp_path / "runs" / "x.jsonl"

    def add(rate):
        Lines(path, ("kind", "rate")).add({"kind": "final", "rate": rate, "loss": 1.5})

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(add, reversed(range(40))))
    lines = Lines(path, ("kind", "rate"))
    assert [line["rate"] for line in lines.read().values()] == list(range(40))
    before = path.read_text().splitlines()
    lines.add({"kind": "final", "rate": 12.5})
    after = path.read_text().splitlines()
    assert [line for line in after if line not in before] == ['{"kind": "final", "rate": 12.5}']
    assert [line for line in after if line in before] == before
    lines.add({"kind": "final", "rate": 0, "loss": 3.0})  # in the place of the first
    assert lines.get(kind="final", rate=0) == {"kind": "final", "rate": 0, "loss": 3.0}
    assert len(lines.read()) == 41
    assert list(path.parent.iterdir()) == [path]
