"""Torch's own databases of operators and of modules, which its tests are run on."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache  # importing takes seconds
def operators() -> list[Any]:
    """Every ``OpInfo``: an operator, its variants, and what it can be called with."""
    frozen = torch.backends.flags_frozen()
    from torch.testing._internal.common_methods_invocations import op_db

    _thaw(frozen)
    return list(op_db)


@functools.cache
def modules() -> list[Any]:
    """Every ``ModuleInfo``: a module's class, how it is built and what it can be called with."""
    frozen = torch.backends.flags_frozen()
    from torch.testing._internal.common_modules import module_db

    _thaw(frozen)
    return list(module_db)


def _thaw(frozen: bool) -> None:
    """Undo that the import forbids everybody in the process to set a flag of a backend."""
    held = torch.backends.flags_frozen.__globals__
    held["__allow_nonbracketed_mutation_flag"] = not frozen
