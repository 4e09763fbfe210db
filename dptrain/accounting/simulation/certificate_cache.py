"""Certificates on disk: one JSON file each, found by the digest of what was asked."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.core import digest


def path_of(directory: Path, request: dict[str, Any]) -> Path:
    """File of the certificate for a request (law, ε, δ, s, version)."""
    return directory / f"certificate-{digest(request)}.json"


def attempts_of(request: dict[str, Any]) -> int:
    """How many certificates for one purpose a request counts, each of which may be wrong."""
    return int(request.get("attempts", 1))


# What of a request follows from the number of attempts.
_COUNTED = ("attempts", "samples", "threshold")


def attempts_stored(directory: Path, request: dict[str, Any]) -> int:
    """The attempts that a stored certificate counts which answers a request, or else its own.

    They may be more, as of a plan that compared several certificates: its δ includes the chance
    that any of them is wrong.
    """
    asked, own = _but_for_attempts(request), attempts_of(request)
    if path_of(directory, request).exists():
        return own
    for path in sorted(directory.glob("certificate-*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["request"]
            if attempts_of(found) > own and _but_for_attempts(found) == asked:
                return attempts_of(found)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # whoever asks for that file hears that it is corrupt
    return own


def _but_for_attempts(request: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in request.items() if name not in _COUNTED}


def partial_path(directory: Path, request: dict[str, Any], share: str = "") -> Path:
    """File of what is done of it; ``share`` ``"i/k"`` where several processes share the work."""
    suffix = f".{share.replace('/', '-of-')}" if share else ""
    return directory / f"partial-{digest(request)}{suffix}.json"


def chosen_noise(rows: list[dict[str, Any]], ceiling: float) -> float:
    """The smallest σ such that it and all larger ones accept; ``ceiling`` needs no verdict."""
    noise = ceiling
    for row in reversed(rows):
        if not row["accepted"]:
            break
        noise = row["noise_multiplier"]
    return float(noise)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write atomically, so that an interruption leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def check_folder(argument: str, directory: Path) -> None:
    """Find out before any sampling that certificates cannot be kept in a folder.

    Raises:
        ValueError: naming the argument, if the folder cannot be made or written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(
            f"{argument} {directory}: cannot write there ({error.strerror}); name a folder that "
            "can be made and written"
        ) from error


def store(directory: Path, request: dict[str, Any], certificate: dict[str, Any]) -> Path:
    """Write the certificate of a request, with a digest; returns its file."""
    path = path_of(directory, request)
    write_json(path, {**certificate, "digest": digest(certificate)})
    return path


def whole_number(text: Any) -> int:
    """A seed as certificates write it.

    Raises:
        ValueError: if it is something else.
    """
    if not (isinstance(text, str) and text.isascii() and text.isdigit()):
        raise ValueError(f"seed {text!r} is no whole number")
    return int(text)


def differing_verdict(
    rows: list[dict[str, Any]], again: list[dict[str, Any]], name: str
) -> str | None:
    """Where rows drawn once more differ from those of a file, or ``None``; ``name`` of their key.

    Means may differ in the last digits of another machine, decisions may not.
    """
    if len(rows) != len(again):
        return f"its seed gives {len(again)} verdicts, not {len(rows)}"
    for row, fresh in zip(rows, again, strict=True):
        pairs = [(row[side], fresh[side]) for side in DIRECTIONS]
        same = row[name] == fresh[name] and row["accepted"] is fresh["accepted"]
        if not same or any(_differ(*pair) for pair in pairs):
            return f"its seed gives other verdicts at {name} = {row[name]}"
    return None


def _differ(side: dict[str, Any] | None, fresh: dict[str, Any] | None) -> bool:
    if side is None or fresh is None:
        return side is not fresh
    if (side["accepted"], side["samples"]) != (fresh["accepted"], fresh["samples"]):
        return True
    if side["mean"] is None or fresh["mean"] is None:
        return side["mean"] is not fresh["mean"]
    return not math.isclose(side["mean"], fresh["mean"], rel_tol=1e-6, abs_tol=1e-300)


