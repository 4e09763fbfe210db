"""Least error times sensitivity over the coefficients of a banded C^-1, with an exact gradient."""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from dptrain.core import Array
from dptrain.strategies.binding import participations
from dptrain.strategies.toeplitz.error_loss import Loss, final_error_loss, regular_cost
from dptrain.strategies.toeplitz.square_root_series import inverse_square_root_coefficients
from dptrain.strategies.toeplitz.toeplitz import envelope, impulse_response
from dptrain.strategies.workloads import PREFIX_SUMS, Workload

_LARGEST_HAZARD = 20.0  # per gap; exp(-20) is as good as no survival
_ROUNDS = 5  # starts of the quasi-Newton method, each from the last result: kinks can stop it early
_WORTH_A_ROUND = 1e-6  # gain in log(squared error × squared sensitivity)
_COARSER = 4  # how much shorter the run is that provides the start
_SHORTEST = 100  # steps; and at least 8 per coefficient
_LARGEST_FREE = 1 << 18  # steps × coefficients up to which signs are freed: seconds
_WISH = 1e-4  # slope of the loss at a_k = 0 from which on a negative a_k is worth a search
_FLOOR = 1e-3  # of c relative to that of the start: what the search for free signs aims at
_LEAST_SCALE = 1e-11  # of that start, relative to c_0
_KEPT = 1e-14  # what c may come down to; rounding is less
_STIFFNESS = 1.0  # of the floor at first
_FREE_ROUNDS = 16


def envelope_cost(c: Array, m: int, b: int) -> tuple[float, Array]:
    """An upper bound on the squared sensitivity of c ≥ 0, and a (sub)gradient in c, shape (n,).

    The cost of the least sequence above c that does not increase from lag b on
    (``Toeplitz.sensitivity``): where c is such a sequence itself, or m = 1, the squared
    sensitivity. So an optimizer gains nothing by coefficients that are small just where the
    regular pattern looks.
    """
    if m == 1:
        return regular_cost(c, 1, b)
    above = envelope(c, b)
    cost, gradient = regular_cost(above, m, b)
    reached = above == c
    if not reached.all():
        # Entry k of the envelope is the next coefficient from k on that reaches it.
        own = np.where(reached, np.arange(c.size), c.size)
        index = np.minimum.accumulate(own[::-1])[::-1]
        gradient = np.bincount(index, weights=gradient, minlength=c.size).astype(np.float64)
        gradient = gradient[: c.size]  # what is not a number is reached nowhere
    return cost, gradient


def inverse_log_loss(error: Loss, steps: int, m: int, b: int) -> Loss:
    """log(squared error × ``envelope_cost``) as a function of a = (-g_1, …, -g_{p-1}), g_0 = 1.

    With c = 1/g and dc = -c * dg * c (convolutions), ∂cost/∂g_k = -Σ_t v_t c_{t-k} for
    v = Cᵀ ∂cost/∂c, the recursion 1/g run backwards in time. O(n·p) in all.

    Args:
        error: squared error as a function of g padded to n (``final_error_loss``).
        steps: n.
        m: participations.
        b: their separation.

    Returns:
        A function of a, shape (p - 1,), a ≥ 0, that returns the loss and its gradient in a.
    """
    padded = np.zeros(steps)

    def loss(a: Array) -> tuple[float, Array]:
        p = a.size + 1
        padded[0], padded[1:p] = 1.0, -a
        g = padded[:p]
        c = impulse_response(g, steps)
        squared, slope = error(padded)
        cost, cost_slope = envelope_cost(c, m, b)
        v = np.ascontiguousarray(lfilter([1.0], g, cost_slope[::-1])[::-1])
        # einsum, as BLAS would start threads for every one of these short products.
        through_c = np.array([np.einsum("i,i", v[k:], c[: steps - k]) for k in range(1, p)])
        return float(np.log(squared) + np.log(cost)), through_c / cost - slope[1:p] / squared

    return loss


def from_hazards(h: Array) -> Array:
    """a_k = exp(-Σ_{j<k} h_j) (1 - exp(-h_k)), shape (p - 1,): for h ≥ 0 any a ≥ 0 with Σ a < 1.

    c = 1/g is a renewal sequence: c_t is the probability of an event at t when the gaps between
    events have the law a (or no event follows). h_k is the hazard of a gap of k, integrated.
    """
    return np.exp(-_before(h)) * -np.expm1(-h)


def to_hazards(a: Array) -> Array:
    """The h of ``from_hazards``, for Σ a < 1."""
    return -np.log1p(-a / (1 - _before(a)))


def hazard_slope(h: Array, slope: Array) -> Array:
    """Gradient in h of a function with gradient ``slope`` in a = from_hazards(h)."""
    weighted = from_hazards(h) * slope
    later = np.cumsum(weighted[::-1])[::-1] - weighted
    return np.exp(-_before(h) - h) * slope - later


def _before(x: Array) -> Array:
    """Sums of the entries before each."""
    return np.concatenate([[0.0], np.cumsum(x[:-1])])


def above_floor(loss: Loss, scale: Array, multipliers: Array, stiffness: float) -> Loss:
    """The augmented Lagrangian of c ≥ φ·scale, φ = ``_FLOOR`` (Hestenes 1969, Powell 1969).

    loss + (1/2ρ) Σ_t ((λ_t - ρ(c_t/scale_t - φ))_+² - λ_t²), with the gradient in a as in
    ``inverse_log_loss``.
    """
    steps = scale.size

    def bounded(a: Array) -> tuple[float, Array]:
        value, slope = loss(a)
        g = np.concatenate([[1.0], -a])
        c = impulse_response(g, steps)
        below = np.maximum(multipliers - stiffness * (c / scale - _FLOOR), 0.0)
        if not below.any():
            return value, slope
        v = np.ascontiguousarray(lfilter([1.0], g, -(below / scale)[::-1])[::-1])
        through_c = np.array([np.einsum("i,i", v[k:], c[: steps - k]) for k in range(1, g.size)])
        more = (below @ below - multipliers @ multipliers) / (2.0 * stiffness)
        return value + float(more), slope + through_c

    return bounded


