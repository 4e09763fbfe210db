"""SGD with momentum, weight decay and a learning-rate schedule, as a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from scipy.linalg.lapack import dtbtrs
from scipy.signal import lfilter

from dptrain.core import Array, checks
from dptrain.strategies.workloads import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentumSGD(Workload):
    """The workload of ``torch.optim.SGD`` on the gradients it is given (no dampening, no Nesterov).

    With momentum β, learning rates η_t and weight decay λ the optimizer computes
    m_t = β m_{t-1} + x_t + λ θ_{t-1} and θ_t = θ_{t-1} - η_t m_t, which is linear in the gradients:
    θ_t - (what it would be without them) = -(A x)_t. Without weight decay
    A_{t,j} = Σ_{s=j}^{t} η_s β^{s-j}. Steps count from 0; the sign is dropped.

    A product with A or its transpose takes O(n), by recursions. A single learning rate makes A
    Toeplitz, for any n; a schedule fits runs of its own length only.

    Args:
        momentum: β, 0 ≤ β < 1.
        learning_rates: η ≥ 0, one number for a constant rate or n numbers, not all zero. Without
            weight decay their scale changes errors by that factor and no optimum.
        weight_decay: λ ≥ 0.

    Raises:
        ValueError: if one of them is out of range, or the learning rates so large that weight decay
            alone diverges (η λ ≥ 2 (1 + β)).

    Example:
        >>> MomentumSGD(momentum=0.5).apply(np.array([1.0, 0.0, 0.0]))
        array([1.  , 1.5 , 1.75])
    """

    momentum: float = 0.9
    learning_rates: float | tuple[float, ...] = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        beta = checks.number("momentum", self.momentum, minimum=0, below=1)
        decay = checks.number("weight_decay", self.weight_decay, minimum=0)
        rates = self.learning_rates
        single = getattr(rates, "ndim", None) == 0 or not isinstance(rates, Iterable)
        name = "learning_rates"
        values = np.array([checks.number(name, rates)] if single else checks.numbers(name, rates))
        if not values.size:
            raise ValueError("learning_rates is empty: must be one number, or one per step")
        wrong = np.flatnonzero(values < 0)
        if wrong.size:
            raise ValueError(
                f"learning_rates: {values[wrong[0]]} at step {wrong[0]} must be at least 0"
            )
        if not values.any():
            raise ValueError("learning_rates are all zero: at least one must be positive")
        if values.max() * decay >= 2 * (1 + beta):
            raise ValueError(
                f"learning rate {values.max():g} times weight_decay={decay:g} must be less than "
                f"2(1 + momentum) = {2 * (1 + beta):g}, since otherwise the weights diverge: lower "
                "one of them"
            )
        object.__setattr__(self, "momentum", beta)
        object.__setattr__(self, "weight_decay", decay)
        stored = float(values[0]) if single else tuple(values.tolist())
        object.__setattr__(self, "learning_rates", stored)

    @property
    def is_toeplitz(self) -> bool:
        """True if the learning rate is a single number."""
        return not isinstance(self.learning_rates, tuple)

    def check(self, steps: int) -> None:
        """Refuse a run that is not as long as the schedule.

        Raises:
            ValueError: naming the schedule's length.
        """
        if isinstance(self.learning_rates, tuple) and len(self.learning_rates) != steps:
            raise ValueError(
                f"learning_rates has {len(self.learning_rates)} entries, but the run has {steps} "
                "steps: give one learning rate per step, or a single number"
            )

    def apply(self, x: Array) -> Array:
        """``A @ x``, by the optimizer's own recursion."""
        self.check(x.shape[0])
        if self.weight_decay:
            return self._decayed(x, transpose=False)
        rates = self._rates(x)
        return np.asarray(np.cumsum(rates * self._accumulate(x), axis=0))

    def adjoint(self, x: Array) -> Array:
        """``A.T @ x``, by the same recursions backwards in time."""
        self.check(x.shape[0])
        if self.weight_decay:
            return self._decayed(x, transpose=True)
        backwards = np.cumsum(x[::-1], axis=0) * self._rates(x)[::-1]
        return self._accumulate(backwards)[::-1]

    def _rates(self, x: Array) -> Array:
        """η, of a shape that multiplies the rows of x."""
        rates = np.broadcast_to(np.asarray(self.learning_rates), (x.shape[0],))
        return rates if x.ndim == 1 else rates[:, None]

    def _accumulate(self, x: Array) -> Array:
        """Σ_{j≤t} β^{t-j} x_j."""
        return np.asarray(lfilter([1.0], [1.0, -self.momentum], x, axis=0))

    def _decayed(self, x: Array, *, transpose: bool) -> Array:
        """A or its transpose times x with weight decay.

        With u = -θ the recursions are the lower-triangular system
        m_t - β m_{t-1} + λ u_{t-1} = x_t, u_t - u_{t-1} - η_t m_t = 0. In the order
        m_0, u_0, m_1, u_1, … its matrix has a unit diagonal and two diagonals below.
        """
        n = x.shape[0]
        bands = np.zeros((3, 2 * n), order="F")  # bands[i, k] is the entry at (k + i, k)
        bands[0] = 1.0
        bands[1, ::2] = -np.broadcast_to(np.asarray(self.learning_rates), (n,))
        bands[1, 1::2] = self.weight_decay
        bands[2, ::2] = -self.momentum
        bands[2, 1::2] = -1.0
        columns = x.reshape(n, -1)
        right = np.zeros((2 * n, columns.shape[1]), order="F")
        right[int(transpose) :: 2] = columns
        solution, info = dtbtrs(
            bands, right, uplo="L", trans="T" if transpose else "N", diag="U", overwrite_b=True
        )
        # A unit diagonal is never singular.
        checks.invariant(info == 0, "the matrix of the momentum is singular")
        return np.ascontiguousarray(solution[1 - int(transpose) :: 2]).reshape(x.shape)
