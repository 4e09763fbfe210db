"""The pairs of scheme and strategy that a plan compares, as a configuration writes them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from typing import Any

from dptrain.configuration import build_scheme, build_strategy
from dptrain.mechanism import MatrixMechanism
from dptrain.planning.question import Question
from dptrain.planning.truncation import least_max_batch_size, least_min_sep_batch_size
from dptrain.sampling import MinSep, SampledRun, scheme_types
from dptrain.strategies import RunShape, Strategy, proposals

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A pair of a scheme and a strategy to be tried.

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
    """The bound strategy, optimized once for all schemes that are tried with it."""
    return build_strategy(json.loads(settings)).bind(steps)


def _call(settings: Settings, left_out: tuple[str, ...]) -> str:
    shown = [f"{k}={v}" for k, v in settings.items() if k not in ("type", *left_out)]
    return f"{settings['type']}({', '.join(shown)})"


def planned_strategies(question: Question) -> list[tuple[Settings, int]]:
    """The strategies that registered families propose for the run, each with its number of bands.

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
    return [(settings_of(each), _bands(each)) for each in proposals(shape, planned=True)]


def _bands(strategy: Strategy) -> int:
    """Bands of C where they are known for any n, else 0."""
    try:
        return strategy.bands
    except (AttributeError, ValueError):
        return 0


def settings_of(strategy: Strategy) -> Settings:
    """The ``strategy`` group of a configuration that declares this value.

    Whole numbers are stated, other fields unless they have their default.
    """
    stated = {"type"}
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        if value is not None and (isinstance(value, int) or value != field.default):
            stated.add(field.name)
    return {name: value for name, value in strategy.to_dict().items() if name in stated}


def first_candidates(question: Question) -> list[Candidate]:
    """Every planned strategy with what the registered schemes propose beside it."""
    strategies = planned_strategies(question)
    return [
        Candidate({"type": name, "batch_size": question.batch_size, **settings}, strategy)
        for name, kind in scheme_types().items()
        for strategy, bands in strategies
        for settings in kind.proposals(_run(question, bands))
    ]


def _run(question: Question, bands: int) -> SampledRun:
    return SampledRun(
        dataset_size=question.dataset_size,
        steps=question.steps,
        epoch_length=question.epoch_length,
        separation=bands,
        largest_batch=functools.partial(_cut, question),
    )


def further_separations(question: Question, candidate: Candidate) -> list[Candidate]:
    """A candidate that states ``min_sep`` at twice that, four times, … and at half an epoch."""
    start, longest = candidate.scheme["min_sep"], math.floor(question.epoch_length)
    wider = {start << i for i in range(1, 32) if start << i <= longest}
    if (half := longest // 2) > start:
        wider.add(half)
    return [
        Candidate({**candidate.scheme, "min_sep": b}, candidate.strategy) for b in sorted(wider)
    ]


def with_cut_batches(question: Question, candidate: Candidate) -> list[Candidate]:
    """A candidate with batches of constant size, if its scheme can have them."""
    kind: Any = scheme_types()[candidate.scheme["type"]]
    if "max_batch_size" not in inspect.signature(kind.for_batch_size).parameters:
        return []
    scheme = candidate.mechanism(question).scheme
    largest = _cut(question, 1)
    if isinstance(scheme, MinSep):
        largest = least_min_sep_batch_size(
            scheme, epsilon=question.epsilon, delta=question.delta,
            multiple_of=question.physical_batch_size or 1,
        )  # fmt: skip
    return [Candidate({**candidate.scheme, "max_batch_size": largest}, candidate.strategy)]


def _cut(question: Question, parts: int) -> int:
    """B for batches from so many parts that take turns: the larger part decides."""
    return least_max_batch_size(
        dataset_size=math.ceil(question.dataset_size / parts),
        probability=min(1.0, question.batch_size * parts / question.dataset_size),
        draws=math.ceil(question.steps / parts),
        delta=question.delta,
        multiple_of=question.physical_batch_size or 1,
    )
