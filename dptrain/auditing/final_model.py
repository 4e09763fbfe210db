"""Audits of the final model alone, by the loss of examples that were in or out by coins."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy.typing as npt

from dptrain.auditing.conformity import verdict
from dptrain.auditing.counting import StatedCurve
from dptrain.auditing.one_run import OneRun, audit_one_run
from dptrain.core import checks

_VERDICTS = 2  # ε, and the curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalModelAudit:
    """The evidence of one final model, beside what is stated of it.

    Attributes:
        canaries: m, examples that were in or out by a fair coin.
        others: the other examples of the data set.
        epsilon: the stated ε.
        delta: the stated δ.
        one_run: the bound by guesses, with the chance of as many right ones if the whole stated
            curve is true.
        confidence: chance that a run whose statement is true is not refuted.
    """

    canaries: int
    others: int
    epsilon: float
    delta: float
    one_run: OneRun
    confidence: float

    @property
    def violations(self) -> tuple[str, ...]:
        """The findings that contradict the statement, in words; empty if nothing does."""
        run, found = self.one_run, []
        if run.epsilon_lower > self.epsilon:
            found.append(
                f"ε ≥ {run.epsilon_lower:.4g} by the final model, stated is {self.epsilon:.4g}"
            )
        if run.curve_p_value is not None and run.curve_p_value < run.alpha:
            found.append(
                f"{run.canaries} canaries are told apart better by the final model than the stated "
                f"curve allows (p = {run.curve_p_value:.2g})"
            )
        return tuple(found)

    @property
    def passed(self) -> bool:
        """True if nothing contradicts the statement; no proof that it is true."""
        return not self.violations

    def __str__(self) -> str:
        run = self.one_run
        lines = [
            f"stated:       ε = {self.epsilon:.6g} at δ = {self.delta:.4g}",
            f"final model:  {self.canaries} canaries, in or out by coins, were trained on among "
            f"{self.others} other examples",
            f"by its loss:  ε at least {run.epsilon_lower:.4g} ({run.correct} of {run.guesses} "
            f"guesses right; all right would show {run.most:.4g})",
        ]
        if run.curve_p_value is not None:
            lines.append(
                f"  under the whole stated curve so many are right with p ≤ {run.curve_p_value:.2g}"
            )
        return "\n".join([*lines, *verdict(self.violations, self.confidence)])

    def to_json(self) -> str:
        """JSON text of all fields, the violations and the verdict."""
        value: dict[str, Any] = dataclasses.asdict(self)
        value |= {"violations": list(self.violations), "passed": self.passed}
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def audit_final_model(
    scores: npt.ArrayLike,
    included: npt.ArrayLike,
    *,
    epsilon: float,
    delta: float,
    curve: StatedCurve | None = None,
    others: int = 0,
    confidence: float = 0.99,
) -> FinalModelAudit:
    """Audit a final model by a score of each example that was in or out by a coin.

    It needs no access to the run. Any score is sound that depends on the model and the canary
    alone; the usual one is the loss of the untrained model less that of the final one.

    Args:
        scores: larger for what seems to be in, shape (m,).
        included: whether each was in, by independent fair coins, shape (m,).
        epsilon: the stated ε.
        delta: the stated δ.
        curve: all of δ(ε) as stated.
        others: examples in the run that are not among these, which the audit tells.
        confidence: chance that a run whose statement is true passes.

    Raises:
        ValueError: if an argument is out of range, or the shapes differ.
    """
    epsilon = checks.number("epsilon", epsilon, minimum=0)
    delta = checks.number("delta", delta, above=0, below=1)
    others = checks.integer("others", others, minimum=0)
    confidence = checks.number("confidence", confidence, above=0, below=1)
    alpha = (1.0 - confidence) / _VERDICTS
    found = audit_one_run(scores, included, delta=delta, alpha=alpha, curve=curve)
    return FinalModelAudit(
        canaries=found.canaries,
        others=others,
        epsilon=epsilon,
        delta=delta,
        one_run=found,
        confidence=confidence,
    )
