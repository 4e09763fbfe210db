"""Buffers of least error × sensitivity, by quasi-Newton steps on interlacing poles.

Interlacing poles of a buffered linear Toeplitz strategy as a smooth image of ℝ^{2d}.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from dptrain.core import Array
from dptrain.strategies.blt.forms import (
    inverse_column,
    partial_fractions,
    partial_fractions_adjoint,
    powers,
    powers_error,
    regular_norm,
)
from dptrain.strategies.toeplitz.error_loss import Loss, checked_objective, error_losses
from dptrain.strategies.workloads import PrefixSums, Workload

_LEAST_GAP = 1e-6  # share of the logarithmic range that two neighboring poles keep apart
# Least 1 - θ: slower buffers cannot be told from constant ones within n steps. The second bound
# keeps neighboring poles further apart than the rounding of θ, and thus interlacing.
_SLOWEST_PER_RUN = 1e-6
_SLOWEST = 1e-10


@dataclasses.dataclass(frozen=True)
class Chain:
    """Map from ℝ^{2d} onto interlacing poles, with its adjoint.

    The distances from one, p_1 < q_1 < p_2 < … < p_d < q_d of θ_1, θ̂_1, …, come from 2d - 1 points
    in a logarithmic range that starts far below 1/n and ends at 1, spaced by a softmax of the first
    2d - 1 variables (and a fixed one for the space above p_d). The last variable places q_d such
    that Σω = Σ(q_j - p_j) stays below 1. Interlacing is ω > 0 and ω̂ > 0, and Σω < 1 gives
    θ̂_d > -1, a stable C^-1, so that every point of ℝ^{2d} is an admissible strategy.
    """

    buffers: int
    steps: int
    box: float = 20.0  # bound on |x|: e^-20 of a gap is below _LEAST_GAP

    @property
    def range(self) -> float:
        """Length of the logarithmic range."""
        return -float(np.log(max(_SLOWEST_PER_RUN / self.steps, _SLOWEST)))

    def poles(self, x: Array) -> tuple[Array, Array]:
        """p and q, shape (d,) each."""
        chain = np.exp(self._places(x))
        p, q = chain[::2].copy(), np.empty(self.buffers)
        q[:-1] = chain[1::2]
        q[-1] = p[-1] + (1 - np.sum(q[:-1] - p[:-1])) * _sigmoid(x[-1])
        return p, q

    def adjoint(self, x: Array, to_p: Array, to_q: Array) -> Array:
        """Gradient in x, given those in p and q."""
        p, q = self.poles(x)
        share = _sigmoid(x[-1])
        room = 1 - np.sum(q[:-1] - p[:-1])
        to_chain = np.empty(2 * self.buffers - 1)
        to_chain[::2], to_chain[1::2] = to_p, to_q[:-1] - to_q[-1] * share
        to_chain[:-1:2] += to_q[-1] * share
        to_chain[-1] += to_q[-1]
        to_chain *= np.exp(self._places(x))
        softmax = _softmax(x)
        to_gaps = np.append(np.cumsum(to_chain[::-1])[::-1], 0.0)
        to_gaps *= self._free
        gradient = np.empty(2 * self.buffers)
        gradient[:-1] = (softmax * (to_gaps - softmax @ to_gaps))[:-1]
        gradient[-1] = to_q[-1] * room * share * (1 - share)
        return gradient

    def spaced(self, slowest: float) -> tuple[Array, Array]:
        """p and q with equally spaced logarithms from ``slowest`` < 1 on."""
        logs = np.log(slowest) * (1 - np.arange(2 * self.buffers) / (2 * self.buffers))
        return np.exp(logs[::2]), np.exp(logs[1::2])

    def variables(self, p: Array, q: Array) -> Array:
        """An x with about these ``poles``: exact up to the limits of the map."""
        chain = np.stack([p, q], axis=1).ravel()[:-1]
        gaps = np.diff(np.log(chain), prepend=-self.range, append=0.0)
        x = np.empty(2 * self.buffers)
        free = np.log(np.maximum(gaps - _LEAST_GAP * self.range, 1e-8))
        x[:-1] = (free - free[-1])[:-1]
        share = (q[-1] - p[-1]) / (1 - np.sum(q[:-1] - p[:-1]))
        x[-1] = np.log(share / (1 - share)) if 0 < share < 1 else np.copysign(self.box, share - 0.5)
        return np.clip(x, -self.box, self.box)

    @property
    def _free(self) -> float:
        """The part of the range left after the least gaps; the softmax shares it out."""
        return self.range * (1 - 2 * self.buffers * _LEAST_GAP)

    def _places(self, x: Array) -> Array:
        """Logarithms of p_1, q_1, …, p_d."""
        gaps = self._free * _softmax(x) + _LEAST_GAP * self.range
        return -self.range + np.cumsum(gaps)[:-1]


def _softmax(x: Array) -> Array:
    """The softmax of all variables but the last, and a zero: positive, sum 1."""
    powers = np.exp(np.append(x[:-1], 0.0))
    shares: Array = powers / powers.sum()
    return shares


def _sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


_ITERATIONS = 100  # of a descent that others compete with
_LAST_ITERATIONS = 400
_FAST_STARTS = (0.1, 0.9)  # 1 - θ of the slowest buffer

PolesLoss = Callable[[Array, Array], tuple[float, Array, Array]]


class Point(NamedTuple):
    """Poles 1 - p of C and 1 - q of C^-1, and the logarithm of squared error × sensitivity."""

    loss: float
    p: Array
    q: Array


def poles_errors(workload: Workload, steps: int, objective: str) -> tuple[PolesLoss, ...]:
    """Squared error of the BLT with poles 1 - p of C and 1 - q of C^-1, and gradients in p and q.

    Closed form, O(d²), for prefix sums; otherwise ``error_losses`` of the first column of C^-1,
    O(n·d) more than the workload itself takes. Where there are several, each is to be minimized
    from the optimum of the one before.
    """
    if isinstance(workload, PrefixSums):
        return (_prefix_sums_error(steps, checked_objective(objective)),)
    losses = error_losses(workload, steps, objective)
    return tuple(_column_error(loss, steps) for loss in losses)


def _prefix_sums_error(steps: int, objective: str) -> PolesLoss:
    def error(p: Array, q: Array) -> tuple[float, Array, Array]:
        ratios = np.concatenate([[0.0], q])
        weights = partial_fractions(ratios, p)
        value, to_ratios, to_weights = powers_error(ratios, weights, steps, objective)
        through, to_p = partial_fractions_adjoint(ratios, p, weights, to_weights)
        return value, to_p, (to_ratios + through)[1:]

    return error


def _column_error(of_column: Loss, steps: int) -> PolesLoss:
    def error(p: Array, q: Array) -> tuple[float, Array, Array]:
        omega_hat = -partial_fractions(q, p)
        value, to_g = of_column(inverse_column(q, omega_hat, steps))
        table = np.stack([powers(distance, steps - 1) for distance in q.tolist()], axis=1)
        to_omega_hat = -(to_g[1:] @ table)
        # d(1-q)^t = -t (1-q)^(t-1) dq
        direct = omega_hat * ((to_g[2:] * np.arange(1, steps - 1)) @ table[:-1])
        through, to_p = partial_fractions_adjoint(q, p, -omega_hat, -to_omega_hat)
        return value, to_p, direct + through

    return error


def poles_cost(steps: int, max_participations: int, min_sep: int) -> PolesLoss:
    """Squared sensitivity of the same BLT (Σω ≤ 1) and its gradients in p and q."""

    def cost(p: Array, q: Array) -> tuple[float, Array, Array]:
        omega = partial_fractions(p, q)
        value, to_p, to_omega = regular_norm(p, omega, steps, max_participations, min_sep)
        through, to_q = partial_fractions_adjoint(p, q, omega, to_omega)
        return value, to_p + through, to_q

    return cost


def optimal_buffers(
    *,
    buffers: int,
    steps: int,
    objective: str,
    workload: Workload,
    max_participations: int,
    min_sep: int,
) -> tuple[Array, Array]:
    """θ and ω that minimize error × sensitivity for (n, m, b), with Σω ≤ 1.

    L-BFGS-B over the variables of ``Chain``. The loss has local minima, some with a buffer of
    no use, so that several descents compete: from equally spaced logarithms of 1 - θ and 1 - θ̂, as
    the poles of good rational approximations of a square root are, and adding buffer after buffer.
    The slowest pole of such a start is as slow as participations are apart, or fast (0.1 and 0.9):
    where they are few steps apart the optimum may have only fast buffers.

    Args:
        buffers: d.
        steps: n.
        objective: ``"mean"`` or ``"max"`` (see ``final_error_loss``).
        workload: A.
        max_participations: m, with (m - 1) b < n.
        min_sep: b.

    Returns:
        θ descending and ω, shape (d,) each.
    """
    if steps == 1:  # C is the 1×1 identity whatever the buffers
        p, q = Chain(buffers=buffers, steps=steps).spaced(0.5)
        return 1 - p, partial_fractions(p, q)
    cost = poles_cost(steps, max_participations, min_sep)
    losses = [_product(error, cost) for error in poles_errors(workload, steps, objective)]
    apart = min_sep if max_participations > 1 else steps
    best = _greedy(losses[0], buffers, steps, min(0.5, 10 / apart))
    for slowest in (min(0.5, 1 / apart), min(0.5, 10 / apart), *_FAST_STARTS):
        start = Chain(buffers=buffers, steps=steps).spaced(slowest)
        best = min(best, _descend(losses[0], *start, steps), key=_by_loss)
    for loss in losses:
        best = _descend(loss, best.p, best.q, steps, iterations=_LAST_ITERATIONS)
    if not np.isfinite(best.loss):
        raise RuntimeError(
            f"no optimum found for buffers={buffers}, steps={steps}: use fewer buffers"
        )
    theta = 1 - best.p  # what is kept is θ, so that ω must belong to its 1 - θ and not to p
    return theta, partial_fractions(1 - theta, best.q)


def _product(error: PolesLoss, cost: PolesLoss) -> PolesLoss:
    """log(error · cost) and its gradients."""

    def loss(p: Array, q: Array) -> tuple[float, Array, Array]:
        first, first_p, first_q = error(p, q)
        second, second_p, second_q = cost(p, q)
        value = float(np.log(first) + np.log(second))
        return value, first_p / first + second_p / second, first_q / first + second_q / second

    return loss


def _by_loss(point: Point) -> float:
    return point.loss


def _descend(
    loss: PolesLoss, p: Array, q: Array, steps: int, iterations: int = _ITERATIONS
) -> Point:
    """A local minimum from these poles, or a point on the way there."""
    chain = Chain(buffers=p.size, steps=steps)

    def in_chain(x: Array) -> tuple[float, Array]:
        value, to_p, to_q = loss(*chain.poles(x))
        return value, chain.adjoint(x, to_p, to_q)

    result = minimize(
        in_chain,
        chain.variables(p, q),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-chain.box, chain.box)] * (2 * p.size),
        options={"gtol": 1e-8, "ftol": 1e-12, "maxcor": 30, "maxiter": iterations},
    )
    return Point(float(result.fun), *chain.poles(result.x))


def _greedy(loss: PolesLoss, buffers: int, steps: int, slowest: float) -> Point:
    """Buffer after buffer: the optimum of one less, and another pair of poles.

    The pair goes where it helps most before the descent, to the slow end or to the fast end: local
    minima waste a buffer where one at an end was needed.
    """
    best = _descend(loss, *Chain(buffers=1, steps=steps).spaced(slowest), steps)
    for _ in range(buffers - 1):
        candidates = list(_insertions(best.p, best.q, steps))
        helpful = min(candidates, key=lambda poles: loss(*poles)[0])
        starts = (helpful, candidates[0], candidates[-1])
        best = min((_descend(loss, *start, steps) for start in starts), key=_by_loss)
    return best


def _insertions(p: Array, q: Array, steps: int) -> Iterator[tuple[Array, Array]]:
    """One more pair of poles at several places of every gap of the chain, a tenth of it apart.

    The slowest come first, the fastest last.
    """
    chain = np.sort(np.concatenate([p, q]))[:-1]
    ends = np.log([min(2e-3 / steps, chain[0] / 2), 1.0])
    for low, high in itertools.pairwise([ends[0], *np.log(chain), ends[1]]):
        for place in (0.2, 0.4, 0.6, 0.8):
            pair = np.exp(low + (high - low) * np.array([place - 0.05, place + 0.05]))
            longer = np.sort(np.concatenate([chain, pair]))
            room = 1 - np.sum(longer[1::2] - longer[:-1:2])
            last = longer[-1] + room * min(0.9, max(0.1, q[-1] - p[-1]))
            yield longer[::2], np.append(longer[1::2], last)