Problem = Callable[[dict[str, Any]], str | None]
"""What is wrong with a certificate, or ``None``."""


def load(directory: Path, request: dict[str, Any], *problems: Problem) -> dict[str, Any] | None:
    """The stored certificate for a request, or ``None`` if there is none.

    A digest shows damage, not intent: whoever edits a file can write a fresh one. So ``problems``
    compute all that request and mechanism determine once more. What is left to the file are its
    seed, its means and its verdicts, unless the samples are drawn again as well.

    Raises:
        ValueError: if the file is corrupt, or a partial certificate.
    """
    path = path_of(directory, request)
    return read_certificate(path, *problems) if path.exists() else None


def read_certificate(path: Path, *problems: Problem) -> dict[str, Any]:
    """Read a certificate and look for what is wrong with it.

    Args:
        path: of the file.
        problems: the first is about the verdicts and comes before the digest, which covers what
            they say nothing of; by default ``unsupported_noise``. Dear ones come last.

    Raises:
        ValueError: if the file is corrupt, lacks a direction, or is a partial certificate.
        FileNotFoundError: if there is none.
    """
    try:
        certificate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        partial = str(certificate.get("what", "")).startswith("partial certificate")
        first, *others = problems or (unsupported_noise,)
        changed = certificate.pop("digest", None) != digest(certificate)
        wrong = None if partial else first(certificate)
        if wrong is None and changed:
            wrong = "its digest does not match its contents"
        for problem in [] if partial else others:
            wrong = wrong or problem(certificate)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        partial, wrong = False, f"{type(error).__name__}: {error}"
    if partial:
        raise ValueError(
            f"{path}: not a certificate but a partial one, which states no noise multiplier "
            f"({certificate.get('progress')}); complete it with the call that began it"
        )
    if wrong:
        raise ValueError(f"{path}: corrupt certificate ({wrong}); delete the file")
    return certificate


def check_request(certificate: dict[str, Any], *requests: dict[str, Any]) -> None:
    """Refuse a certificate that answers none of these requests.

    Raises:
        ValueError: saying whether only the version of the package is another.
    """
    answered = certificate["request"]
    if answered in requests:
        return
    for each in requests:
        if answered == {**each, "package": answered["package"]}:
            raise ValueError(
                f"its certificate was made with dptrain {answered['package']}, and here is "
                f"{each['package']}, which may draw otherwise; use that version"
            )
    raise ValueError("its certificate answers another question: its request is not that of ε and δ")


def unsupported_noise(certificate: dict[str, Any]) -> str | None:
    """Why verdicts on a grid of σ do not support the σ that was chosen of it, or ``None``."""
    rows, request = certificate["grid"], certificate["request"]
    for row in rows:
        for direction in ("remove", "add"):
            if not isinstance(row.get(direction), dict):
                return f"σ = {row['noise_multiplier']} has no verdict in the {direction} direction"
        if not isinstance(row["accepted"], bool):
            return f"σ = {row['noise_multiplier']} is neither accepted nor rejected"
        if row["accepted"]:
            for direction in ("remove", "add"):
                side = row[direction]
                if side["accepted"] is not True or side["samples"] != request["samples"]:
                    return f"the {direction} direction was not verified with all samples"
                if not side["mean"] <= request["threshold"]:
                    return f"the mean in the {direction} direction is above the threshold"
    noises = [row["noise_multiplier"] for row in rows]
    ceiling = certificate["ceiling"]["noise_multiplier"]
    if noises != sorted(noises) or any(not 0.0 < noise < ceiling for noise in noises):
        return "its grid does not ascend below its ceiling"
    if chosen_noise(rows, ceiling) != certificate["noise_multiplier"]:
        return "its verdicts do not support its noise multiplier"
    return None
