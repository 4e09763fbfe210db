"""Public names: what the face of a room, its ``__init__``, lists in ``__all__``."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import types
from typing import Any

import dptrain


@dataclasses.dataclass(frozen=True)
class Public:
    """One public name of one room."""

    room: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """The way it is imported, in one word."""
        return f"{self.room}.{self.name}"

    @property
    def defined(self) -> str:
        """The place where a class or a function is defined; of anything else, its path."""
        if isinstance(self.value, type | types.FunctionType):
            return f"{self.value.__module__}.{self.value.__qualname__}"
        return self.path


@functools.cache
def rooms() -> dict[str, tuple[Public, ...]]:
    """Public names of ``dptrain`` and of every room in it that has any, from the outside in.

    A room is a package, or a module that stands beside them.
    """
    packages = [
        "dptrain",
        *(
            found.name
            for found in pkgutil.walk_packages(dptrain.__path__, "dptrain.")
            if found.ispkg or (found.name.count(".") == 1 and "._" not in found.name)
        ),
    ]
    found = {}
    for package in sorted(packages, key=lambda name: (name.count("."), name)):
        face = importlib.import_module(package)
        names = sorted(getattr(face, "__all__", ()), key=lambda name: (name.lower(), name))
        if names:
            found[package] = tuple(Public(package, name, getattr(face, name)) for name in names)
    return found


@functools.cache
def homes() -> dict[str, Public]:
    """For every public path, the one under which it is described: that of the outermost room.

    The front door, ``dptrain`` itself, describes only what no room exports.
    """
    everything = [each for room, names in rooms().items() if room != "dptrain" for each in names]
    first: dict[tuple[str, int], Public] = {}
    for each in [*everything, *rooms()["dptrain"]]:
        first.setdefault((each.name, id(each.value)), each)
    return {
        each.path: first[each.name, id(each.value)] for names in rooms().values() for each in names
    }


def first_sentence(each: Public) -> str:
    """The first paragraph of its docstring, in one line."""
    return " ".join(inspect.cleandoc(docstring(each)).partition("\n\n")[0].split())


def docstring(each: Public) -> str:
    """Its own docstring, not an inherited one; for a constant the text below its assignment."""
    if isinstance(each.value, types.ModuleType):
        return each.value.__doc__ or ""
    if isinstance(each.value, type):
        return each.value.__dict__.get("__doc__") or ""
    if isinstance(each.value, types.FunctionType) or hasattr(each.value, "__wrapped__"):
        return each.value.__doc__ or ""
    return _below_assignment(each.room, each.name)


def _below_assignment(module: str, name: str) -> str:
    """The text under ``name = ...`` in a module, or in the one that it is imported from."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement, after in zip(tree, [*tree[1:], None], strict=True):
        if isinstance(statement, ast.ImportFrom) and statement.level == 0:
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return _below_assignment(str(statement.module), alias.name)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                return inspect.cleandoc(text.value)
    return ""
