"""Runs of a sweep as an Optuna study in SQLite: several at once, ended early, resumed when killed.

Every run is a process of its own. The processes hold the lock of the sweep's folder as well, so
that nobody begins a run again while one that outlived its sweep is still at it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from tqdm import tqdm

from recipes.data.packages import package
from recipes.runfolder import METRICS, SUMMARY, read_metrics
from recipes.task import HELD_OUT, TEST

SWEEP = "sweep"  # the extra that brings Optuna
DATABASE, LOCK, LOGS = "study.db", "sweep.lock", "logs"
POLL = 0.5  # seconds between two looks at the runs
STARTUP_TRIALS = 5  # complete runs before the first is ended early
_ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes:
        folder: of the run; its name is the trial's.
        parameters: what is shown in the study.
        command: what starts it or goes on with it, as arguments of Python.
    """

    folder: pathlib.Path
    parameters: dict[str, Any]
    command: list[str]

    def scores(self, metric: str) -> list[tuple[int, float]]:
        """(step, score) of the evaluations so far.

        Raises:
            ValueError: if there is no such metric.
        """
        path = self.folder / METRICS
        records = read_metrics(path) if path.exists() else []
        found = []
        for record in records:
            if record["split"] in (TEST, HELD_OUT):
                if metric not in record:
                    known = sorted(set(record) - {"step", "split", "not_for_release"})
                    raise ValueError(f"--score {metric}: the runs have {', '.join(known)}")
                found.append((record["step"], float(record[metric])))
        return found


def minimized(metric: str) -> bool:
    """True if a smaller value is better, which holds for losses only."""
    return metric.endswith("loss")


def ranked(score: float, metric: str) -> float:
    """A number that is larger for a better score; a score that is none is the worst."""
    if math.isnan(score):
        return -math.inf
    return -score if minimized(metric) else score


