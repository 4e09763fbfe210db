"""Small mechanisms whose trade-offs are known: pairs of laws on a few outputs, and Gaussians."""

from __future__ import annotations

import numpy as np

from dptrain.accounting import TradeOff
from dptrain.accounting.losses import gaussian
from dptrain.core import Kind


def hockey_stick(p, q, epsilon):
    return float(np.maximum(p - np.exp(epsilon) * q, 0.0).sum())


def random_pair(generator):
    """Two laws on 2 to 6 outputs; sometimes an output that only one of them has."""
    size = int(generator.integers(2, 7))
    p = generator.dirichlet(np.full(size, 1.0))
    ratio = np.exp(generator.uniform(-1, 1, size) * generator.choice([0.1, 0.5, 2.0]))
    q = p * ratio
    if generator.random() < 0.3:
        (p if generator.random() < 0.5 else q)[generator.integers(size)] = 0.0
    return p / p.sum(), q / q.sum()


def exact_trade_off(p, q):
    """δ at every ε at which it has a corner, in either direction."""
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = np.log(p / q)
    corners = np.abs(losses[np.isfinite(losses)])
    epsilon = np.unique(np.concatenate([[0.0], corners]))
    remove = tuple(hockey_stick(p, q, at) for at in epsilon)
    add = tuple(hockey_stick(q, p, at) for at in epsilon)
    # At ε = 0 both are the total variation; their sums are rounded differently.
    top = max(remove[0], add[0])
    return TradeOff(
        epsilon=tuple(epsilon.tolist()),
        remove=(top, *remove[1:]),
        add=(top, *add[1:]),
        floor=1e-6,
        kind=Kind.EXACT,
        accountant="enumeration",
    )


def gaussian_trade_off(mu, *, points=1001, least=1e-12):
    epsilon = gaussian.epsilon(least, mu) * np.linspace(0.0, 1.0, points) ** 2
    delta = tuple(gaussian.delta(epsilon, mu).tolist())
    return TradeOff(
        epsilon=tuple(epsilon.tolist()),
        remove=delta,
        add=delta,
        floor=1e-6,
        kind=Kind.EXACT,
        accountant="gaussian",
    )
