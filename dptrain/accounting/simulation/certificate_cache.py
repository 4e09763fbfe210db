"""Certificates on disk: one JSON file each, found by the digest of what was asked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.core import checks, digest


def path_of(directory: Path, request: dict[str, Any]) -> Path:
    """File of the certificate for a request (law, ε, δ, s, version)."""
    return directory / f"certificate-{digest(request)}.json"


def attempts_of(request: dict[str, Any]) -> int:
    """Number of certificates for one purpose that a request counts; each may be wrong.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is below 1.
    """
    return checks.integer("attempts", request.get("attempts", 1))


def attempts_stored(directory: Path, request: dict[str, Any]) -> int | None:
    """The attempts that a stored certificate counts which answers a request; ``None`` if none does.

    They may be more, as of a plan that compared several certificates: its δ includes the chance
    that any of them is wrong. Of several such certificates it is the one with the fewest.
    """
    own = attempts_of(request)
    if path_of(directory, request).exists():
        return own
    asked = {**request, "attempts": own}
    same = (found for found in _requests(directory) if {**found, "attempts": own} == asked)
    return min((k for found in same if (k := attempts_of(found)) > own), default=None)


def _requests(directory: Path) -> Iterator[dict[str, Any]]:
    """The requests that the certificates in a folder answer."""
    for path in sorted(directory.glob("certificate-*.json")):
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8"))["request"])
            attempts_of(found)
            _asked(found)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # whoever asks for that file hears that it is corrupt
        yield found


def check_method(directory: Path, request: dict[str, Any]) -> None:
    """Refuse to make another certificate beside one that a method made which is gone."""
    for found in _requests(directory):
        if _asked(found) == _asked(request) and found.get("method") != request["method"]:
            raise ValueError(
                f"{path_of(directory, found)}: made by a method that dptrain no longer has; train "
                "with the version that made it, or delete it regardless of its result, and "
                "calibrate again"
            )


def _asked(request: dict[str, Any]) -> dict[str, Any]:
    """The law, ε and δ of a request, whoever draws the samples and by which method."""
    law = {key: value for key, value in dict(request["law"]).items() if key != "engine"}
    return {"law": law, **{key: request.get(key) for key in ("epsilon", "delta")}}


def refuse_former(certificate: dict[str, Any], method: dict[str, Any]) -> None:
    """Refuse a certificate that was made by another method than this one."""
    if certificate.get("request", certificate).get("method") != method:
        raise ValueError(
            "its certificate was made by a simulation that dptrain no longer has: verify it with "
            "the version that made it, or account for the mechanism again"
        )


def partial_path(directory: Path, question: dict[str, Any]) -> Path:
    """File of what is drawn of an unfinished simulation, one for all numbers of attempts."""
    question = {key: value for key, value in question.items() if key != "attempts"}
    return directory / f"partial-{digest(question)}.jsonl"


@contextlib.contextmanager
def held(path: Path, *, progress: bool) -> Iterator[None]:
    """Hold a file against other processes and threads, which wait; it is made if need be.

    The lock ends with the process, however that ends.

    Args:
        path: the file; whoever holds it may delete it.
        progress: whether to say that another one is waited for.

    Raises:
        ValueError: if the file system has no locks.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress:
                    tqdm.write(f"{path}: another process draws for it; waiting", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise ValueError(
                    f"{path}: cannot be locked ({error.strerror}), so that two processes might "
                    "make two attempts; name a folder on another file system"
                ) from error
            if _is_at(path, os.fstat(file.fileno())):  # not deleted by whoever held it before
                try:
                    yield
                finally:  # closing the file leaves it locked by a process that was forked meanwhile
                    fcntl.flock(file, fcntl.LOCK_UN)
                return


def _is_at(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), file)
    except FileNotFoundError:
        return False


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
            "can be created and written"
        ) from error


def store(directory: Path, request: dict[str, Any], certificate: dict[str, Any]) -> Path:
    """Write the certificate of a request, with a digest; returns its file."""
    path = path_of(directory, request)
    write_json(path, {**certificate, "digest": digest(certificate)})
    return path


def whole_number(text: Any) -> int:
    """A seed as certificates write it."""
    if not (isinstance(text, str) and text.isascii() and text.isdigit()):
        raise ValueError(f"seed {text!r} is not an integer")
    return int(text)


def differing_verdict(
    rows: list[dict[str, Any]], again: list[dict[str, Any]], name: str
) -> str | None:
    """The first difference of rows drawn once more from those of a file, or ``None``.

    ``name`` is that of their key. Means may differ in the last digits of another machine, decisions
    may not.
    """
    if len(rows) != len(again):
        return f"its seed gives {len(again)} verdicts instead of {len(rows)}"
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
"""A check that gives what is wrong with a certificate, or ``None``."""


def read_certificate(path: Path, first: Problem, *others: Problem) -> dict[str, Any]:
    """Read a certificate and look for what is wrong with it.

    A digest shows damage, not intent: whoever edits a file can write a fresh one. So problems
    compute all that request and mechanism determine once more. What is left to the file are its
    seed, its means and its verdicts, unless the samples are drawn again as well.

    ``first`` is about the verdicts and comes before the digest, which covers what it says nothing
    of. Of ``others`` dear ones come last.
    """
    try:
        certificate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        changed = certificate.pop("digest", None) != digest(certificate)
        wrong = first(certificate)
        if wrong is None and changed:
            wrong = "its digest does not match its contents"
        for problem in others:
            wrong = wrong or problem(certificate)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        raise ValueError(f"{path}: corrupt certificate ({wrong}); delete the file")
    return certificate


def check_request(certificate: dict[str, Any], request: dict[str, Any]) -> None:
    """Refuse a certificate that answers something else."""
    answered = certificate["request"]
    if answered == request:
        return
    if answered == {**request, "package": answered["package"]}:
        raise ValueError(
            f"its certificate was made with dptrain {answered['package']}, but this is "
            f"{request['package']}, which may draw other samples; use that version"
        )
    raise ValueError("its certificate answers another question than its ε and δ")
