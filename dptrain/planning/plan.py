"""The result of a comparison: its rows, the best of them, and how they are shown."""

from __future__ import annotations

import dataclasses
from typing import Any

from dptrain.accounting import Accountant
from dptrain.core import Kind, aligned, duration, size
from dptrain.mechanism import MatrixMechanism
from dptrain.planning.candidates import Candidate
from dptrain.planning.question import Question


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One pair of scheme and strategy, at the noise that the target requires.

    Attributes:
        candidate: the pair as a configuration writes it.
        mechanism: scheme, strategy and σ.
        accountant: who answers.
        automatic: whether training asks that accountant without being told to.
        kind: how σ was shown; an ESTIMATE is no guarantee.
        rmse: root mean square error of the workload's queries per unit of σ.
        bytes: of noise buffers for the question's parameters.
        seconds: a step of noise takes on this machine, ``None`` if not timed.
        eligible: whether it fits the memory and the wish for constant batches.
    """

    candidate: Candidate
    mechanism: MatrixMechanism
    accountant: Accountant
    automatic: bool
    kind: Kind
    rmse: float
    bytes: int
    seconds: float | None
    eligible: bool

    @property
    def noise_multiplier(self) -> float:
        """σ, the noise multiplier."""
        return self.mechanism.noise_multiplier

    @property
    def total_error(self) -> float:
        """RMSE·σ, the error of sums of clipped gradients, per unit of the clipping norm."""
        return self.rmse * self.noise_multiplier

    @property
    def error(self) -> float:
        """RMSE·σ/B̄, the error of the means that the optimizer gets; rows are compared by it."""
        return self.total_error / self.mechanism.scheme.expected_batch_size

    @property
    def is_estimate(self) -> bool:
        """True if nothing has been proven about σ."""
        return self.kind is Kind.ESTIMATE

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures; an estimated σ has another name than a proven one."""
        name = "noise_multiplier_estimate" if self.is_estimate else "noise_multiplier"
        return {
            "scheme": self.candidate.scheme,
            "strategy": self.candidate.strategy,
            "accountant": self.accountant.name,
            "kind": self.kind.value,
            name: self.noise_multiplier,
            "rmse": self.rmse,
            "rmse_times_sigma": self.total_error,
            "error": self.error,
            "expected_batch_size": self.mechanism.scheme.expected_batch_size,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "eligible": self.eligible,
        }


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A pair without a number, and the reason why."""

    candidate: Candidate
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        value = {"scheme": self.candidate.scheme, "strategy": self.candidate.strategy}
        return {**value, "reason": self.reason}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The rows by error, the least first, and what was left out; ``print`` it."""

    question: Question
    rows: tuple[PlanRow, ...]
    skipped: tuple[Skipped, ...]

    @property
    def best(self) -> PlanRow | None:
        """The eligible row of least error, estimated or not."""
        return next((row for row in self.rows if row.eligible), None)

    @property
    def best_proven(self) -> PlanRow | None:
        """The eligible row of least error whose σ is not an estimate."""
        return next((row for row in self.rows if row.eligible and not row.is_estimate), None)

    @property
    def gains(self) -> tuple[tuple[str, PlanRow], ...]:
        """The best row of Poisson sampling with independent noise, and of ever more choices.

        Each of the words says what may be chosen beside what the ones before allow. Rows that are
        not eligible do not count; a choice without a row is left out.
        """
        rows = [row for row in self.rows if row.eligible]
        independent = [row for row in rows if row.candidate.strategy["type"] == "Identity"]
        ordinary = [row for row in rows if not row.candidate.strategy.get("overlap")]
        steps = {
            "Poisson sampling, independent noise": [
                row for row in independent if row.candidate.scheme["type"] == "Poisson"
            ],
            "any scheme": independent,
            "correlated noise": ordinary,
            "correlation chosen for the sampling": rows,
        }
        return tuple(
            (words, min(found, key=lambda row: row.error))
            for words, found in steps.items()
            if found
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value; rows are named by their place."""
        asked = {f.name: getattr(self.question, f.name) for f in dataclasses.fields(Question)}
        asked["workload"] = self.question.workload.to_dict()
        return {
            "question": asked,
            "rows": [row.to_dict() for row in self.rows],
            "skipped": [each.to_dict() for each in self.skipped],
            "gains": [[words, self.rows.index(row)] for words, row in self.gains],
            "best": None if self.best is None else self.rows.index(self.best),
            "best_proven": (
                None if self.best_proven is None else self.rows.index(self.best_proven)
            ),
        }

    def to_markdown(self) -> str:
        """A Markdown table; ``*`` marks the best row, ``≈`` what is only estimated."""
        lines = [
            "| scheme | strategy | accountant | shown as | σ | RMSE·σ | RMSE·σ/B̄ | state | step |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            about = "≈" if row.is_estimate else ""
            shown = "ESTIMATE" if row.is_estimate else row.kind.value
            star = "* " if row is self.best else "" if row.eligible else "(not eligible) "
            took = "" if row.seconds is None else duration(row.seconds)
            lines.append(
                f"| {star}{row.candidate.scheme_name} | {row.candidate.strategy_name} "
                f"| {row.accountant.name} | {shown} | {about}{row.noise_multiplier:.4g} "
                f"| {about}{row.total_error:.4g} | {about}{row.error:.4g} | {size(row.bytes)} "
                f"| {took} |"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        q = self.question
        parts = [
            f"ε = {q.epsilon:g}, δ = {q.delta:g}, N = {q.dataset_size:,}, B̄ = {q.batch_size:g}, "
            f"n = {q.steps} steps ({q.steps / q.epoch_length:.4g} epochs); "
            f"{type(q.workload).__name__}; noise state and step for {q.parameters:,} parameters.",
            "",
            aligned(self.to_markdown(), left=4),
        ]
        if any(row.is_estimate for row in self.rows):
            parts += [
                "",
                "≈ marks ESTIMATES from a few simulated samples, good to a few percent: no "
                "guarantees. Training, or --certify, finds the certified σ.",
            ]
        if self.skipped:
            reasons: dict[str, list[str]] = {}
            for each in self.skipped:
                pair = f"{each.candidate.scheme_name} with {each.candidate.strategy_name}"
                reasons.setdefault(each.reason, []).append(pair)
            parts += ["", "Not computed:"]
            parts += [f"- {', '.join(pairs)}: {reason}" for reason, pairs in reasons.items()]
        if len(self.gains) > 1:
            parts += ["", "What each choice buys (RMSE·σ/B̄, the best so far):", *self._bought()]
        return "\n".join([*parts, "", self._verdict()])

    def _bought(self) -> list[str]:
        lines, before = [], None
        for words, row in self.gains:
            about = "≈" if row.is_estimate else ""
            less = "" if before is None else f", {1 - row.error / before:.1%} less"
            lines.append(f"- {words}: {about}{row.error:.4g}{less}")
            before = row.error
        return lines

    def _verdict(self) -> str:
        best, proven = self.best, self.best_proven
        if best is None:
            return "Nothing is eligible: allow more memory, or batches of varying size."
        text = f"Best (*): {best.candidate.scheme_name} with {best.candidate.strategy_name}"
        if not best.is_estimate:
            return f"{text}, σ = {best.noise_multiplier:.5g} ({best.kind.value})."
        text += f", σ ≈ {best.noise_multiplier:.4g} (ESTIMATE)"
        if proven is None:
            return f"{text}; nothing is proven yet."
        return (
            f"{text}. Best of those shown: {proven.candidate.scheme_name} with "
            f"{proven.candidate.strategy_name}, σ = {proven.noise_multiplier:.5g} "
            f"({proven.kind.value})."
        )
