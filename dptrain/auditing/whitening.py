"""The matrix by which a reader of all noisy sums turns them into one Gaussian vector."""

from __future__ import annotations

import numpy as np

from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism


def whitening_matrix(mechanism: MatrixMechanism) -> Array:
    """The lower triangular M with M (x + σ w) = M x + σ z, for the noise w = W Z of the steps.

    w has the covariance W Wᵀ, so M is the inverse of its Cholesky factor and z is standard normal.
    Where C is square M is C itself. A tree's C has more rows than columns, and M is as good as C
    if W is its pseudo-inverse: then MᵀM = CᵀC. From any other left inverse less can be learnt than
    from C x + σ z, and M is what can be.

    Returns:
        Shape (n, n), float64.
    """
    strategy, steps = mechanism.strategy, mechanism.steps
    if strategy.rows(steps) == steps:
        return np.asarray(strategy.columns(steps, np.arange(steps)), dtype=np.float64)
    noise = strategy.solve(np.eye(strategy.rows(steps)))
    factor = np.linalg.cholesky(noise @ noise.T)
    return np.tril(np.linalg.solve(factor, np.eye(steps)))
