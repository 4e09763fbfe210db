"""The pairs of scheme and strategy that a plan compares, as a configuration writes them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any

from dptrain.configuration import build_scheme, build_strategy
from dptrain.mechanism import MatrixMechanism
from dptrain.planning.question import Question
from dptrain.planning.truncation import least_max_batch_size
from dptrain.strategies import PREFIX_SUMS, Strategy

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A pair to be tried.

    Attributes:
        scheme: the ``scheme`` group of a configuration.
        strategy: its ``strategy`` group.
    """

    scheme: Settings
    strategy: Settings

    def mechanism(self, question: Question) -> MatrixMechanism:
        """The pair with σ = 1.

        Raises:
            ValueError: if the scheme cannot run such batches and steps, or the strategy such steps.
        """
        size, steps = question.dataset_size, question.steps
        return MatrixMechanism(
            scheme=build_scheme(self.scheme, dataset_size=size, steps=steps),
            strategy=_bound(json.dumps(self.strategy), steps),
            noise_multiplier=1.0,
        )

    @property
    def scheme_name(self) -> str:
        """The scheme as a user writes it, without the batch size."""
        return _call(self.scheme, ("batch_size",))

    @property
    def strategy_name(self) -> str:
        """The strategy as a user writes it, without the workload and what describes the run."""
        return _call(self.strategy, ("workload", "max_participations", "min_sep"))


@functools.lru_cache(maxsize=64)
def _bound(settings: str, steps: int) -> Strategy:
    """Optimised once for all schemes that are tried with it."""
    return build_strategy(json.loads(settings)).bind(steps)


def _call(settings: Settings, left_out: tuple[str, ...]) -> str:
    shown = [f"{k}={v}" for k, v in settings.items() if k not in ("type", *left_out)]
    return f"{settings['type']}({', '.join(shown)})"


def strategy_of(question: Question, bands: int) -> Settings:
    """The banded strategy of least error for the question's workload; independent noise for 1."""
    if bands == 1:
        return {"type": "Identity"}
    return {"type": "BandMF", "bands": bands, **_workload(question)}


def _workload(question: Question) -> Settings:
    workload = question.workload
    if workload == PREFIX_SUMS:
        return {}
    return {"workload": {"family": workload._family, **workload.to_dict()}}


def first_candidates(question: Question) -> list[Candidate]:
    """Every scheme with every number of bands, the separation being the number of bands."""
    size = {"batch_size": question.batch_size}
    found = [
        Candidate({"type": "Poisson", **size}, strategy_of(question, 1)),
        Candidate(
            {"type": "Poisson", **size, "max_batch_size": _cut(question, 1)},
            strategy_of(question, 1),
        ),
    ]
    for bands in question.bands[1:]:
        strategy = strategy_of(question, bands)
        cyclic = {"type": "CyclicPoisson", **size, "cycle": bands}
        found.append(Candidate(cyclic, strategy))
        if bands <= question.epoch_length:
            found.append(Candidate({**cyclic, "max_batch_size": _cut(question, bands)}, strategy))
    for bands in question.bands:
        found.append(Candidate({"type": "BallsInBins", **size}, strategy_of(question, bands)))
    found += [
        Candidate({"type": "MinSep", **size, "min_sep": bands}, strategy_of(question, bands))
        for bands in question.bands[1:]
    ]
    return found + _buffered(question)


def _buffered(question: Question) -> list[Candidate]:
    """BLT, a dense strategy with little state, amplified and not; it needs no bands."""
    if question.buffers == 0:
        return []
    separation = round(question.epoch_length)
    blt = {
        "type": "BLT",
        "buffers": question.buffers,
        "max_participations": math.ceil(question.steps / separation),
        "min_sep": separation,
        **_workload(question),
    }
    size = {"batch_size": question.batch_size}
    return [
        Candidate({"type": "BallsInBins", **size}, blt),
        Candidate({"type": "Shuffled", **size}, blt),
    ]


def further_separations(question: Question, candidate: Candidate) -> list[Candidate]:
    """A ``MinSep`` candidate at twice its separation, four times, … and at half an epoch."""
    start, longest = candidate.scheme["min_sep"], math.floor(question.epoch_length)
    wider = {start << i for i in range(1, 32) if start << i <= longest}
    if (half := longest // 2) > start:
        wider.add(half)
    return [
        Candidate({**candidate.scheme, "min_sep": b}, candidate.strategy) for b in sorted(wider)
    ]


def truncated_min_sep(question: Question, candidate: Candidate) -> Candidate:
    """A ``MinSep`` candidate with batches of constant size."""
    scheme = {**candidate.scheme, "max_batch_size": _cut(question, 1)}
    return Candidate(scheme, candidate.strategy)


def _cut(question: Question, cycle: int) -> int:
    """B for examples of ``cycle`` parts: the larger part decides."""
    return least_max_batch_size(
        dataset_size=math.ceil(question.dataset_size / cycle),
        probability=min(1.0, question.batch_size * cycle / question.dataset_size),
        draws=math.ceil(question.steps / cycle),
        delta=question.delta,
        multiple_of=question.physical_batch_size or 1,
    )
