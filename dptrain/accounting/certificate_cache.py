"""Certificates on disk: one JSON file each, found by the digest of what was asked."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from dptrain.registry import digest


def path_of(directory: Path, request: dict[str, Any]) -> Path:
    """File of the certificate for a request (law, ε, δ, s, version)."""
    return directory / f"certificate-{digest(request)}.json"


def chosen_noise(rows: list[dict[str, Any]], ceiling: float) -> float:
    """The smallest σ such that it and all larger ones accept; ``ceiling`` needs no verdict."""
    noise = ceiling
    for row in reversed(rows):
        if not row["accepted"]:
            break
        noise = row["noise_multiplier"]
    return float(noise)


def store(directory: Path, request: dict[str, Any], certificate: dict[str, Any]) -> None:
    """Write atomically, so that an interrupted run leaves no half certificate."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(certificate, indent=2, sort_keys=True, allow_nan=False)
    handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path_of(directory, request))


def load(directory: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The stored certificate for this request, or ``None`` if there is none.

    Raises:
        ValueError: if the file is corrupt: no JSON, another request, or a σ that its own verdicts
            do not support.
    """
    path = path_of(directory, request)
    if not path.exists():
        return None
    try:
        certificate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        same = certificate["request"] == request
        sound = _is_sound(certificate)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: corrupt certificate ({error}); delete the file") from error
    if not same or not sound:
        raise ValueError(
            f"{path}: corrupt certificate (its verdicts do not support its noise multiplier, or it "
            "answers another request); delete the file"
        )
    return certificate


def _is_sound(certificate: dict[str, Any]) -> bool:
    rows, request = certificate["grid"], certificate["request"]
    for row in rows:
        if row["accepted"]:
            for direction in ("remove", "add"):
                if row[direction]["samples"] != request["samples"]:
                    return False
                if not row[direction]["mean"] <= request["threshold"]:
                    return False
    noise = chosen_noise(rows, certificate["ceiling"]["noise_multiplier"])
    return bool(noise == certificate["noise_multiplier"])
