"""δ(ε) of runs of one to three steps by quadrature of a non-negative integrand.

Entries of C are non-negative, so P/Q grows with every coordinate of y: for given first n - 1
coordinates the last one has a single threshold, found by bisection, beyond which the integrand is
smooth. Nothing is subtracted, so that even δ = 1e-12 keeps its digits. Every coordinate is
integrated by Gauss-Legendre panels. Those of the first coordinates crowd around the point where
the threshold of the rest runs off to -∞: with t the distance from there, the rest of the integral
behaves like exp(-a log² t), infinitely smooth but steep on every scale.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from tests.oracles.enumeration import Array, Law, log_ratio

REACH = 11.0  # in σ, beyond every mean: what lies outside has mass below 1e-27
FAR = 1e4  # in σ: stands for -∞
CHUNK = 512  # points of the first coordinates at a time, so that the arrays fit into caches


def _gauss(edges: Array, order: int) -> tuple[Array, Array]:
    """Nodes and weights, both (k, panels·order), on the panels between edges (k, panels + 1)."""
    x, w = np.polynomial.legendre.leggauss(order)
    width = np.diff(edges, axis=1)[:, :, None]
    nodes = edges[:, :-1, None] + width * (x + 1) / 2
    return nodes.reshape(len(edges), -1), (width * w / 2).reshape(len(edges), -1)


def _extend(first: Array, new: Array) -> Array:
    """Points (k, d) and a next coordinate (k, m) for each, joined to points (k, m, d + 1)."""
    repeated = np.broadcast_to(first[:, None, :], (*new.shape, first.shape[1]))
    return np.concatenate([repeated, new[:, :, None]], axis=-1)


def delta(law: Law, matrix: Array, sigma: float, epsilon: float, *, remove: bool) -> float:
    """δ(ε) of (P, Q) if ``remove``, of (Q, P) if not: to 1e-8, at three steps to about 1e-4."""
    assert (matrix >= 0).all()
    assert law.steps <= 3
    order, closest = (10, 1e-6) if law.steps <= 2 else (5, 1e-2)
    panels = math.ceil(2 - 2 * math.log10(closest))
    graded = np.append(0.0, np.geomspace(closest, 1.0, panels))  # in σ; then panels of 1σ
    top = (law.patterns @ matrix.T).max(axis=0) + REACH * sigma
    level = epsilon if remove else -epsilon

    def crossing(first: Array) -> Array:
        """Where P/Q reaches the level in the next coordinate if all later ones are at -∞."""
        left = np.full(len(first), -REACH * sigma)
        right = np.full(len(first), top[first.shape[1]])
        rest = law.steps - 1 - first.shape[1]
        for _ in range(45):
            middle = (left + right) / 2
            y = _extend(first, middle[:, None])[:, 0]
            y = np.hstack([y, np.full((len(y), rest), -FAR * sigma)])
            below = log_ratio(law, matrix, sigma, y) < level
            left, right = np.where(below, middle, left), np.where(below, right, middle)
        return (left + right) / 2  # an end of the interval if there is no crossing within it

    points, weights = np.zeros((1, 0)), np.ones(1)
    for step in range(law.steps - 1):
        outward = np.append(graded, np.arange(2.0, top[step] / sigma + REACH + 1)) * sigma
        edges = crossing(points)[:, None] + np.append(-outward[:0:-1], outward)
        nodes, new = _gauss(np.clip(edges, -REACH * sigma, top[step]), order)
        points = _extend(points, nodes).reshape(-1, step + 1)
        weights = (weights[:, None] * new).ravel()
    threshold = crossing(points)[:, None]
    shares = np.linspace(0.0, 1.0, 25 if law.steps <= 2 else 13)
    if remove:  # the ratio lies above the level beyond the threshold
        edges = threshold + (top[-1] - threshold) * shares
    else:
        edges = -REACH * sigma + (threshold + REACH * sigma) * shares
    last, new = _gauss(edges, order)

    total = 0.0
    for part in np.array_split(np.arange(len(points)), 1 + points.shape[0] // CHUNK):
        y = _extend(points[part], last[part])
        log_q = (y * y).sum(axis=-1) / (-2 * sigma**2)
        log_q -= law.steps * math.log(sigma * math.sqrt(2 * math.pi))
        ratio = log_ratio(law, matrix, sigma, y)
        if remove:  # Q (P/Q - e^ε)
            inside = np.exp(log_q + ratio) * -np.expm1(np.minimum(epsilon - ratio, 0.0))
        else:  # Q (1 - e^ε P/Q)
            inside = np.exp(log_q) * -np.expm1(np.minimum(epsilon + ratio, 0.0))
        total += float(weights[part] @ (inside * new[part]).sum(axis=1))
    return total


def epsilon(law: Law, matrix: Array, sigma: float, target: float, *, remove: bool) -> float:
    """The least ε ≥ 0 with δ(ε) ≤ target, to 1e-9."""

    def excess(at: float) -> float:
        value = delta(law, matrix, sigma, at, remove=remove)
        return math.log(max(value, 1e-300) / target)

    if excess(0.0) <= 0:
        return 0.0
    top = 1.0
    while excess(top) > 0:
        top *= 2
    return float(brentq(excess, 0.0, top, xtol=1e-9, rtol=1e-12))


def gaussian_delta(at: float, mu: float) -> float:
    """The closed form Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2)."""
    tail = math.exp(at + norm.logcdf(-at / mu - mu / 2))
    return float(norm.cdf(-at / mu + mu / 2) - tail)