def with_free_signs(loss: Loss, a: Array, steps: int) -> Array:
    """A better a of any signs whose c is positive for ``steps`` steps, or ``a`` itself.

    Only c ≥ 0 is needed for the sensitivity; a ≥ 0 is sufficient for it. Augmented Lagrangian
    steps may leave c ≥ 0 on the way; only what keeps to it in the end counts.
    """
    best, found = loss(a)[0], a
    scale = np.maximum(impulse_response(np.concatenate([[1.0], -a]), steps), _LEAST_SCALE)
    multipliers, stiffness, last = np.zeros(steps), _STIFFNESS, np.inf
    for _ in range(_FREE_ROUNDS):
        # A long step makes c grow past all numbers; the line search then takes a shorter one.
        with np.errstate(over="ignore", invalid="ignore"):
            result = minimize(
                above_floor(loss, scale, multipliers, stiffness),
                a,
                jac=True,
                method="L-BFGS-B",
                options={"gtol": 1e-9, "ftol": 1e-14, "maxcor": 20, "maxiter": 300},
            )
        if not np.isfinite(result.fun):
            break
        a = result.x
        c = impulse_response(np.concatenate([[1.0], -a]), steps)
        room = c / scale - _FLOOR
        value, missing = loss(a)[0], max(0.0, -float(room.min()))
        if c.min() >= _KEPT and value < best:
            best, found = value, a
        multipliers = np.maximum(multipliers - stiffness * room, 0.0)
        if missing > 0.25 * last:
            stiffness *= 10.0
        last = missing
    return found


def optimal_inverse_coefficients(
    *,
    steps: int,
    inverse_bands: int,
    objective: str,
    workload: Workload,
    max_participations: int,
    min_sep: int,
) -> Array:
    """Coefficients g of C^-1, ‖c‖₂ = 1, of least error(workload) × sensitivity.

    Quasi-Newton (L-BFGS-B) over g_0 = 1, g_k ≤ 0 and Σ_k |g_k| < 1, so that c stays in [0, 1] all
    along. Given the signs nothing is lost by the sum: a c that does not increase has it, since
    g(x)/(1 - x) = 1/((1 - x) c(x)) is then one over 1 - (non-negative terms), and its coefficients
    1 - Σ_{j≤k} |g_j| are not negative. It is imposed by optimizing ``from_hazards``.

    Where the loss would fall further with some g_k > 0, as it does from about
    ``inverse_bands = min_sep / 2`` on, these are searched too (``with_free_signs``), from here
    and from half as many coefficients, while n·inverse_bands ≤ 2^18.

    The start is the optimum of a run a quarter as long, for prefix sums, or the banded inverse
    square root where that is better; so the result is no worse than BISR. The loss is smooth
    unless ``inverse_bands > min_sep``, where kinks of ``envelope_cost`` may end the search some
    0.1 % above the optimum.

    Returns:
        Shape (inverse_bands,), float64.
    """
    if inverse_bands == 1:
        return np.ones(1)
    m, b = participations(steps, max_participations, min_sep)
    loss = inverse_log_loss(final_error_loss(workload, steps, objective), steps, m, b)

    def of_hazards(h: Array) -> tuple[float, Array]:
        value, slope = loss(from_hazards(h))
        return value, hazard_slope(h, slope)

    starts = [-inverse_square_root_coefficients(inverse_bands)[1:]]
    if steps >= _COARSER * max(_SHORTEST, 8 * inverse_bands):
        shorter = optimal_inverse_coefficients(
            steps=steps // _COARSER,
            inverse_bands=inverse_bands,
            objective=objective,
            workload=PREFIX_SUMS,
            max_participations=m,
            min_sep=max(1, b // _COARSER),
        )
        starts.append(-shorter[1:] / shorter[0])
    h = to_hazards(min(starts, key=lambda a: loss(a)[0]))
    first = value = of_hazards(h)[0]
    for _ in range(_ROUNDS):
        result = minimize(
            of_hazards,
            h,
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.0, _LARGEST_HAZARD)] * h.size,
            options={"gtol": 1e-8, "ftol": 1e-13, "maxcor": 20, "maxiter": 500},
        )
        if not (np.isfinite(result.fun) and result.fun <= first):
            raise RuntimeError(
                f"no optimum found for steps={steps}, inverse_bands={inverse_bands}: "
                f"{result.message}; use BISR"
            )
        h, gain, value = result.x, value - result.fun, result.fun
        if gain < _WORTH_A_ROUND or result.status == 1:  # 1: out of iterations, not stuck
            break
    a = from_hazards(h)
    slope = loss(a)[1]
    wished = (a < _WORTH_A_ROUND) & (slope > _WISH)
    if wished.any() and steps * inverse_bands <= _LARGEST_FREE:
        fewer = optimal_inverse_coefficients(
            steps=steps,
            inverse_bands=inverse_bands // 2,
            objective=objective,
            workload=workload,
            max_participations=m,
            min_sep=b,
        )
        padded = np.pad(-fewer[1:] / fewer[0], (0, inverse_bands - fewer.size))
        tried = [with_free_signs(loss, each, steps) for each in (a, padded)]
        a = min(tried, key=lambda each: loss(each)[0])
    g = np.concatenate([[1.0], -a]) + 0.0  # no negative zeros
    return np.asarray(g * np.linalg.norm(impulse_response(g, steps)))
