"""Names in docstrings as links of the site, plain (``MinSep``) or with Sphinx's roles.

To what is public; of all else the bare name is left, as there is no page to link to.
"""

from __future__ import annotations

import functools
import re
import types

from scripts.docs import faces

# ``MinSep``, ``MinSep.for_batch_size``, ``dptrain.noise``: a class or a path, no argument's name.
_NAME = re.compile(r"(?<!`)``(?P<target>[A-Z]\w*(?:\.\w+)*|dptrain(?:\.\w+)+)``(?!`)")
_ROLE = re.compile(
    r":(?:class|meth|func|mod|attr|data|exc|obj):`(?:(?P<title>[^`<]+?)\s*<)?"
    r"(?P<short>~?)(?P<target>[\w.]+)>?`"
)


# Members of a class that have a place of their own on its page.
_SHOWN = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)


def rewritten(text: str, where: str = "") -> str:
    """A docstring with its roles as links; ``where`` is the path of what it describes."""

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        shown = match["title"] or (target.rpartition(".")[2] if match["short"] else target)
        return _linked(shown, target, where)

    text = _ROLE.sub(link, text)
    return _NAME.sub(lambda match: _linked(match["target"], match["target"], where), text)


def _linked(shown: str, target: str, where: str) -> str:
    address = find(target, where)
    itself = address is None or address == find(where)
    return f"`{shown}`" if itself else f"[`{shown}`][{address}]"


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
