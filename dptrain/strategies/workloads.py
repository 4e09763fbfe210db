"""Workloads A: which linear combinations of the steps' gradients the noise should not spoil."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod

import numpy as np

from dptrain.core import Array, JsonValue, checks


class Workload(JsonValue, ABC, family="workload"):
    """Lower-triangular n×n matrix A, as an immutable value.

    Row t says what the run's output after step t is made of: the released gradients x_0, …, x_t
    count in it as (A x)_t. A strategy C answers with the error A C^-1 Z.
    """

    @property
    def is_toeplitz(self) -> bool:
        """Whether A_{t,j} depends on t - j only, so that A is its first column for any n."""
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
