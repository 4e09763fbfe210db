"""Whether a saved state belongs to this run."""

from __future__ import annotations

from typing import Any

from dptrain.guarantee import Guarantee
from dptrain.mechanism import MatrixMechanism

FIELDS = {
    "mechanism",
    "mechanism_hash",
    "settings",
    "steps_executed",
    "guarantees",
    "notes",
    "module",
    "optimizer",
    "max_grad_norm",
    "schedulers",
    "ledger",
    "private",
}

SINCE = {"clipping": {"type": "Flat"}}  # settings that older checkpoints lack, and what they were


def check_fields(state: dict[str, Any]) -> None:
    """Refuse what is no state of a private run.

    Raises:
        ValueError: naming what is missing.
    """
    if missing := sorted(FIELDS - set(state)):
        raise ValueError(f"the checkpoint lacks {missing}; it is no state of a private run")


def check_settings(saved: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse a state that was written under other settings.

    Raises:
        ValueError: naming those that differ, with both values.
    """
    saved = {**SINCE, **saved}
    names = [n for n in sorted({*settings, *saved}) if saved.get(n) != settings.get(n)]
    if names:
        there = ", ".join(f"{n}={saved.get(n)}" for n in names)
        here = ", ".join(f"{n}={settings.get(n)}" for n in names)
        raise ValueError(
            f"the checkpoint was written with {there}, this run has {here}: give make_private "
            "what the checkpoint has"
        )


def check_guarantee(guarantee: Guarantee, mechanism: MatrixMechanism) -> None:
    """Refuse a saved guarantee that is about something else than this run.

    Raises:
        ValueError: naming the fields that differ.
    """
    about = {
        "mechanism_hash": mechanism.hash,
        "noise_multiplier": mechanism.noise_multiplier,
        "scheme": mechanism.scheme.published(),
        "strategy_hash": mechanism.strategy.coefficient_hash,
        "unit": mechanism.scheme.unit,
        "steps_planned": mechanism.steps,
    }
    if wrong := [name for name, value in about.items() if getattr(guarantee, name) != value]:
        raise ValueError(
            f"the checkpoint holds a guarantee of another mechanism (its {', '.join(wrong)}): "
            "it was changed after it was written; go on from one that was not"
        )
