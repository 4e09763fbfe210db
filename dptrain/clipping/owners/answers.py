"""Numbers that leave the tensors, and whether they are the same whatever other examples there are.

Once Python was told whether a mask hides something, all that it does may depend on all examples.
Passes over a few rows, in which one of them is changed at a time, show whether that matters.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from dptrain.clipping.owners.places import Place, place

TELLING = frozenset({"_local_scalar_dense", "item", "equal", "is_nonzero", "allclose"})
"""Operators that return a number."""

Told = Mapping[Place, Sequence[Any]]
"""By places of the program: the numbers that it was told there, in order."""


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
    """What the program was told in passes whose results for unchanged rows were the same."""

    def __init__(self) -> None:
        self._seen: dict[Place, list[set[Any]]] = collections.defaultdict(list)

    def add(self, told: Told) -> None:
        """Of one more pass."""
        for where, values in told.items():
            seen = self._seen[where]
            seen += [set() for _ in values[len(seen) :]]
            for known, value in zip(seen, values, strict=False):
                known.add(value)

    def move_nothing(self, where: Place, number: int, value: Any) -> bool:
        """Whether what else might have been told there would have changed no row.

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
