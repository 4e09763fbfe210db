"""Figures, tables and mistakes as a terminal shows them."""

from __future__ import annotations

import difflib
import pathlib
import traceback
from collections.abc import Iterable

_OURS = pathlib.Path(__file__).parents[1]  # whose texts hold no data
_INSTALLED = {"site-packages", "dist-packages"}


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """``"did you mean NAME? "`` for the nearest of the known words; empty if none is near.

    Args:
        word: what was written.
        known: what could have been meant.
        prefix: put before the nearest: the group that the words are fields of, say.
    """
    alike = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), list(alike), n=1)
    return f"did you mean {prefix}{alike[near[0]]}? " if near else ""


def in_words(error: BaseException) -> str:
    """An error's message; of an operating system's the file and what is wrong, not its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    what = error.strerror[:1].lower() + error.strerror[1:]
    return what if error.filename is None else f"{error.filename}: {what}"


def named_error(error: BaseException) -> str:
    """An error of the user's code without its text, which may hold their data; ours with it.

    Its type, and where in the user's files it was raised, outside the installed packages if it
    passed through any: ``"ValueError in forward (net.py, line 12)"``.
    """
    kind, frames = type(error).__name__, traceback.extract_tb(error.__traceback__)
    if not frames:
        return kind
    if _OURS in pathlib.Path(frames[-1].filename).parents:
        return f"{kind}: {error}"
    own = [frame for frame in frames if not _INSTALLED & set(pathlib.Path(frame.filename).parts)]
    last = (own or frames)[-1]
    return f"{kind} in {last.name} ({pathlib.Path(last.filename).name}, line {last.lineno})"


def capital(text: str) -> str:
    """A text whose first letter, if it is an ASCII one, is a capital."""
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def duration(seconds: float) -> str:
    """A time in three digits, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def size(count: float) -> str:
    """A size in three digits, in bytes, kB, MB, GB or TB of 1000 each."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def aligned(markdown: str, left: int = 1) -> str:
    """A Markdown table as plain columns, the first ``left`` of them aligned to the left."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()
    ]
    del cells[1]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
