"""Whatever the package and the recipes import is declared in pyproject.toml."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Names of distributions whose modules are called otherwise.
MODULES = {
    "scikit-learn": "sklearn",
    "pyyaml": "yaml",
    "pillow": "PIL",
    "griffelib": "griffe",
    "mlflow-skinny": "mlflow",
    "fonttools": "fontTools",
}
# Functions that import, or ask for, the module that their first argument names.
BY_NAME = {"package", "import_module", "importorskip", "find_spec"}
# Declared and not imported here: programs, stubs, plugins, what torch.utils.tensorboard imports.
USED_OTHERWISE = {
    *("ruff", "mypy", "import_linter", "types_pyyaml", "pytest_xdist", "tensorboard"),
    *("mkdocs_material", "mkdocs_awesome_nav", "mkdocs_autorefs", "mkdocstrings"),  # in mkdocs.yml
    *("pymdown_extensions", "ziamath"),  # its extensions, and a font in its package
    *("sqlalchemy", "alembic"),  # by MLflow, for its database
    "expecttest",  # by torch.testing
}
EXTRAS = (
    *("recipes", "vision", "text", "trainer", "dev", "docs", "peer", "fast", "users", "coverage"),
    *("lightning", "loggers", "safetensors", "sweep"),
)
# What is compiled, and imported only where numba is there.
_COMPILED = ("engine_kernel.py", "settled_kernel.py")
OUR_OWN = {"dptrain", "recipes", "scripts", "tests"}


def top_level(node: ast.AST) -> list[str]:
    """The top-level modules that a statement imports, if it imports any."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.module or "").split(".")[0]]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = (
            node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        )
        if function in BY_NAME and isinstance(node.args[0].value, str):
            return [node.args[0].value.split(".")[0]]
    return []


def imported(folder: str) -> dict[str, str]:
    """Top-level modules that files in a folder import, each with one file that does."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in top_level(node):
                found.setdefault(name, str(path.relative_to(ROOT)))
    return found


def declared(*extras: str) -> set[str]:
    """Modules of the dependencies, and of some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    names = [re.split(r"[\[<>=!~; ]", line)[0].lower() for line in lines]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


@pytest.mark.sample(every=6)
@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("dptrain", tuple(extra for extra in EXTRAS if extra not in ("coverage", "docs", "peer"))),
        ("recipes", ("recipes", "vision", "text", "sweep")),
        ("scripts", EXTRAS),
        ("examples", ("recipes", "vision", "text", "trainer", "lightning", "dev")),
        ("tests", EXTRAS),
    ],
)
def test_imports_are_declared(folder: str, extras: tuple[str, ...]) -> None:
    known = declared(*extras) | OUR_OWN | {"stranger_dp"} | set(sys.stdlib_module_names)
    assert {name: path for name, path in imported(folder).items() if name not in known} == {}


@pytest.mark.slow
def test_what_is_declared_is_used() -> None:
    used = {name for folder in OUR_OWN for name in imported(folder)} | USED_OTHERWISE
    assert declared(*EXTRAS) - used - {"dptrain"} == set()


@pytest.mark.slow
def test_what_is_imported_with_the_package_needs_no_extra() -> None:
    """Imports at the top of a module run for everybody; those within functions may be extras."""
    known = declared() | {"dptrain"} | set(sys.stdlib_module_names)
    found = {}
    for path in sorted((ROOT / "dptrain").rglob("*.py")):
        if {"testing", "integrations"} & set(path.parts) or path.name in _COMPILED:
            continue  # the former for pytest suites and trainers of others; nothing imports them
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found |= {name: path.name for name in top_level(node) if name not in known}
    assert found == {}
