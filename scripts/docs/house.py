"""The rooms of the library: a table and a drawing, both made from the code."""

from __future__ import annotations

import ast
import functools
import json
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from scripts.docs.pages import ROOT

TABLE, DRAWING = "<!-- house: rooms -->", "<!-- house: drawing -->"
_WIDTH, _BOX, _ROW = 900, (130, 46), 92
_LOADED = (
    "import json, sys, dptrain; dptrain.PrivacyEngine; print(json.dumps([module.__file__ for name, "
    "module in sys.modules.items() if name.partition('.')[0] == 'dptrain']))"
)


def insert(text: str) -> str:
    """Put the table and the drawing where a page asks for them."""
    for mark, made in ((TABLE, table), (DRAWING, drawing)):
        if mark in text:
            text = text.replace(mark, made())
    return text


@functools.cache
def _contract(place: int) -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, Any] = project["tool"]["importlinter"]["contracts"][place]
    return found


@functools.cache
def floors() -> tuple[tuple[str, ...], ...]:
    """Rooms of each floor, from the top, as the contract in pyproject.toml has them."""
    layers = _contract(0)["layers"]
    found = [tuple(room.strip() for room in floor.split("|")) for floor in layers]
    return tuple(floor for floor in found if not floor[0].startswith("_"))


@functools.cache
def core() -> frozenset[str]:
    """Rooms that must not import what joins them, as the second contract has them."""
    modules = _contract(1)["source_modules"]
    return frozenset(name.removeprefix("dptrain.") for name in modules)


def sources(room: str) -> list[pathlib.Path]:
    """Files of a room, which is a package or a single module."""
    folder = ROOT / "dptrain" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def lines(paths: Iterable[pathlib.Path]) -> int:
    """Number of lines of some files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@functools.cache
def loaded() -> frozenset[pathlib.Path]:
    """Files of ours that ``dptrain.PrivacyEngine`` imports in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return frozenset(map(pathlib.Path, json.loads(done.stdout)))


@functools.cache
def arrows() -> frozenset[tuple[str, str]]:
    """(importing, imported) rooms, without what follows from other arrows.

    Imports under ``TYPE_CHECKING`` are left out: names that are shown on demand point upwards.
    """
    rooms = {room for floor in floors() for room in floor}
    found = {
        (room, name)
        for room in rooms
        for path in sources(room)
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if name in rooms - {room}
    }
    return frozenset(
        (above, below)
        for above, below in found
        if not any((above, middle) in found and (middle, below) in found for middle in rooms)
    )


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dptrain"):
        inside = (node.module or "").split(".")[1:2]
        yield from inside or (alias.name for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imported(child)


def table() -> str:
    """Markdown table of the rooms: what they are, their lines, and those that the engine loads."""
    rows = ["| room | | lines | loaded with the engine |", "| --- | --- | ---: | ---: |"]
    total = loads = 0
    for floor in floors():
        for room in floor:
            files = sources(room)
            head = files[0] if len(files) == 1 else ROOT / "dptrain" / room / "__init__.py"
            said = ast.get_docstring(ast.parse(head.read_text(encoding="utf-8"))) or ""
            size, part = lines(files), lines([path for path in files if path in loaded()])
            total, loads = total + size, loads + part
            name = f"**`{room}`**" if room in core() else f"`{room}`"
            rows.append(f"| {name} | {said.splitlines()[0]} | {size:,} | {part:,} |")
    rows.append(f"| together | rooms of the core in bold | {total:,} | {loads:,} |")
    return "\n".join(rows)


def drawing() -> str:
    """Drawing (SVG) of the rooms on their floors, an arrow from each to those that it imports."""
    places = {
        room: (int(_WIDTH * (k + 1) / (len(floor) + 1)), _ROW * row + 40)
        for row, floor in enumerate(floors())
        for k, room in enumerate(floor)
    }
    height = _ROW * len(floors())
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" style="max-width: 100%" '
        'xmlns="http://www.w3.org/2000/svg" fill="none" stroke="currentColor">',
        "<title>The rooms of dptrain; arrows point to what a room imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor" '
        'stroke="none"/></marker></defs>',
    ]
    wide, tall = _BOX
    for above, below in sorted(arrows()):
        (x, y), (u, v) = places[above], places[below]
        parts.append(
            f'<path d="M{x} {y + tall // 2}L{u} {v - tall // 2}" opacity=".45" '
            'marker-end="url(#tip)"/>'
        )
    for room, (x, y) in places.items():
        weight, size = "2.5" if room in core() else "1", lines(sources(room))
        parts.append(
            f'<rect x="{x - wide // 2}" y="{y - tall // 2}" width="{wide}" height="{tall}" rx="6" '
            f'style="fill: var(--md-default-bg-color, white)" stroke-width="{weight}"/>'
            f'<text x="{x}" y="{y - 2}" text-anchor="middle" font-size="14" fill="currentColor" '
            f'stroke="none">{room}</text><text x="{x}" y="{y + 14}" text-anchor="middle" '
            f'font-size="11" fill="currentColor" stroke="none">{size:,} lines</text>'
        )
    return "\n".join([*parts, "</svg>"])
