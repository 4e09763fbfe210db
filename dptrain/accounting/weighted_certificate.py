"""Certificates of weighted samples on disk, so that one attempt serves for all that ask again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dptrain.accounting.certificate_cache import path_of, without_digest
from dptrain.accounting.simulation import DIRECTIONS
from dptrain.accounting.weighted_verdicts import Rule


def chosen_point(rows: list[dict[str, Any]]) -> float | None:
    """The last accepted point; ``None`` leaves only what needs no verdict."""
    accepted = [row["point"] for row in rows if row["accepted"]]
    return float(accepted[-1]) if accepted else None


def load_certificate(directory: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The stored certificate for this request, or ``None`` if there is none.

    Raises:
        ValueError: if the file is corrupt: no JSON, another request, or a noise multiplier that its
            own verdicts do not support.
    """
    path = path_of(directory, request)
    if not path.exists():
        return None
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        certificate, changed = without_digest(stored)
        problem = _problem(certificate, request) or changed
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise ValueError(f"{path}: corrupt certificate ({problem}); delete the file")
    return certificate


def _problem(certificate: dict[str, Any], request: dict[str, Any]) -> str | None:
    if certificate["request"] != request:
        return "it answers another request"
    rows, ceiling = certificate["grid"], certificate["ceiling"]
    violated, failure = certificate["violated"], certificate["failure_probability"]
    if not violated + failure * (1.0 - violated) <= request["delta"]:
        return "what it proves is above the δ asked for"
    points = [row["point"] for row in rows]
    if points != sorted(set(points)) or any(point <= 0 for point in points):
        return "its grid does not descend from its ceiling"
    for number, row in enumerate(rows):
        if row["accepted"] is not True:
            if number + 1 < len(rows):
                return "it goes on after a rejection"
            continue
        for direction in DIRECTIONS:
            if wrong := _unsupported(row.get(direction), Rule(violated, failure, 1 << 62)):
                return f"the {direction} direction of its point {row['point']} {wrong}"
    depth = chosen_point(rows) or 0.0
    if certificate["noise_multiplier"] != ceiling / certificate["step"] ** depth:
        return "its verdicts do not support its noise multiplier"
    return None


def _unsupported(side: dict[str, Any] | None, rule: Rule) -> str | None:
    """Why an accepted direction should not have been, or ``None``."""
    if not isinstance(side, dict) or side["accepted"] is not True:
        return "has no verdict"
    if side["ceiling"] <= rule.violated:
        return None
    allowed = rule.threshold(side["ceiling"], side["samples"])
    if not 0.0 <= side["mean"] <= allowed * (1.0 + 1e-9):
        return "has a mean above what its samples support"
    return None
