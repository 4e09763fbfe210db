"""Workloads A: which linear combinations of the steps' gradients the noise should not spoil."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from dptrain.core import Array, JsonValue, checks
from dptrain.strategies.packed import pack, unpack

_LARGEST_MATRIX = 2000  # steps; the text of the value then has 21 MB


class Workload(JsonValue, ABC, family="workload"):
    """Lower-triangular n×n matrix A, as an immutable value.

    Row t says what the run's output after step t is made of: the released gradients x_0, …, x_t
    count in it as (A x)_t. A strategy C answers with the error A C^-1 Z.
    """

    @property
    def is_toeplitz(self) -> bool:
        """True if A_{t,j} depends on t - j only, so that A is its first column for any n."""
        return True

    def check(self, steps: int) -> None:
        """Refuse a run length that the workload is not made for.

        Raises:
            ValueError: naming the workload's own length.
        """

    @abstractmethod
    def apply(self, x: Array) -> Array:
        """``A @ x`` for float64 x of shape (n,) or (n, k), without forming A where it can."""

    @abstractmethod
    def adjoint(self, x: Array) -> Array:
        """``A.T @ x`` for float64 x of shape (n,) or (n, k)."""

    def matrix(self, steps: int) -> Array:
        """A as a dense matrix, shape (n, n)."""
        return self.apply(np.eye(steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixSums(Workload):
    """A_{t,j} = 1 for j ≤ t: what plain SGD with a constant learning rate adds up."""

    def apply(self, x: Array) -> Array:
        """Running sums."""
        return np.cumsum(x, axis=0)

    def adjoint(self, x: Array) -> Array:
        """Running sums from the end."""
        return np.cumsum(x[::-1], axis=0)[::-1]


PREFIX_SUMS = PrefixSums()
"""The workload of plain SGD, whose iterates are sums of all gradients so far."""


def checked_workload(workload: Workload) -> Workload:
    """``workload`` if it is one.

    Raises:
        TypeError: otherwise.
    """
    return checks.instance("workload", workload, Workload, example="MomentumSGD(momentum=0.9)")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DenseWorkload(Workload):
    """Any lower-triangular A, for runs of exactly as many steps as it has rows.

    Args:
        entries: the matrix, shape (n, n) with n ≤ 2000, or its text from ``packed.pack``. The
            value holds the text, which makes it hashable and JSON-able.

    Raises:
        ValueError: if the matrix is not square, not finite, too large or all zero, or has entries
            above the diagonal.

    Example:
        >>> DenseWorkload(entries=[[1.0, 0.0], [0.5, 2.0]]).apply(np.array([1.0, 1.0]))
        array([1. , 2.5])
    """

    entries: str | npt.ArrayLike

    def __post_init__(self) -> None:
        text = self.entries
        if not isinstance(text, str):
            text = pack(text, "entries")
        object.__setattr__(self, "entries", text)
        if self.steps > _LARGEST_MATRIX:
            raise ValueError(
                f"entries is a matrix of {self.steps} steps: at most {_LARGEST_MATRIX} can be "
                "stored as a matrix; use a workload with a recursion, such as MomentumSGD"
            )
        if not self._dense.any():
            raise ValueError("entries are all zero, so there is no query to answer")

    def __repr__(self) -> str:
        return f"DenseWorkload(steps={self.steps})"  # the text of the entries has megabytes

    @functools.cached_property
    def _dense(self) -> Array:
        assert isinstance(self.entries, str)
        dense = unpack(self.entries, "entries")
        dense.setflags(write=False)
        return dense

    @property
    def steps(self) -> int:
        """n, the number of rows of A."""
        return len(self._dense)

    @property
    def is_toeplitz(self) -> bool:
        """False, whatever the entries: the matrix is for one n only."""
        return False

    def check(self, steps: int) -> None:
        """Refuse a run of another length than the matrix.

        Raises:
            ValueError: naming the matrix's length.
        """
        if steps != self.steps:
            raise ValueError(
                f"entries is a matrix of {self.steps} steps, but the run has {steps}: give A for "
                f"{steps} steps"
            )

    def apply(self, x: Array) -> Array:
        """``A @ x``."""
        self.check(x.shape[0])
        return self._dense @ x

    def adjoint(self, x: Array) -> Array:
        """``A.T @ x``."""
        self.check(x.shape[0])
        return self._dense.T @ x

    def matrix(self, steps: int) -> Array:
        """A, read-only, shape (n, n)."""
        self.check(steps)
        return self._dense
