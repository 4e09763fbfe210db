"""Values that an argument must not take, by what it is, and how they are to be refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

INF, NAN = float("inf"), float("nan")


class Odd:
    """An object that is nothing in particular."""

    def __repr__(self) -> str:
        return "Odd()"


_NO_NUMBER: tuple[Any, ...] = (True, np.True_, "1", "1e-5", b"1", 1j, [1], (1,), {}, Odd(), int)
_TENSORS: tuple[Any, ...] = (torch.ones(2), np.ones(2), torch.tensor(True), np.array("1"))


@dataclasses.dataclass(frozen=True)
class Argument:
    """A kind of argument: what it must not be.

    Args:
        types: values of a wrong type: a TypeError.
        values: values of the right type that mean nothing: a ValueError.
        good: other spellings of a value that is right, for numbers.
    """

    types: tuple[Any, ...]
    values: tuple[Any, ...] = ()
    respell: tuple[Callable[[Any], Any], ...] = ()

    @property
    def optional(self) -> Argument:
        """The same, where None is a value."""
        return dataclasses.replace(self, types=tuple(t for t in self.types if t is not None))

    def but(self, *values: Any) -> Argument:
        """The same with other values that are wrong."""
        return dataclasses.replace(self, values=(*self.values, *values))


_INTEGERS = (np.int64, np.int32, lambda v: torch.tensor(v), lambda v: np.array(v))
_FLOATS = (np.float64, np.float64, lambda v: torch.tensor(v, dtype=torch.float64), np.array)

INTEGER = Argument(
    (None, *_NO_NUMBER, *_TENSORS, 1.5, 2.0, NAN, INF), (0, -1, -(10**30)), _INTEGERS
)
SEED = Argument(INTEGER.types, (-1,), _INTEGERS)
STEPS = INTEGER.but(10**12, 10**30)
POSITIVE = Argument((None, *_NO_NUMBER, *_TENSORS), (NAN, INF, -INF, 0.0, -1.0, 10**400), _FLOATS)
NOT_NEGATIVE = dataclasses.replace(POSITIVE, values=(NAN, INF, -INF, -1.0, -1e-300, 10**400))
PROBABILITY = POSITIVE.but(1.0000001, 2)
DELTA = POSITIVE.but(1.0, 1.5)
FLAG = Argument((None, 0, 1, "True", "yes", [], Odd(), torch.tensor(True)))
NAME = Argument((None, True, 5, 1.5, b"mean", ["mean"], Odd()), ("", "nonsense"))
THING = Argument((None, True, 5, 1.5, "nonsense", [], {}, Odd(), int))  # one of our classes
FUNCTION = Argument((True, 5, "nonsense", [], Odd()))  # or None
NUMBERS = Argument(
    (None, True, 5, 1.5, "12", b"12", Odd(), [True], ["1"], [None], [[1.0]]), ([NAN], [INF], [])
)
