"""Closed forms of buffered linear Toeplitz strategies: inverse, error and sensitivity.

Everywhere a pole θ is given by its distance p = 1 - θ from one; poles of slow buffers differ from
one by about 1/n. With u = 1/x the strategy is the rational function

    c = 1 + Σ_j ω_j/(u - θ_j) = Π_j (u - θ̂_j)/(u - θ_j),

so that 1/c is of the same form with θ and θ̂ exchanged (Dvijotham, McMahan, Pillutla, Steinke &
Thakurta 2024, arXiv 2404.16706; docs/theory/strategies.md#thm-blt-inverse). For ω > 0 the roots
interlace: θ_1 > θ̂_1 > θ_2 > … > θ_d > θ̂_d, and only θ̂_d can leave (-1, 1).
"""

from __future__ import annotations

import numpy as np
from scipy.linalg.lapack import dlasd4

from dptrain.core import Array
from dptrain.strategies.blt.geometric_sums import geometric, geometric_moments, weighted_geometric

# Below this weight a buffer changes no entry of C or C^-1 in float64, and its θ̂ equals θ.
_NO_WEIGHT = 1e-100


def inverse_poles(p: Array, omega: Array) -> tuple[Array, Array]:
    """Poles and weights of C^-1: g_0 = 1 and g_t = -Σ_i ω̂_i θ̂_i^{t-1}, with ω̂ > 0.

    The θ̂ solve 1 = Σ_j ω_j/(q - p_j) for q = 1 - θ̂: q are the eigenvalues of diag(p) + √ω √ωᵀ.
    LAPACK's secular equation solver gives the differences p_j - q_i to full relative precision,
    which ω̂_i = 1/Σ_j ω_j/(q_i - p_j)² needs where roots nearly meet.

    Args:
        p: 1 - θ, distinct, in (0, 1), shape (d,).
        omega: ω ≥ 0, shape (d,).

    Returns:
        q ascending and ω̂, of shape (number of buffers with a weight,).
    """
    kept = np.flatnonzero(omega > _NO_WEIGHT)
    kept = kept[np.argsort(p[kept])]
    p, omega = p[kept], omega[kept]
    if p.size == 0:
        return np.zeros(0), np.zeros(0)
    if p.size == 1:
        return p + omega, omega.copy()
    q, weights = np.empty(p.size), np.empty(p.size)
    total = float(omega.sum())
    for i in range(p.size):
        below, root, above, info = dlasd4(i, np.sqrt(p), np.sqrt(omega / total), total)
        if info != 0:
            raise ArithmeticError(f"secular equation {i} of p={p}, omega={omega} has no root")
        q[i] = root**2
        weights[i] = 1 / np.sum(omega / (below * above) ** 2)
    return q, weights


def powers(q: float, count: int) -> Array:
    """(1 - q)^t for t < ``count`` and q ≥ 0: shape (count,)."""
    if q == 1:
        first: Array = np.eye(1, count)[0]
        return first
    ratio = 1 - q
    table: Array = np.exp(np.arange(count) * (np.log1p(-q) if ratio > 0 else np.log(-ratio)))
    if ratio < 0:
        table[1::2] *= -1
    return table


def sum_of_powers(q: Array, weights: Array, count: int) -> Array:
    """Σ_i w_i (1 - q_i)^t for t < ``count``: shape (count,)."""
    total = np.zeros(count)
    for distance, weight in zip(q.tolist(), weights.tolist(), strict=True):
        total += weight * powers(distance, count)
    return total


def inverse_column(q: Array, omega_hat: Array, steps: int) -> Array:
    """g_0 = 1, g_t = -Σ_i ω̂_i θ̂_i^{t-1}: shape (steps,)."""
    return np.concatenate([[1.0], -sum_of_powers(q, omega_hat, steps - 1)])


def prefix_weights(p: Array, omega: Array, q: Array, omega_hat: Array) -> tuple[Array, Array]:
    """w = A C^-1 e_0 for prefix sums A as a sum of powers: w_t = Σ_i a_i (1 - r_i)^t.

    1/(c (1-x)) has the poles 1 and θ̂, with weights 1/c(1) and ω̂_i/q_i: all positive, sum 1.

    Returns:
        r = (0, q) and a, shape (1 + len(q),).
    """
    weights = np.concatenate([[1 / (1 + np.sum(omega / p))], omega_hat / q])
    return np.concatenate([[0.0], q]), weights


