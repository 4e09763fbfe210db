"""Importing dptrain imports what is asked for, and nothing that only some need."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

import dptrain
from scripts.docs import house

SOURCE = pathlib.Path(dptrain.__file__)
# Of extras, or of functions that most runs never call.
HEAVY = {"numba", "matplotlib", "transformers", "datasets", "sklearn", "pandas", "pyarrow"}


@functools.cache
def imported_by(statement: str) -> frozenset[str]:
    """The top-level modules that a fresh interpreter has after a statement."""
    script = f"{statement}; import json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return frozenset(name.partition(".")[0] for name in json.loads(done.stdout))


def test_importing_dptrain_alone_needs_none_of_its_dependencies() -> None:
    """So that it costs less than .7 s beyond torch, on any machine."""
    third_party = imported_by("import dptrain") - sys.stdlib_module_names - imported_by("pass")
    assert third_party == {"dptrain"}


@pytest.mark.parametrize(
    "statement",
    [
        "from dptrain import *",
        pytest.param(
            "import dptrain.individual, dptrain.planning, dptrain.noise", marks=pytest.mark.slow
        ),
        "from dptrain.commands import main",
    ],
)
def test_nothing_that_only_some_need_is_imported_with_the_package(statement: str) -> None:
    found = imported_by(statement)
    assert "torch" in found
    assert found & (HEAVY - imported_by("import torch, opacus, dp_accounting")) == set()


FACES = sorted(
    path for path in SOURCE.parent.rglob("__init__.py") if "names_of(" in path.read_text("utf-8")
)


@pytest.mark.parametrize("path", FACES, ids=lambda path: path.parent.name)
def test_names_on_demand_are_those_that_type_checkers_see(path: pathlib.Path) -> None:
    """One list for type checkers, one for imports and one for readers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "names_of"
    ]
    places = ast.literal_eval(call.args[1])
    assert seen == {name: module for module, names in places.items() for name in names.split()}
    face = importlib.import_module(".".join(path.relative_to(SOURCE.parents[1]).parent.parts))
    assert set(seen) <= set(face.__all__) & set(dir(face))
    for name, module in seen.items():
        assert getattr(face, name) is getattr(importlib.import_module(module), name)


def test_all_names_of_the_package_come_on_demand() -> None:
    seen = {name for name in dir(dptrain) if name in dptrain.__all__}
    assert seen == set(dptrain.__all__)
    for name in dptrain.__all__:
        getattr(dptrain, name)


def test_the_core_can_be_read() -> None:
    """What a stranger trusts is what the engine imports: at most 45,000 lines of ours."""
    files = house.loaded()
    assert len(files) > 100
    assert not [each for each in files if "contrib" in each.relative_to(SOURCE.parent).parts]
    assert house.lines(files) <= 45_000


def test_every_room_can_be_reached() -> None:
    folder = SOURCE.parent
    rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert set(dptrain._ROOMS) == rooms | modules
    for name in dptrain._ROOMS:
        assert getattr(dptrain, name).__name__ == f"dptrain.{name}"


def test_everything_is_listed_and_nothing_else_is_there() -> None:
    assert {*dptrain.__all__, *dptrain._ROOMS} <= set(dir(dptrain))
    with pytest.raises(AttributeError, match="module 'dptrain' has no attribute 'PrivacyEngin'"):
        dptrain.PrivacyEngin  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Poison'"):
        exec("from dptrain import Poison")


@pytest.mark.parametrize("name", dptrain._OF_OPACUS)
def test_names_of_opacus_say_what_to_write(name: str) -> None:
    """Whoever comes from there imports them first."""
    with pytest.raises(ImportError) as found:
        exec(f"from dptrain import {name}")
    assert str(found.value) == f"dptrain has no {name}: write {dptrain._OF_OPACUS[name]}"
