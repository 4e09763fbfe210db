"""Numbers that leave the tensors, and whether they are the same whatever other examples there are.

Once Python was told whether a mask hides something, all that it does may depend on all examples.
Passes over a few rows, in which one of them is changed at a time, show whether that matters.
"""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep

Place = tuple[str | None, nn.Module | None]


def place() -> Place:
    """The innermost line that is neither torch's nor ours, and the innermost module's forward.

    The line is ``file:number``; in a backward pass there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    line: str | None = None
    module: nn.Module | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.startswith((_TORCH, _HERE))
        if line is None and not ours and not file.startswith("<frozen"):
            line = f"{os.path.basename(file)}:{frame.f_lineno}"
        if module is None and frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            module = owner if isinstance(owner, nn.Module) else None
        if line is not None and module is not None:
            break
        frame = frame.f_back
    return line, module


TELLING = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"})
"""Operators that return a number."""

Told = Mapping[Place, Sequence[Any]]
"""Numbers that the program was told, in order, by its places."""


class Telling(TorchDispatchMode):
    """Takes note of what the program is told within this context.

    Attributes:
        told: by places.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[Place, list[Any]] = collections.defaultdict(list)

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        if func.__name__.partition(".")[0] in TELLING:
            self.told[place()].append(value)
        return value


class Answers:
    """Numbers that the program was told in passes with equal results for unchanged rows."""

    def __init__(self) -> None:
        self._seen: dict[Place, list[set[Any]]] = collections.defaultdict(list)

    def add(self, told: Told) -> None:
        """Add the answers of one more pass."""
        for where, values in told.items():
            seen = self._seen[where]
            seen += [set() for _ in values[len(seen) :]]
            for known, value in zip(seen, values, strict=False):
                known.add(value)

    def move_nothing(self, where: Place, number: int, value: Any) -> bool:
        """True if what else might have been told there would have changed no row.

        Either nothing else was, whichever examples there were, or both answers were given to a
        question, and the rows were the same.

        Args:
            where: it is told.
            number: of answers before, in the same call of the module.
            value: what is told now.
        """
        seen = self._seen.get(where, [])
        if number >= len(seen) or value not in seen[number]:
            return False
        question = all(isinstance(each, bool) for each in seen[number])
        return len(seen[number]) == 1 or question
