"""The house: rooms of a size, one name for one thing, no circles, and faces for whoever is outside.

Which room may import which is import-linter's (pyproject.toml); here is what its contracts cannot
say. Imports within functions and under ``TYPE_CHECKING`` count as any other.
"""

from __future__ import annotations

import ast
import collections
import functools
import graphlib
import importlib
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MOST_MODULES = 20
# Rooms of one module are their own faces.
PUBLIC_MODULES = {"dptrain.mechanism", "dptrain.losses", "dptrain._on_demand"}


def dotted(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in sorted((ROOT / "dptrain").rglob("*.py"))}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported of dptrain; the name is empty for ``import x.y``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here, so that they can be read alone"
            if node.module and node.module.split(".")[0] == "dptrain":
                yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "dptrain":
                    yield alias.name, ""


@functools.cache
def exported(package: str) -> tuple[str, ...]:
    for node in parsed(MODULES[package]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return tuple(ast.literal_eval(node.value))
    return ()


def not_through_a_face(tree: ast.AST, room: str | None) -> list[str]:
    """What is imported of another room than ``room`` and is no export of a face."""
    found = []
    for module, name in imports(tree):
        if module == "dptrain" and name:
            if name not in exported("dptrain") and f"dptrain.{name}" not in MODULES:
                found.append(f"from {module} import {name}")
            continue
        if module in PUBLIC_MODULES or (room and (module + ".").startswith(room + ".")):
            continue
        if module not in PACKAGES or (
            name and name not in exported(module) and f"{module}.{name}" not in PACKAGES
        ):
            found.append(f"from {module} import {name}")
    return found


def narrows(test: ast.expr) -> bool:
    """Whether an assert only tells a type checker what the line above it has seen to."""
    if isinstance(test, ast.Call):
        return getattr(test.func, "attr", getattr(test.func, "id", "")) in (
            "isinstance",
            "is_dataclass",
        )
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and ast.unparse(test.comparators[0]) == "None"
    )


def room_of(path: pathlib.Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return ".".join(parts[:2]) if len(parts) > 2 else None


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_room_has_at_most_twenty_modules(package: str) -> None:
    folder = MODULES[package].parent
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES


def test_tests_bear_the_name_of_a_module_or_of_its_room() -> None:
    """``test_<module>.py`` or ``test_<module>_<aspect>.py``, in the folder that mirrors its own."""
    strange = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = ROOT / "dptrain" / path.parent.relative_to(ROOT / "tests")
        room = folder.relative_to(ROOT / "dptrain").parts[:1]
        if room and (ROOT / "dptrain" / room[0]).is_dir():
            names = [folder.name, *(module.stem.lstrip("_") for module in folder.glob("*.py"))]
            if not any(f"{path.stem}_".startswith(f"test_{name}_") for name in names):
                strange.append(str(path.relative_to(ROOT)))
    assert strange == []


def test_no_class_name_stands_for_two_things() -> None:
    places = collections.defaultdict(set)
    for name, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(name)
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1} == {}


def test_no_function_shadows_the_module_it_comes_from() -> None:
    """``from dptrain.x import calibrate`` must not be two things."""
    shadowed = {
        f"{package}.{name}"
        for package in PACKAGES
        for name in exported(package)
        if f"{package}.{name}" in MODULES
        and not any(found == (package, name) for found in imports(parsed(MODULES[package])))
    }
    assert shadowed == set()


def test_there_is_no_circle() -> None:
    """``prepare`` raises with the circle. A face imports its own room: that is what it is for."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if name in PACKAGES:
            continue
        found = set()
        for module, what in imports(parsed(path)):
            target = f"{module}.{what}" if f"{module}.{what}" in MODULES else module
            if target not in PACKAGES:
                found.add(target)
        graph[name] = found
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_other_rooms_are_entered_by_their_faces(name: str) -> None:
    path = MODULES[name]
    if path.parent == ROOT / "dptrain":
        assert not_through_a_face(parsed(path), None) == []
    else:
        assert not_through_a_face(parsed(path), room_of(path)) == []


@pytest.mark.parametrize("folder", ["recipes", "scripts", "examples"])
def test_outsiders_enter_by_faces(folder: str) -> None:
    found = {
        str(path.relative_to(ROOT)): deep
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (deep := not_through_a_face(parsed(path), None))
    }
    assert found == {}


def snippets(path: pathlib.Path) -> Iterator[ast.Module]:
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^[ ]*```python\n(.*?)^[ ]*```", text, re.DOTALL | re.MULTILINE):
        lines = block.splitlines()
        indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        yield ast.parse("\n".join(line[indent:] for line in lines))


def test_readers_are_shown_faces_only() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    read = [(path, tree) for path in pages for tree in snippets(path)]
    assert len(read) > 10  # that the pattern finds them at all
    found = {
        str(path.relative_to(ROOT)): deep
        for path, tree in read
        if (deep := not_through_a_face(tree, None))
    }
    assert found == {}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_face_says_what_it_shows(package: str) -> None:
    assert ast.get_docstring(parsed(MODULES[package]))
    names = exported(package)
    assert len(set(names)) == len(names)
    face = importlib.import_module(package)
    assert [name for name in names if not hasattr(face, name)] == []


def is_told_apart_from_one(node: ast.AST) -> bool:
    """Whether a comparison asks if a relation is one of them: what is none of them is the rest."""
    return isinstance(node, ast.Compare) and any(
        isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "Adjacency"
        for each in (node.left, *node.comparators)
    )


def only_refuses(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Raise)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.IsNot)
    )


def test_relations_are_matched_exhaustively() -> None:
    """``if adjacency is ADD_REMOVE: … else: …`` takes a relation that is added later for another.

    ``match`` with ``assert_never`` does not; nor does a refusal of all but one.
    """
    found = []
    for name, path in MODULES.items():
        tree = parsed(path)
        fine = {id(node.test) for node in ast.walk(tree) if only_refuses(node)}
        found += [
            f"{name}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if is_told_apart_from_one(node) and id(node) not in fine
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Match) and "Adjacency." in ast.unparse(node):
                assert "assert_never" in ast.unparse(node.cases[-1]), f"{name}:{node.lineno}"
    assert found == []


def test_nothing_is_checked_by_an_assert():
    """``python -O`` leaves them out: contracts would pass anything, and proofs be about others.

    ``checks.invariant`` and ``require`` raise.
    """
    left = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node.test)}"
        for name, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert not left