def powers_error(r: Array, a: Array, steps: int, objective: str) -> tuple[float, Array, Array]:
    """Squared error of w_t = Σ_i a_i (1 - r_i)^t, and its gradients in r and a.

    ``"mean"``: Σ_{t<n} (n-t) w_t² = ‖A C^-1‖_F²; ``"max"``: Σ_{t<n} w_t², its last row.
    """
    ratio = r[:, None] + r[None, :] - np.outer(r, r)  # negative where both powers grow
    value, slope = (weighted_geometric if objective == "mean" else geometric)(ratio, steps)
    weighted = value @ a
    return float(a @ weighted), 2 * a * (slope @ (a * (1 - r))), 2 * weighted


def partial_fractions(poles: Array, zeros: Array) -> Array:
    """Weights w_i of Π_j (u - z_j)/Π_k (u - y_k) = (polynomial) + Σ_i w_i/(u - y_i).

    Poles and zeros are given as 1 - y and 1 - z; all differ from each other.
    """
    apart = poles[None, :] - poles[:, None]
    np.fill_diagonal(apart, 1.0)
    weights: Array = np.prod(zeros[None, :] - poles[:, None], axis=1) / np.prod(apart, axis=1)
    return weights


def partial_fractions_adjoint(
    poles: Array, zeros: Array, weights: Array, gradient: Array
) -> tuple[Array, Array]:
    """Gradients in poles and zeros, given the one in ``partial_fractions``' weights."""
    scaled = (gradient * weights)[:, None]
    to_zeros = scaled / (zeros[None, :] - poles[:, None])
    apart = poles[None, :] - poles[:, None]
    np.fill_diagonal(apart, np.inf)
    to_poles = scaled / apart
    return to_poles.sum(axis=1) - to_poles.sum(axis=0) - to_zeros.sum(axis=1), to_zeros.sum(axis=0)


def regular_norm(p: Array, omega: Array, steps: int, m: int, b: int) -> tuple[float, Array, Array]:
    """‖C x‖² for x with ones at 0, b, …, (m-1)b, and its gradients in p and ω.

    From participation k to the next, y = C x is a sum of powers: y_{kb} = 1 + Σ_j v_j S_{k-1,j}
    with v_j = ω_j θ_j^{b-1}, and y_{kb+s} = Σ_j ω_j θ_j^{s-1} S_{k,j}, where
    S_{k,j} = Σ_{i≤k} θ_j^{ib}. Each segment's Σ_s y² is d² geometric sums; the last one ends at n.
    The work is O(√m d²). This is the squared sensitivity
    (docs/theory/strategies.md#thm-blt-sensitivity).

    Args:
        p: 1 - θ, shape (d,).
        omega: ω, shape (d,).
        steps: n.
        m: number of participations, (m - 1) b < n.
        b: steps between two of them.
    """
    theta, log = 1 - p, np.log1p(-p)
    before = np.exp((b - 1) * log)  # θ^(b-1)
    period = -np.expm1(b * log)  # 1 - θ^b
    ratio = p[:, None] + p[None, :] - np.outer(p, p)
    inside, inside_slope = geometric(ratio, b - 1)
    tail, tail_slope = geometric(ratio, steps - (m - 1) * b - 1)
    moments = geometric_moments(period, m - 1)
    final, final_slope = geometric(period, m)
    v = omega * before
    to_inside, to_tail = (moments.product * inside) @ omega, final * (tail @ (final * omega))
    value = m + 2 * v @ moments.total + v @ moments.product @ v
    value += omega @ to_inside + omega @ to_tail

    to_v = 2 * moments.total + 2 * moments.product @ v
    to_omega = to_v * before + 2 * to_inside + 2 * to_tail
    to_ratio = np.outer(omega, omega) * (
        moments.product * inside_slope + np.outer(final, final) * tail_slope
    )
    to_period = (
        2 * v * (moments.total_slope + moments.product_slope @ v)
        + 2 * omega * ((moments.product_slope * inside) @ omega)
        + 2 * omega * final_slope * (tail @ (final * omega))
    )
    to_p = 2 * to_ratio @ theta + to_period * b * before - to_v * v * (b - 1) / theta
    return float(value), to_p, to_omega
