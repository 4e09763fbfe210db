"""Blocks of code in a page of Markdown, and the comments that say how they run.

The convention is described in docs/contributing/writing.md.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)")
_COMMENT = re.compile(r"^[ \t]*<!--\s*snippet:\s*(?P<text>.*)$")
_MARKS = re.compile(r"slow|prints|raises \w+|needs [\w.]+|not run: .+")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or the code of a ``setup`` comment (``hidden``)."""

    language: str
    code: str
    line: int  # of its first line of code, from 1
    marks: tuple[str, ...] = ()
    hidden: bool = False

    def marked(self, word: str) -> str | None:
        """The text after ``word`` in the mark that begins with it; ``None`` if there is none."""
        for mark in self.marks:
            if mark.split(maxsplit=1)[0] == word:
                return mark[len(word) :].strip()
        return None


def sources(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The README and its neighbors, and every page under docs/."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    """The blocks of a page in order.

    Raises:
        ValueError: if a comment or a block does not end, or a comment says something unknown.
    """
    found: list[Block] = []
    marks: list[str] = []
    lines = list(enumerate(text.splitlines(), start=1))
    rest = iter(lines)
    for number, line in rest:
        if comment := _COMMENT.match(line):
            said = comment["text"]
            body = [said] if "-->" in said else [said, *_until("-->", rest, number)]
            inside = "\n".join(body).partition("-->")[0]
            word, _, code = inside.partition("\n")
            if word.strip() == "setup":
                found.append(Block("python", textwrap.dedent(code), number + 1, hidden=True))
            elif _MARKS.fullmatch(" ".join(inside.split())):
                marks.append(" ".join(inside.split()))
            else:
                raise ValueError(
                    f"line {number}: the comment 'snippet: {inside.strip()}' means nothing; "
                    "docs/contributing/writing.md lists what does"
                )
        elif fence := _FENCE.match(line):
            closing = re.compile(rf"^[ \t]*{re.escape(fence['ticks'])}[`~]*[ \t]*$")
            body = list(_until(closing, rest, number))
            code = textwrap.dedent("\n".join(body[:-1]))
            found.append(Block(fence["language"], code, number + 1, tuple(marks)))
            marks = []
        elif line.strip() and marks:
            raise ValueError(f"line {number}: no block follows the comment '{marks[-1]}'")
    return found


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """The page with ``change`` made to all parts of it that are no fenced block."""
    parts: list[tuple[bool, list[str]]] = [(False, [])]
    ticks = None
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if ticks is None and fence:
            ticks = fence["ticks"]
            parts.append((True, [line]))
        elif ticks is not None:
            parts[-1][1].append(line)
            if re.match(rf"^[ \t]*{re.escape(ticks)}[`~]*[ \t]*$", line):
                ticks = None
                parts.append((False, []))
        else:
            parts[-1][1].append(line)
    return "".join("".join(part) if code else change("".join(part)) for code, part in parts)


def without_comments(text: str) -> str:
    """The page without the comments that say how snippets run."""
    comment = re.compile(r"^[ \t]*<!--\s*snippet:.*?-->[ \t]*\n?", re.DOTALL | re.MULTILINE)
    return outside_of_code(text, lambda part: comment.sub("", part))


_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\ssrc=["']?(https?:)?//"""
    r"""|<link\b(?![^>]*\brel=["']?(?:canonical|next|prev|alternate))[^>]*\shref=["']?(https?:)?//"""
    r"""|url\(["']?(https?:)?//|@import\s*["'](https?:)?//"""
)


def loads_from_elsewhere(text: str) -> bool:
    """True if a page or a style sheet, as built, requests something from another server."""
    return _LOADED.search(text) is not None


def _until(
    end: str | re.Pattern[str], lines: Iterator[tuple[int, str]], opened: int
) -> Iterator[str]:
    """Lines up to the one that ends what was opened, with that one."""
    for _, line in lines:
        yield line
        if end in line if isinstance(end, str) else end.match(line):
            return
    raise ValueError(f"line {opened}: what begins here does not end")
