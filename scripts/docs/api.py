"""Pages of the API reference, from the faces of the rooms."""

from __future__ import annotations

import importlib
import inspect

from scripts.docs import faces, references

FOLDER = "reference/api"


def pages() -> dict[str, str]:
    """Markdown by path: an overview, and a page for every room that has public names."""
    return {f"{FOLDER}/index.md": _overview()} | {
        _path(room): _page(room) for room in faces.rooms()
    }


def _path(room: str) -> str:
    """The page of a room; rooms within it have theirs in a folder beside it."""
    parts = room.split(".")[1:] or [room]
    inside = any(other.startswith(f"{room}.") for other in faces.rooms()) and room != "dptrain"
    return "/".join([FOLDER, *parts, "index"] if inside else [FOLDER, *parts]) + ".md"


def _overview() -> str:
    lines = [
        "# API",
        "",
        "Everything public: what the `__init__` of a package lists in `__all__`. Modules below may "
        "change from one version to the next. Most programs need `dptrain` alone, whose names are "
        "described with the package that they come from.",
        "",
        "| package | what is in it |",
        "|---|---|",
    ]
    for room in sorted(faces.rooms()):
        about = _about(room).partition("\n")[0]
        lines.append(f"| [`{room}`]({_path(room).removeprefix(f'{FOLDER}/')}) | {about} |")
    return "\n".join(lines) + "\n"


def _page(room: str) -> str:
    names = faces.rooms()[room]
    lines = ["---", f"title: {room.rpartition('.')[2]}", "---", ""]
    lines += [f"# {room}", "", _about(room), ""]
    lines += ["| name | what it is |", "|---|---|"]
    for each in names:
        home = faces.homes()[each.path]
        sentence = references.rewritten(faces.first_sentence(each), each.path).replace("|", "\\|")
        lines.append(f"| [`{each.name}`][{home.path}] | {sentence} |")
    lines.append("")
    for each in names:
        if faces.homes()[each.path] is each:
            lines += [f"::: {each.path}", ""]
    return "\n".join(lines)


def _about(room: str) -> str:
    """The docstring of a room."""
    text = inspect.cleandoc(importlib.import_module(room).__doc__ or "")
    return references.rewritten(text, room)
