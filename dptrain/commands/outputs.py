"""Files that a command reads and writes: refused before the work, named after it."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

from dptrain.sampling import AttributionGraph

_IMAGES = (".png", ".pdf", ".svg")


def check_outputs(*paths: pathlib.Path | None, plot: pathlib.Path | None = None) -> None:
    """Raise now, rather than after the work, if a file cannot be written."""
    for path in (*paths, plot):
        if path is not None:
            fresh = not path.exists()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("ab").close()
            except OSError as error:
                raise ValueError(
                    f"output {path}: cannot be written ({error.strerror}); name another file"
                ) from error
            if fresh:
                path.unlink()
    if plot is None:
        return
    if plot.suffix.lower() not in _IMAGES:
        raise ValueError(f"--plot {plot}: the file name must end in one of {', '.join(_IMAGES)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--plot needs matplotlib: pip install 'dptrain[recipes]'"
        ) from error


def read_json(path: pathlib.Path) -> Any:
    """The value of a JSON file.

    Fields that are named twice are refused, as readers would differ on which one counts.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} appears twice")
    return found


def plain_epsilon(epsilon: float) -> float | str:
    """An ε for JSON, which has no ∞."""
    return epsilon if math.isfinite(epsilon) else "inf"


def draw(
    path: pathlib.Path | None, plot: Callable[..., Any], *what: Any, lead: str = "", **options: Any
) -> None:
    """Draw a plot to a file and say so; nothing for ``None``."""
    if path is not None:
        plot(*what, path, **options)
        print(f"{lead}plot: {path}")


def read_graph(path: pathlib.Path) -> AttributionGraph:
    """The users of examples in the file of ``--users``, a line for each example."""
    try:
        with path.open(encoding="utf-8") as lines:
            return AttributionGraph.from_lists(sorted(set(line.split())) for line in lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"--users {path}: not UTF-8 text: {error}") from error
    except ValueError as error:
        raise ValueError(f"--users {path}: {error}") from error


def write_json(path: pathlib.Path | None, value: Any) -> None:
    """Write a JSON file and say so; nothing for ``None``."""
    if path is not None:
        path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"figures: {path}")
