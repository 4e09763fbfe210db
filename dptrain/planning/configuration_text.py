"""A row of a plan as a configuration, the YAML that the commands and a training loop read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.planning.plan import PlanRow
from dptrain.planning.question import Question

CERTIFICATES = "certificates"


def training_yaml(
    question: Question,
    row: PlanRow,
    *,
    command: str,
    certificates: str | None = None,
    more: Mapping[str, Any] | None = None,
    usage: str | None = None,
) -> str:
    """The text of a configuration: scheme, strategy, target and steps.

    It states the target (ε, δ) and never the σ of the plan: training finds its own, with a proof.
    What else a training loop reads from such a file (its optimizer, say) is for that loop to add:
    dptrain has no word for it.

    Args:
        question: the run.
        row: the pair to train with.
        command: how the plan was made, for the comment on top.
        certificates: folder of certificates of simulated accounting.
        more: entries of the training loop's own.
        usage: the command that trains with the file, for the comment on top.
    """
    simulated = isinstance(row.accountant, SimulatedAccountant)
    what = "an ESTIMATE without proof" if row.is_estimate else row.kind.value
    tree: dict[str, Any] = {
        "scheme": row.candidate.scheme,
        "strategy": row.candidate.strategy,
        "privacy": {
            "epsilon": question.epsilon,
            "delta": question.delta,
            "noise_multiplier": None,
            "accountant": None if row.automatic else row.accountant.name,
            "certificates": (certificates or CERTIFICATES) if simulated else None,
        },
        "steps": question.steps,
        "epochs": None,
        **(more or {}),
    }
    comments = [
        f"# {command}",
        f"# Predicted: σ {'≈' if row.is_estimate else '='} {row.noise_multiplier:.5g} ({what}, "
        f"{row.accountant.name}), RMSE·σ {row.total_error:.5g}.",
        f"# For N = {question.dataset_size}: training finds σ anew for the data that it is given.",
    ]
    if usage is not None:
        comments += ["#", f"#   {usage}"]
    return "\n".join([*comments, "", *_lines(tree, ""), ""])


def _lines(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return lines


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # YAML 1.1 takes 1e-05 for text and 1.0e-05 for a number.
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text
