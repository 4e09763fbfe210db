"""The assertion of a contract's requirements, under ``python -O`` too."""

from __future__ import annotations


def require(holds: object, what: str = "") -> None:
    """Raise an ``AssertionError`` unless it holds.

    An ``assert`` statement would check nothing under ``python -O`` or ``PYTHONOPTIMIZE``: pytest
    keeps those of test modules, and not those of the modules that they import.
    """
    __tracebackhide__ = True  # pytest then shows the line that called
    if not holds:
        raise AssertionError(what)
