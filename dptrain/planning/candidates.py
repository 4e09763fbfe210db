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
from dptrain.strategies import RunShape, Strategy, proposals

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


def planned_strategies(question: Question) -> list[tuple[Settings, int]]:
    """What the registered families propose for the run, each with its number of bands.

    A family whose bands depend on n is taken for a dense one; it is not bound for that, which may
    take a while.
    """
    separation = round(question.epoch_length)
    shape = RunShape(
        steps=question.steps,
        bands=question.bands,
        max_participations=math.ceil(question.steps / separation),
        min_sep=separation,
        workload=question.workload,
        buffers=question.buffers,
    )
    return [(_settings(each), _bands(each)) for each in proposals(shape, planned=True)]


def _bands(strategy: Strategy) -> int:
    """Bands of C where they are known for any n, else 0."""
    try:
        return strategy.bands
    except (AttributeError, ValueError):
        return 0


def _settings(strategy: Strategy) -> Settings:
    """The ``strategy`` group of a configuration that declares this value.

    Numbers are stated, other fields unless they have their default.
    """
    stated = {"type"}
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        if value is not None and (isinstance(value, int | float) or value != field.default):
            stated.add(field.name)
    return {name: value for name, value in strategy.to_dict().items() if name in stated}


def first_candidates(question: Question) -> list[Candidate]:
    """Every planned strategy with the schemes that suit it, the separation being its bands.

    Independent noise goes with Poisson sampling; a banded strategy with schemes that keep as many
    steps between two participations as it has bands; balls-in-bins takes all. A dense strategy is
    also compared with epochs in random order.
    """
    size = {"batch_size": question.batch_size}
    strategies = planned_strategies(question)
    found: list[Candidate] = []
    for strategy, bands in strategies:
        if bands == 1:
            poisson = {"type": "Poisson", **size}
            found.append(Candidate(poisson, strategy))
            cut = {"max_batch_size": _cut(question, 1)}
            found.append(Candidate({**poisson, **cut}, strategy))
        if bands > 1:
            cyclic = {"type": "CyclicPoisson", **size, "cycle": bands}
            found.append(Candidate(cyclic, strategy))
            if bands <= question.epoch_length:
                cut = {"max_batch_size": _cut(question, bands)}
                found.append(Candidate({**cyclic, **cut}, strategy))
    found += [Candidate({"type": "BallsInBins", **size}, strategy) for strategy, _ in strategies]
    found += [
        Candidate({"type": "MinSep", **size, "min_sep": bands}, strategy)
        for strategy, bands in strategies
        if bands > 1
    ]
    found += [
        Candidate({"type": "Shuffled", **size}, strategy)
        for strategy, bands in strategies
        if bands == 0
    ]
    return found


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
