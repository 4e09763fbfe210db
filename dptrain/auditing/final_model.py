"""Audits of the final model alone, by the loss of examples that were in or out by coins."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy.typing as npt

from dptrain.auditing.counting import StatedCurve
from dptrain.auditing.one_run import OneRunAudit, audit_one_run
from dptrain.core import checks

_VERDICTS = 2  # ε, and the curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalModelAudit(OneRunAudit):
    """The evidence of one final model, beside what is stated of it."""

    seen_by: ClassVar[str] = "the final model"

    def __str__(self) -> str:
        lines = [
            f"stated:       ε = {self.epsilon:.6g} at δ = {self.delta:.4g}",
            f"final model:  {self.canaries} canaries, in or out by coins, were trained on among "
            f"{self.others} other examples",
        ]
        return "\n".join([*lines, *self.guesses("by its loss"), *self.verdict])


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