class Study:
    """The study of a sweep's folder, which is made or gone on with.

    Args:
        output: folder of the sweep.
        metric: what runs are scored by.
        prune: end runs that are worse half-way than the median of those before.
        jobs: all runs that there are to be.

    Raises:
        ValueError: if Optuna is missing, or the study was begun with another metric.
    """

    def __init__(
        self, output: pathlib.Path, *, metric: str, prune: bool, jobs: Sequence[Job]
    ) -> None:
        self._optuna = optuna = package("optuna", purpose="a study of runs", extra=SWEEP)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._output, self._metric, self._prune = output, metric, prune
        self._jobs, self._ending = list(jobs), set[str]()
        self._ranges = _ranges(jobs)
        self._study = optuna.create_study(
            storage=f"sqlite:///{(output / DATABASE).absolute()}",
            study_name="sweep",
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            direction="minimize" if minimized(metric) else "maximize",
            load_if_exists=True,
        )
        (output / DATABASE).chmod(0o600)
        before = self._study.user_attrs.setdefault("metric", metric)
        if before != metric:
            raise ValueError(f"--score {metric}: {output / DATABASE} was begun with {before}")
        self._study.set_user_attr("metric", metric)
        for trial in self._study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            # Left by a sweep that was killed: its run goes on from its checkpoint, as a new trial.
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    @property
    def pruned(self) -> set[str]:
        """Names of the runs that were ended early."""
        state = self._optuna.trial.TrialState.PRUNED
        return {trial.user_attrs["folder"] for trial in self._study.get_trials(states=[state])}

    def _ask(self, job: Job) -> Any:
        values = {name: float(job.parameters[name]) for name in self._ranges}
        others = {name: job.parameters[name] for name in set(job.parameters) - set(values)}
        self._study.enqueue_trial(values, user_attrs={"folder": job.folder.name, **others})
        kind = self._optuna.distributions.FloatDistribution
        return self._study.ask({name: kind(*self._ranges[name]) for name in values})

    def _ended(self, trial: Any, job: Job, status: int) -> bool:
        """Write a run's end down; returns whether it failed."""
        state = self._optuna.trial.TrialState
        for _ in self._reported(trial, job):
            pass  # later runs are compared with all of it, however fast this one was
        if (job.folder / SUMMARY).exists():
            score = job.scores(self._metric)[-1][1]
            worst = math.inf if minimized(self._metric) else -math.inf
            self._study.tell(trial, worst if math.isnan(score) else score)
            return False
        ended_early = job.folder.name in self._ending and status != 2
        self._study.tell(trial, state=state.PRUNED if ended_early else state.FAIL)
        return not ended_early

    def _reported(self, trial: Any, job: Job) -> Iterator[int]:
        """Report what is new; yields each step, as the pruner compares at the one reported last."""
        if not self._prune:
            return
        known = trial.storage.get_trial(trial._trial_id).intermediate_values
        for step, score in job.scores(self._metric):
            # Before the first step all models are alike.
            if step and step not in known:
                trial.report(score, step)
                yield step

    def _to_be_ended(self, trial: Any, job: Job) -> bool:
        """Report what is new; whether the pruner wants it ended, which it was not told yet."""
        if job.folder.name in self._ending:
            return False
        return any(trial.should_prune() for _ in self._reported(trial, job))

    def run(self, *, at_once: int) -> tuple[list[str], bool]:
        """Run what is left, so many at once.

        Args:
            at_once: the most processes.

        Returns:
            The names of runs that failed, and whether Ctrl-C stopped the sweep.
        """
        pruned, failed = self.pruned, []
        waiting = [
            job
            for job in self._jobs
            if not (job.folder / SUMMARY).exists() and job.folder.name not in pruned
        ]
        running: dict[subprocess.Popen[bytes], tuple[Job, Any]] = {}
        done = len(self._jobs) - len(waiting)
        (self._output / LOGS).mkdir(exist_ok=True)
        with (
            _locked(self._output) as lock,
            _Stop() as stop,
            tqdm(total=len(self._jobs), initial=done, desc="runs", unit="run") as bar,
        ):
            while running or (waiting and not stop.asked):
                while waiting and len(running) < at_once and not stop.asked:
                    job = waiting.pop(0)
                    trial = self._ask(job)
                    running[self._start(job, lock, at_once)] = job, trial
                time.sleep(POLL)
                stop.pass_on(running)
                for process, (job, trial) in list(running.items()):
                    status = process.poll()
                    if status is not None:
                        del running[process]
                        bar.update()
                        if self._ended(trial, job, status) and not stop.asked:
                            failed.append(job.folder.name)
                    elif self._to_be_ended(trial, job):
                        self._ending.add(job.folder.name)
                        process.send_signal(signal.SIGINT)
        return failed, stop.asked

    def _start(self, job: Job, lock: int, at_once: int) -> subprocess.Popen[bytes]:
        threads = str(max(1, (os.cpu_count() or 1) // at_once))
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        with open(self._output / LOGS / f"{job.folder.name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *job.command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": threads, **os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches it by way of this process, once
                pass_fds=(lock,),
            )


def _ranges(jobs: Sequence[Job]) -> dict[str, tuple[float, float]]:
    """Least and greatest values of the parameters that are numbers in every run.

    A grid may grow from one call to the next. Optuna takes that of ranges, and not of lists of
    choices; what is no number is shown as an attribute of the trial.
    """
    values: dict[str, list[Any]] = {}
    for job in jobs:
        for name, value in job.parameters.items():
            values.setdefault(name, []).append(value)
    return {
        name: (float(min(found)), float(max(found)))
        for name, found in values.items()
        if len(found) == len(jobs)
        and all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
    }


@contextlib.contextmanager
def _locked(output: pathlib.Path) -> Iterator[int]:
    """The lock of the folder, held until the last process that inherited it has ended.

    Raises:
        ValueError: if somebody holds it.
    """
    with open(output / LOCK, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"output={output}: another sweep, or runs that a killed one left, are still at "
                "work there; wait for them or end them, and start again"
            ) from error
        yield file.fileno()


class _Stop:
    """Hands Ctrl-C on to the runs: the first ends them after a step, the second at once."""

    asked = False

    def __enter__(self) -> _Stop:
        self._new = 0
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            tqdm.write("stopping the runs after their step (Ctrl-C again stops them at once)")
        self.asked = True
        self._new += 1

    def pass_on(self, running: dict[subprocess.Popen[bytes], tuple[Job, Any]]) -> None:
        """Send on what came in since."""
        count, self._new = self._new, 0
        for _ in range(count):
            for process in running:
                process.send_signal(signal.SIGINT)
