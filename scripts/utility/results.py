"""Finished runs of a contest, one small JSON file each, and the table that follows from them."""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import opacus
import torch
from opacus.accountants.utils import get_noise_multiplier
from scipy.stats import t as student
from tqdm import tqdm

from dptrain import calibrate
from recipes.data import Split
from scripts.utility.contest import HELD_OUT, Contest, Job, Method
from scripts.utility.training import Noise, train


class Results:
    """A folder with ``noise.json`` and ``finished/*.json``, and a JSON file of its name beside it.

    What is there is not run again, so that a contest that was cut short goes on where it stopped,
    and more seeds or learning rates only add to it.
    """

    def __init__(self, contest: Contest, folder: pathlib.Path) -> None:
        self.contest = contest
        self.folder = folder
        (folder / "finished").mkdir(parents=True, exist_ok=True)

    def run(self, job: Job) -> dict[str, Any] | None:
        """What came of a run, if it is finished."""
        path = self._path(job)
        return json.loads(path.read_text()) if path.exists() else None

    def noise(self, method: str, epsilon: float, size: int, *, tuning: bool) -> Noise:
        """σ of Opacus or our mechanism, calibrated once; both for training sets of this size."""
        path = self.folder / "noise.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        key = f"{method} {epsilon:g}{' tuning' if tuning else ''}"
        if key not in known:
            found = self.contest.methods(epsilon)[method]
            known[key] = (
                self._tuned(known[f"{method} {epsilon:g}"], found, size)
                if tuning
                else (self._calibrated(found, epsilon, size))
            )
            _write(path, known)
        noise: Noise = known[key]
        return noise

    def complete(
        self, jobs: Sequence[Job], root: pathlib.Path, sizes: tuple[int, int], processes: int
    ) -> None:
        """Calibrate and run what is missing; ``sizes`` are N without and with a held-out part."""
        missing = [job for job in jobs if self.run(job) is None]
        pairs = dict.fromkeys((job.method, job.epsilon) for job in missing)
        for method, epsilon in tqdm(pairs, desc="calibrating", unit="mechanism", delay=2):
            self.noise(method, epsilon, sizes[0], tuning=False)
            self.noise(method, epsilon, sizes[1], tuning=True)
        work = [
            (self.contest, root, job, self.noise(job.method, job.epsilon, 0, tuning=job.tuning))
            for job in missing
        ]
        # Each worker has one thread: two runs beside each other take less than one after the other.
        # Their own bars would write over this one.
        os.environ["TQDM_DISABLE"] = "1"
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            del os.environ["TQDM_DISABLE"]
            done = tqdm(pool.imap_unordered(_worked, work), total=len(work), unit="run")
            for job, found in done:
                _write(self._path(job), found)

    def best_rate(self, method: str, epsilon: float) -> float | None:
        """The learning rate with the best mean accuracy of the tuning runs, if all are there."""
        seeds = self.contest.tuning_seeds
        scores = {
            rate: [
                self.run(Job(method=method, epsilon=epsilon, rate=rate, seed=seed, tuning=True))
                for seed in seeds
            ]
            for rate in self.contest.rates
        }
        if any(found is None for runs in scores.values() for found in runs):
            return None
        return max(scores, key=lambda rate: sum(run["accuracy"] for run in scores[rate] if run))

    def table(self, chosen: Results | None = None) -> dict[str, Any]:
        """Mean, 95 % interval (Student's t) and seconds of what is finished; also written.

        Args:
            chosen: whose tuning runs chose the learning rates; its own if left out.
        """
        cells = {}
        for epsilon in self.contest.epsilons:
            for method in self.contest.methods(epsilon):
                rate = (chosen or self).best_rate(method, epsilon)
                if rate is None:
                    continue
                runs = [
                    run
                    for seed in self.contest.seeds
                    if (
                        run := self.run(
                            Job(method=method, epsilon=epsilon, rate=rate, seed=seed, tuning=False)
                        )
                    )
                ]
                if runs:
                    noise = self.noise(method, epsilon, 0, tuning=False)
                    cells[f"{method} {epsilon:g}"] = _cell(runs) | {
                        "lr": rate,
                        "sigma": noise["noise_multiplier"] if isinstance(noise, dict) else noise,
                    }
        table = {
            "cells": cells,
            "delta": self.contest.delta,
            "versions": {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "opacus": opacus.__version__,
            },
        }
        _write(self.beside(".json"), table)
        return table

    def beside(self, ending: str) -> pathlib.Path:
        """The file that has the folder's name."""
        return self.folder.with_name(self.folder.name + ending)

    def _path(self, job: Job) -> pathlib.Path:
        return self.folder / "finished" / f"{job.name}.json"

    def _calibrated(self, method: Method, epsilon: float, size: int) -> Noise:
        contest = self.contest
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
            scheme=method.scheme(size),
            strategy=method.strategy,
            epsilon=epsilon,
            delta=contest.delta,
        )
        return calibration.mechanism.to_dict()

    @staticmethod
    def _tuned(noise: Noise, method: Method, size: int) -> Noise:
        """The same σ and sampling rates, of a smaller training set."""
        if not isinstance(noise, dict):
            return noise
        assert method.scheme is not None
        return noise | {"scheme": method.scheme(size).to_dict()}


def _worked(work: tuple[Contest, pathlib.Path, Job, Noise]) -> tuple[Job, dict[str, Any]]:
    contest, root, job, noise = work
    torch.set_num_threads(1)
    split = _loaded(contest.load, root, HELD_OUT if job.tuning else 0.0)
    return job, train(contest, split, noise, rate=job.rate, seed=job.seed)


@functools.cache
def _loaded(
    load: Callable[[pathlib.Path, float], Split], root: pathlib.Path, held_out: float
) -> Split:
    """Once a worker, as reading takes as long as many steps."""
    return load(root, held_out)


def _cell(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = [run["accuracy"] for run in runs]
    half = None
    if len(values) > 1:
        spread = statistics.stdev(values) / math.sqrt(len(values))
        half = float(student.ppf(0.975, len(values) - 1)) * spread
    return {
        "mean": statistics.mean(values),
        "half_width": half,
        "seeds": len(values),
        "seconds": statistics.median(run["seconds"] for run in runs),
    }


def _write(path: pathlib.Path, value: Any) -> None:
    """In one step, so that whoever is killed leaves the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)
