"""The theorems of docs/theory: their headings, and references to them from docstrings."""

from __future__ import annotations

import dataclasses
import functools
import re

from scripts.docs.pages import ROOT

FOLDER = ROOT / "docs/theory"

_HEADING = re.compile(
    r"^#+ Theorem (?P<number>\d+\.\d+) \((?P<name>.+)\) \{ #(?P<id>[\w-]+) \}$", re.MULTILINE
)
REFERENCE = re.compile(r"docs/theory/(?P<page>[\w-]+\.md)#(?P<id>[\w-]+)")


@dataclasses.dataclass(frozen=True)
class Theorem:
    """The heading of a theorem.

    Attributes:
        page: file name.
        id: anchor, which stays when the number does not.
        number: page and theorem, ``"4.1"``.
        name: what it is called.
    """

    page: str
    id: str
    number: str
    name: str


@functools.cache
def theorems() -> tuple[Theorem, ...]:
    """All theorems, page by page in the order of their names."""
    return tuple(
        Theorem(path.name, match["id"], match["number"], match["name"])
        for path in sorted(FOLDER.glob("*.md"))
        for match in _HEADING.finditer(path.read_text(encoding="utf-8"))
    )


def linked(text: str) -> str:
    """A docstring with ``docs/theory/PAGE.md#thm-ID`` as the theorem's number and a link to it."""
    numbers = {theorem.id: theorem.number for theorem in theorems()}

    def link(match: re.Match[str]) -> str:
        number = numbers.get(match["id"])
        return match[0] if number is None else f"[Theorem {number}][{match['id']}]"

    return REFERENCE.sub(link, text)
