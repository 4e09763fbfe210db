"""``python -m tests.helpers.of_module FILE``: test files of a module of the library, a line each.

Those that bear its name come first, then those that import a name that it defines, from it or from
a package above it, or a helper that does. If there are none, those of the modules that import it.
"""

import ast
import functools
import pathlib
import sys

_TESTS = pathlib.Path(__file__).parents[1]
_ROOT = _TESTS.parent


def files_of(module: str) -> list[pathlib.Path]:
    """Test files for a module, those that bear its name first.

    Args:
        module: a path such as ``dptrain/noise/factory.py``.

    Raises:
        ValueError: if there is no such module, or no test reaches it by imports.
    """
    path = _ROOT / module
    if not (module.startswith("dptrain/") and path.suffix == ".py" and path.exists()):
        raise ValueError(f"{module}: there is no such module; name one as dptrain/noise/factory.py")
    asked, seen = [path], {path}
    while asked:
        if found := {file for each in asked for file in _tests(each)}:
            return sorted(found, key=lambda file: (not _bears(file, path), file))
        library = sorted((_ROOT / "dptrain").rglob("*.py"))
        asked = [each for each in library if each not in seen and _any_imported(each, asked)]
        seen.update(asked)
    raise ValueError(f"{module}: no test reaches it by imports")


def _tests(path: pathlib.Path) -> list[pathlib.Path]:
    """Test files that bear a module's name, or import what it defines."""
    helpers = sorted((_TESTS / "helpers").glob("*.py"))
    through = [path, *(helper for helper in helpers if _any_imported(helper, [path]))]
    files = sorted(_TESTS.rglob("test_*.py"))
    return [file for file in files if _bears(file, path) or _any_imported(file, through)]


@functools.cache
def _defined(path: pathlib.Path) -> set[str]:
    """Names that a module defines at its top; of a package, those that it passes on."""
    names = {path.stem}
    if path.stem == "__init__":
        names.update(name for _, name in _imported(path))
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _bears(file: pathlib.Path, path: pathlib.Path) -> bool:
    """True if a file is ``test_<module>.py`` or ``test_<module>_….py`` in the mirrored folder."""
    name = f"test_{path.stem.lstrip('_')}"
    mirrored = _TESTS / path.parent.relative_to(_ROOT / "dptrain")
    return file.parent == mirrored and (file.stem == name or file.stem.startswith(f"{name}_"))


def _any_imported(file: pathlib.Path, paths: list[pathlib.Path]) -> bool:
    """True if a file imports one of the modules, or a name of one from it or a package above."""
    for path in paths:
        module = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        for source, name in _imported(file):
            if f"{module}.".startswith(f"{source}.") and name in _defined(path):
                return True
    return False


@functools.cache
def _imported(file: pathlib.Path) -> frozenset[tuple[str, str]]:
    """(module, name) of every ``from module import name`` of a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    return frozenset((str(node.module), alias.name) for node in found for alias in node.names)


if __name__ == "__main__":
    try:
        (asked,) = sys.argv[1:]
        print(*(path.relative_to(_ROOT) for path in files_of(asked)), sep="\n")
    except ValueError as error:
        sys.exit(f"of_module: {error}")
