"""Finished runs of a contest, a line of JSON each, and the table that follows from them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import opacus
import torch
from opacus.accountants.utils import get_noise_multiplier
from scipy.stats import t as student
from tqdm import tqdm

from dptrain import calibrate
from recipes.data import Split
from scripts.results import Table, publish, words
from scripts.utility.contest import HELD_OUT, Contest, Job, Method
from scripts.utility.lines import Lines
from scripts.utility.training import Noise, resized, train

KEY = ("kind", "method", "epsilon", "rate", "seed")


class Results:
    """``NAME.jsonl`` with finished runs and noise, and ``NAME.json`` with the tables of them.

    A run that is there is not made again: a contest that was cut short goes on where it stopped,
    and more seeds or learning rates only add lines.

    Args:
        contest: what is compared.
        base: path of the files, without their endings.
    """

    def __init__(self, contest: Contest, base: pathlib.Path) -> None:
        self.contest, self.base = contest, base
        self.lines = Lines(self.beside(".jsonl"), KEY)

    def run(self, job: Job) -> dict[str, Any] | None:
        """The outcome of a run, if it is finished."""
        return self.lines.get(**job.key)

    def add(self, job: Job, found: Mapping[str, Any]) -> None:
        """Keep the outcome of a run."""
        self.lines.add({**job.key, **found})

    def noise(self, method: str, epsilon: float, root: pathlib.Path | None = None) -> Noise:
        """σ of Opacus or our mechanism for the whole training set, calibrated once.

        Args:
            method, epsilon: of the contest.
            root: of the data, for a contest whose schemes need more than their number.
        """
        key = {"kind": "noise", "method": method, "epsilon": epsilon}
        known = self.lines.get(**key)
        if known is None:
            found = self._calibrated(self.contest.methods(epsilon)[method], epsilon, root)
            known = {**key, "noise": found}
            self.lines.add(known)
        noise: Noise = known["noise"]
        return noise

    def complete(
        self, jobs: Sequence[Job], root: pathlib.Path, processes: int, device: str = "cpu"
    ) -> None:
        """Calibrate and run what is missing.

        Args:
            jobs: what is wanted.
            root: of the data.
            processes: runs at once.
            device: that all of them train on.
        """
        missing = [job for job in jobs if self.run(job) is None]
        if not missing:
            return
        pairs = dict.fromkeys((job.method, job.epsilon) for job in missing)
        bar = tqdm(pairs, desc="calibrating", unit="mechanism", delay=2)
        noises = {pair: self.noise(*pair, root) for pair in bar}
        earlier = {kind: self._earlier(kind) for kind in {job.kind for job in missing}}
        work = [
            (self.contest, root, job, noises[job.method, job.epsilon], device, earlier[job.kind])
            for job in missing
        ]
        # Each worker has one thread: two runs beside each other take less than one after the other.
        # Their own bars would write over this one.
        os.environ["TQDM_DISABLE"] = "1"
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            del os.environ["TQDM_DISABLE"]
            done = tqdm(pool.imap_unordered(_worked, work), total=len(work), unit="run")
            for job, found in done:
                self.add(job, found)

    def best_rate(self, method: str, epsilon: float) -> float | None:
        """The learning rate with the best mean score, if no other is to be tried."""
        return self._best(self._scores(self._tuned(method, epsilon)), method, epsilon)

    def tuning(self, method: str, epsilon: float) -> list[Job]:
        """The runs by which the search for the best learning rate goes on; none: it is known."""
        return [
            Job(method=method, epsilon=epsilon, rate=rate, seed=seed, tuning=True)
            for rate in self._untried(self._scores(self._tuned(method, epsilon)), method, epsilon)
            for seed in self.contest.tuning_seeds
        ]

    def _tuned(self, method: str, epsilon: float) -> dict[float, list[dict[str, Any]]]:
        """The tuning runs by learning rate, where all are finished."""
        found = {}
        for rate in self.contest.rates_of(method, epsilon):
            runs = [
                self.run(Job(method=method, epsilon=epsilon, rate=rate, seed=seed, tuning=True))
                for seed in self.contest.tuning_seeds
            ]
            if None not in runs:
                found[rate] = [run for run in runs if run]
        return found

    def _scores(self, tuned: dict[float, list[dict[str, Any]]]) -> dict[float, float]:
        """By learning rate, the mean of all tuning runs; the more the better, and NaN the worst."""
        key, sign = self.contest.score, 1 if self.contest.score == "accuracy" else -1
        means = {r: sign * statistics.mean(run[key] for run in runs) for r, runs in tuned.items()}
        return {rate: -math.inf if math.isnan(mean) else mean for rate, mean in means.items()}

    def _best(self, scores: dict[float, float], method: str, epsilon: float) -> float | None:
        return (
            None if self._untried(scores, method, epsilon) else max(scores, key=scores.__getitem__)
        )

    def _untried(self, scores: dict[float, float], method: str, epsilon: float) -> list[float]:
        rates = self.contest.rates_of(method, epsilon)
        first = self.contest.methods(epsilon)[method].first_rate
        if first is None:
            wanted: Sequence[float] = rates
        elif not scores:
            wanted = (first,)
        else:
            best = rates.index(max(scores, key=scores.__getitem__))
            wanted = rates[max(best - 1, 0) : best + 2]
        return [rate for rate in wanted if rate not in scores]

    def rows(self, chosen: Results | None = None) -> list[dict[str, Any]]:
        """A row for each ε: by method, the mean and 95 % interval (Student's t) of finished runs.

        A cell also has the learning rate, σ, seconds by device, and as ``tuning`` the best score of
        the tuning runs, its rate, "…" where the search goes on, and all scores by rate.

        Args:
            chosen: whose tuning runs chose the learning rates; its own if left out.
        """
        rows, source = [], chosen or self
        for epsilon in self.contest.epsilons:
            row: dict[str, Any] = {"epsilon": f"{epsilon:g}"}
            for method in self.contest.methods(epsilon):
                if cell := self._cell(method, epsilon, source):
                    row[method] = cell
            rows.append(row)
        return rows

    def _cell(self, method: str, epsilon: float, source: Results) -> dict[str, Any]:
        tuned = source._tuned(method, epsilon)
        scores = source._scores(tuned)
        if not scores:
            return {}
        rate, best = source._best(scores, method, epsilon), max(scores, key=scores.__getitem__)
        tuning = {
            "score": abs(scores[best]),
            "rate": f"{best:g}",
            "more": "" if rate is not None else " …",
            "tried": {f"{each:g}": abs(score) for each, score in scores.items()},
        }
        runs = [
            run
            for seed in self.contest.seeds
            if rate is not None
            and (
                run := self.run(
                    Job(method=method, epsilon=epsilon, rate=rate, seed=seed, tuning=False)
                )
            )
        ]
        devices = collections.Counter(map(_device, [*itertools.chain(*tuned.values()), *runs]))
        found = {"tuning": tuning, "runs": dict(devices)}
        if not runs:
            return found
        noise = self.noise(method, epsilon)
        return _means(runs, self.contest.score) | {
            "lr": rate,
            "norm": self.contest.norm_of(method, epsilon),
            "sigma": noise["noise_multiplier"] if isinstance(noise, dict) else noise,
            **found,
        }

    def publish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print and write the contest's tables of these rows."""
        cells = [cell for row in rows for name, cell in row.items() if name != "epsilon"]
        devices: collections.Counter[str] = collections.Counter()
        for cell in cells:
            devices.update(cell["runs"])
        ran = ", ".join(
            f"{number} runs on {'one core each' if device == 'cpu' else device}"
            for device, number in sorted(devices.items())
        )
        made = words(
            {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "opacus": opacus.__version__,
            }
        )
        publish(
            self.beside(".json"),
            {
                name: Table(columns, cells if self.contest.row_a_method else rows)
                for name, columns in self.contest.tables.items()
            },
            script=self.contest.script,
            machine=f"{ran or 'no runs'}; the table was made with {made}",
        )

    def beside(self, ending: str) -> pathlib.Path:
        """The file of an ending."""
        return self.base.with_name(self.base.name + ending)

    def _earlier(self, kind: str) -> dict[str, Any] | None:
        """The first of the finished runs of a kind."""
        return next((run for run in self.lines.read().values() if run["kind"] == kind), None)

    def _calibrated(self, method: Method, epsilon: float, root: pathlib.Path | None) -> Noise:
        contest = self.contest
        population: Any = contest.dataset_size
        if contest.population is not None:
            assert root is not None
            population = contest.population(root)
        if method.scheme is None:
            return float(
                get_noise_multiplier(
                    target_epsilon=epsilon,
                    target_delta=contest.delta,
                    sample_rate=1 / contest.epoch_length,
                    steps=contest.steps,
                    accountant="prv",
                )
            )
        assert method.strategy is not None
        calibration = calibrate(
            scheme=method.scheme(population),
            strategy=method.strategy,
            epsilon=epsilon,
            delta=contest.delta,
        )
        return calibration.mechanism.to_dict()


def _worked(
    work: tuple[Contest, pathlib.Path, Job, Noise, str, dict[str, Any] | None],
) -> tuple[Job, dict[str, Any]]:
    contest, root, job, noise, device, earlier = work
    torch.set_num_threads(1)
    told = {"torch": torch.__version__}
    if device != "cpu":
        told["device"] = torch.cuda.get_device_name(device)
    if contest.run is not None:
        return job, contest.run(contest, root, job, noise, device, earlier) | told
    assert contest.load is not None
    split = _loaded(contest.load, root)
    if len(split.train) != contest.dataset_size:
        raise ValueError(
            f"{root} holds {len(split.train)} training images, not {contest.dataset_size}, which "
            "the noise is calibrated for"
        )
    if job.tuning:
        split = split.hold_out(HELD_OUT, seed=0)
    noise = resized(noise, contest.methods(job.epsilon)[job.method], len(split.train))
    own = dataclasses.replace(contest, max_grad_norm=contest.norm_of(job.method, job.epsilon))
    return job, train(own, split, noise, rate=job.rate, seed=job.seed, device=device) | told


@functools.cache
def _loaded(load: Callable[[pathlib.Path], Split], root: pathlib.Path) -> Split:
    """Once a worker, as reading takes as long as many steps."""
    return load(root)


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and half-width of its 95 % interval (Student's t), for which one value says nothing."""
    if len(values) < 2:
        return statistics.mean(values), None
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), float(half)


def _means(runs: Sequence[dict[str, Any]], score: str) -> dict[str, Any]:
    mean, half = interval([run[score] for run in runs])
    other = {}
    if score == "loss":
        accuracy, around = interval([run["accuracy"] for run in runs])
        other = {"accuracy": {"mean": accuracy, "half_width": around}}
    return other | {
        "mean": mean,
        "half_width": half,
        "seeds": len(runs),
        "seconds": _seconds(runs),
    }


def _seconds(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By device, the median."""
    by_device: dict[str, list[float]] = {}
    for run in runs:
        if "seconds" in run:  # runs of an older format have none
            by_device.setdefault(_device(run), []).append(run["seconds"])
    return {device: statistics.median(each) for device, each in by_device.items()}


def _device(run: Mapping[str, Any]) -> str:
    return str(run.get("device", "cpu"))
