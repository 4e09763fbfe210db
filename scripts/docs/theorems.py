"""The theorems of docs/theory: lists for the index, and references from docstrings."""

from __future__ import annotations

import dataclasses
import functools
import re

from scripts import results
from scripts.docs.pages import ROOT

FOLDER = ROOT / "docs/theory"

_HEADING = re.compile(
    r"^#+ Theorem (?P<number>\d+\.\d+) \((?P<name>.+)\) \{ #(?P<id>[\w-]+) \}$", re.MULTILINE
)
_USERS = re.compile(r"^Used by: (.+?)\.$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^<!-- theorems: ([\w-]+\.md) -->$", re.MULTILINE)
REFERENCE = re.compile(r"docs/theory/(?P<page>[\w-]+\.md)#(?P<id>[\w-]+)")


@dataclasses.dataclass(frozen=True)
class Theorem:
    """A theorem as the index lists it.

    Attributes:
        page: file name.
        id: anchor, which stays when the number does not.
        number: page and theorem, ``"4.1"``.
        name: what it is called.
        users: parts of the library that rest on it.
    """

    page: str
    id: str
    number: str
    name: str
    users: str


@functools.cache
def theorems() -> tuple[Theorem, ...]:
    """All theorems, page by page in the order of their names.

    Raises:
        ValueError: if the page of a theorem does not say what uses it.
    """
    found = []
    for path in sorted(FOLDER.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for match in _HEADING.finditer(text):
            body = re.split(r"^#+ ", text[match.end() :], maxsplit=1, flags=re.MULTILINE)[0]
            said = _USERS.search(body)
            if said is None:
                raise ValueError(f"Theorem {match['number']} of {path.name} has no 'Used by: '")
            users = " ".join(said[1].split())
            found.append(Theorem(path.name, match["id"], match["number"], match["name"], users))
    return tuple(found)


def listing(page: str) -> str:
    """Markdown table of the theorems of a page: number, name with a link, and what uses them.

    Raises:
        ValueError: if there are none.
    """
    rows = [
        [each.number, f"[{each.name}]({page}#{each.id})", each.users]
        for each in theorems()
        if each.page == page
    ]
    if not rows:
        raise ValueError(f"there is no theorem on a page {page!r} of docs/theory")
    return results.markdown(["", "theorem", "used by"], rows)


def insert(text: str) -> str:
    """Put the theorems of a page where ``<!-- theorems: PAGE.md -->`` asks for them."""
    return _MARK.sub(lambda match: listing(match[1]), text)


def linked(text: str) -> str:
    """A docstring with ``docs/theory/PAGE.md#thm-ID`` as the theorem's number and a link to it."""
    numbers = {theorem.id: theorem.number for theorem in theorems()}

    def link(match: re.Match[str]) -> str:
        number = numbers.get(match["id"])
        return match[0] if number is None else f"[Theorem {number}][{match['id']}]"

    return REFERENCE.sub(link, text)
