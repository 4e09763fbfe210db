"""Families side by side: error at fixed privacy, memory and time of their noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from dptrain.core import aligned, checks, duration, size
from dptrain.noise import noise_stream
from dptrain.planning.footprints import history_bytes
from dptrain.strategies import (
    PREFIX_SUMS,
    RunShape,
    Strategy,
    Workload,
    checked_workload,
    proposals,
)

_TIMED_BYTES = 1 << 29  # of buffers while a step is timed; larger ones are scaled from this size
_TIMED_STEPS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyRow:
    """One strategy of the table.

    Attributes:
        strategy: the value, bound to n.
        name: how a user writes it, for instance ``BandMF(bands=16)``.
        rmse: root mean square error of the workload's queries per unit of σ.
        max_error: error of the worst query per unit of σ.
        sensitivity: of C for the participations of the table.
        exact: whether that sensitivity is the maximum itself or an upper bound on it.
        bytes: of noise buffers for the table's parameter count.
        seconds: a step of noise takes on this machine, or ``None`` if it was not timed.
        timed_parameters: parameter count that was timed; ``seconds`` is scaled up from it.
    """

    strategy: Strategy
    name: str
    rmse: float
    max_error: float
    sensitivity: float
    exact: bool
    bytes: int
    seconds: float | None
    timed_parameters: int | None

    @property
    def error(self) -> float:
        """RMSE × sensitivity: the error at a fixed privacy guarantee without amplification."""
        return self.rmse * self.sensitivity

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures; the strategy by its value's hash, coefficients left out."""
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value["strategy"] = self.strategy.coefficient_hash
        return {**value, "error": self.error}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTable:
    """The result of ``compare_strategies``: ``print`` it, or read its ``rows``."""

    steps: int
    max_participations: int
    min_sep: int
    parameters: int
    workload: Workload
    rows: tuple[StrategyRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value["workload"] = self.workload.to_dict()
        value["rows"] = [row.to_dict() for row in self.rows]
        return value

    def to_markdown(self) -> str:
        """A Markdown table, the smallest RMSE × sensitivity first."""
        lines = [
            "| strategy | RMSE | sensitivity | RMSE × sens. | max × sens. | buffers | step |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            mark = "" if row.exact else " (bound)"
            took = "" if row.seconds is None else duration(row.seconds)
            lines.append(
                f"| {row.name} | {row.rmse:.4g} | {row.sensitivity:.4g}{mark} | {row.error:.4g} "
                f"| {row.max_error * row.sensitivity:.4g} | {size(row.bytes)} | {took} |"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        text = aligned(self.to_markdown())
        scaled = [row for row in self.rows if row.timed_parameters not in (None, self.parameters)]
        notes = [
            f"n = {self.steps} steps, at most {self.max_participations} participation(s) at least "
            f"{self.min_sep} steps apart; {type(self.workload).__name__}; errors per unit of noise "
            f"multiplier over sensitivity. Buffers and step for {self.parameters:,} parameters."
        ]
        if scaled:
            notes.append("Steps of larger buffers were timed on fewer parameters and scaled up.")
        return "\n".join([text, "", *notes])


def compare_strategies(
    strategies: Sequence[Strategy] | None = None,
    *,
    steps: int,
    epochs: int | None = None,
    max_participations: int | None = None,
    min_sep: int | None = None,
    bands: Sequence[int] = (1, 4, 16, 64),
    workload: Workload = PREFIX_SUMS,
    parameters: int = 10_000_000,
    timed: bool = True,
    dense: bool = False,
    progress: bool = True,
) -> StrategyTable:
    """Compare strategies for a run: error at fixed privacy, memory and time of the noise.

    The error is RMSE × sensitivity, which is what counts where the guarantee is that of one
    Gaussian mechanism (no amplification by sampling). With amplification, compare RMSE × σ at the
    σ that the accountant needs.

    Args:
        strategies: values to compare; ``None`` compares what every registered family
            proposes.
        steps: n.
        epochs: an example takes part once in each of so many equal parts of the run: at most
            ``epochs`` participations, at least ``steps // epochs`` steps apart.
        max_participations, min_sep: the same stated directly; one participation by default.
        bands: numbers of bands of the banded families.
        workload: which queries count; prefix sums by default.
        parameters: size of the model, for memory and time.
        timed: measure the time of a step of noise.
        dense: include the families that are optimized entry by entry, which takes much longer.
        progress: show a progress bar.

    Returns:
        A ``StrategyTable``, the smallest RMSE × sensitivity first.

    Raises:
        ValueError: for contradicting or impossible arguments.
    """
    steps = checks.steps(steps)
    parameters = checks.integer("parameters", parameters)
    m, b = _participations(steps, epochs, max_participations, min_sep)
    checks.flag("timed", timed)
    checks.flag("dense", dense)
    checked_workload(workload).check(steps)
    if strategies is None:
        strategies = proposals(
            RunShape(
                steps=steps,
                bands=bands,
                max_participations=m,
                min_sep=b,
                workload=workload,
                dense=dense,
            )
        )
    for strategy in strategies:
        if not isinstance(strategy, Strategy):
            raise ValueError(f"strategies has {strategy!r}: give values such as BandMF(bands=16)")
    rows = []
    bar = tqdm(strategies, disable=not progress, leave=False, unit="strategy")
    for strategy in bar:
        bar.set_description(written(strategy))
        bound = strategy.bind(steps)
        schedule = {"steps": steps, "max_participations": m, "min_sep": b}
        buffers, seconds, timed_on = noise_cost(bound, steps, parameters, timed)
        rows.append(
            StrategyRow(
                strategy=bound,
                name=written(strategy),
                rmse=bound.rmse(steps, workload),
                max_error=bound.max_error(steps, workload),
                sensitivity=bound.sensitivity(**schedule),
                exact=bound.sensitivity_is_exact(**schedule),
                bytes=buffers,
                seconds=seconds,
                timed_parameters=timed_on,
            )
        )
    return StrategyTable(
        steps=steps,
        max_participations=m,
        min_sep=b,
        parameters=parameters,
        workload=workload,
        rows=tuple(sorted(rows, key=lambda row: row.error)),
    )


def _participations(
    steps: int, epochs: int | None, max_participations: int | None, min_sep: int | None
) -> tuple[int, int]:
    if epochs is not None:
        epochs = checks.integer("epochs", epochs)
        if max_participations is not None or min_sep is not None:
            raise ValueError(
                f"epochs={epochs} and max_participations={max_participations}, min_sep={min_sep} "
                "are both given: give epochs, or the other two"
            )
        if epochs > steps:
            raise ValueError(f"epochs={epochs} exceeds steps={steps}: use at most {steps}")
        return epochs, steps // epochs
    m = (
        1
        if max_participations is None
        else checks.integer("max_participations", max_participations)
    )
    b = steps if min_sep is None and m == 1 else min_sep
    if b is None:
        raise ValueError(
            f"max_participations={m} without min_sep: set min_sep, the least number of steps "
            "between two participations"
        )
    b = checks.integer("min_sep", b)
    if m > math.ceil(steps / b):
        raise ValueError(
            f"max_participations={m} at least min_sep={b} steps apart do not fit into "
            f"steps={steps}: use at most {math.ceil(steps / b)}"
        )
    return m, b


def written(strategy: Strategy) -> str:
    """The constructor call without defaults, long values and what describes the run."""
    shown = []
    for field in dataclasses.fields(strategy):  # type: ignore[arg-type]
        value = getattr(strategy, field.name)
        if field.name in ("max_participations", "min_sep", "steps"):
            continue
        if field.name == "buffers" or (value != field.default and isinstance(value, int | float)):
            shown.append(f"{field.name}={value}")
        elif value != field.default and isinstance(value, str) and len(value) < 20:
            shown.append(f"{field.name}={value!r}")
    return f"{type(strategy).__name__}({', '.join(shown)})"


def noise_cost(
    strategy: Strategy, steps: int, parameters: int, timed: bool
) -> tuple[int, float | None, int | None]:
    """Cost of a bound strategy's noise: (bytes of buffers, seconds a step, parameters timed).

    The seconds are those for ``parameters``, scaled up if fewer were timed, and ``None`` unless
    ``timed``.
    """
    per_parameter = history_bytes(strategy, steps=steps)
    total = round(per_parameter * parameters)
    if not timed:
        return total, None, None
    count = parameters if total <= _TIMED_BYTES else max(1024, int(_TIMED_BYTES / per_parameter))
    sums = [torch.zeros(count)]
    stream = noise_stream(strategy, steps=steps, like=sums, seed=0)
    # From the middle of the run, since a step of a dense matrix reads all rows so far.
    stream.load_state_dict({**stream.state_dict(), "step": steps // 2})
    times = []
    for _ in range(min(steps - steps // 2, _TIMED_STEPS)):
        start = time.perf_counter()
        stream.release(sums, 1.0)
        times.append(time.perf_counter() - start)
    return total, statistics.median(times) * parameters / count, count
