"""Names of a package that are imported when somebody first asks for them (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that shows names of modules it does not load.

    Rooms of the core name in this way what joins them from ``dptrain.contrib``, which they never
    import; type checkers see the imports that stand beside it under ``TYPE_CHECKING``.

    Args:
        package: ``__name__`` of the package.
        places: the names that each module has, separated by spaces.
    """
    origins = {name: module for module, names in places.items() for name in names.split()}

    def found(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(origins[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return found, lambda: sorted({*vars(sys.modules[package]), *origins})
