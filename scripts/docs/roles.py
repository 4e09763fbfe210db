"""References in docstrings, ````MinSep````, as links of the site."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import griffe

from scripts.docs import faces

_ROLE = re.compile(
    r":(?:class|meth|func|mod|attr|data|exc|obj):`(?:(?P<title>[^`<]+?)\s*<)?"
    r"(?P<short>~?)(?P<target>[\w.]+)>?`"
)


# Members of a class that have a place of their own on its page.
_SHOWN = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)

# Arguments that one sentence describes: "rank, world_size: ...".
_TOGETHER = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:,\s+\w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)


class Roles(griffe.Extension):
    """Links to what is public; the bare name of what is not, as there is no page to link to."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever has been read."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(one_by_one(obj.docstring.value), obj.path)


def one_by_one(text: str) -> str:
    """A docstring in which every argument has an entry of its own, as its parser needs it."""

    def entries(match: re.Match[str]) -> str:
        names = re.split(r",\s+", match["names"])
        return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in names)

    return _TOGETHER.sub(entries, text)


def rewritten(text: str, where: str = "") -> str:
    """A docstring with its roles as links; ``where`` is the path of what it describes."""

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        shown = match["title"] or (target.rpartition(".")[2] if match["short"] else target)
        address = find(target, where)
        return f"`{shown}`" if address is None else f"[`{shown}`][{address}]"

    return _ROLE.sub(link, text)


def find(target: str, where: str = "") -> str | None:
    """The address of a public name, or of a public member of one; ``None`` if there is none."""
    addresses = _addresses()
    if target in addresses:
        return addresses[target]
    holder, _, member = target.rpartition(".")
    for candidate in (holder, where, where.rpartition(".")[0]):
        address = addresses.get(candidate)
        if address is not None and not member.startswith("_"):
            value = getattr(faces.homes()[address].value, "__dict__", {}).get(member)
            if getattr(value, "__doc__", None) and isinstance(value, _SHOWN):
                return f"{address}.{member}"
            if holder:
                return address
    return None


@functools.cache
def _addresses() -> dict[str, str]:
    """Addresses by public path, by path of definition and, where only one has it, by name."""
    found: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for path, home in faces.homes().items():
        found[path] = found[home.defined] = home.path
        names.setdefault(home.name, set()).add(home.path)
    return found | {name: paths.pop() for name, paths in names.items() if len(paths) == 1}
