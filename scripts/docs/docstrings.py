"""Descriptions of arguments and attributes, read from docstrings."""

from __future__ import annotations

import inspect
import re

_SECTION = re.compile(r"^(?:Args|Attributes):[ \t]*\n((?:(?:[ \t]+.*)?\n?)*)", re.MULTILINE)
# One sentence may describe several: "rank, world_size: ...", over more than one line if need be.
_ENTRY = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:,\s+\w+)*): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)


def one_by_one(text: str) -> str:
    """A docstring in which every argument has an entry of its own, as other parsers need it."""

    def entries(match: re.Match[str]) -> str:
        names = re.split(r",\s+", match["names"])
        return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in names)

    return _ENTRY.sub(entries, text)


def described(text: str | None) -> dict[str, str]:
    """The entries of the sections ``Args`` and ``Attributes`` of a docstring, each in one line."""
    found: dict[str, str] = {}
    for section in _SECTION.finditer(inspect.cleandoc(text or "") + "\n"):
        depth = len(section[1]) - len(section[1].lstrip(" "))
        for entry in _ENTRY.finditer(section[1]):
            if len(entry["indent"]) == depth:
                for name in re.split(r",\s+", entry["names"]):
                    found[name] = " ".join(entry["text"].split())
    return found


def described_by_class(member: type) -> dict[str, str]:
    """The same of a class, with what its bases say about what it inherits or refers to them for."""
    found: dict[str, str] = {}
    for base in reversed(member.__mro__):
        for name, text in described(base.__dict__.get("__doc__")).items():
            if name not in found or "see :class:" not in text:
                found[name] = text
    return found
