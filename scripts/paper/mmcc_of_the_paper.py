"""MMCC with the tail bounds of the paper itself, to tell what ours save; for figures only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import expit, logit
from scipy.stats import binom, norm

from dptrain.accounting.losses import (
    GaussianMixtures,
    HeterogeneousComposition,
    common_spacing,
    row_law,
)

Array = npt.NDArray[np.float64]


def paper_chances(matrix: Array, *, probability: float, sigma: float, failure: float) -> Array:
    """p̃ of Algorithm 2 with the s_ij of appendix F.3, for every entry of a lower triangular C."""
    steps, each = matrix.shape[0], failure / (2 * (np.count_nonzero(matrix) - matrix.shape[0]))
    chances = np.full(matrix.shape, probability)
    for i in range(1, steps):
        gram = matrix[:i, :i].T @ matrix[:i, :i]
        most = int(binom.isf(each, i, probability))  # coins before row i, but for ``each``
        products = np.sort(gram, axis=1)[:, ::-1][:, :most].sum(axis=1)
        square = np.diag(gram)
        exponent = norm.isf(each) * np.sqrt(square) / sigma
        exponent += (2 * products - square) / (2 * sigma**2)
        chances[i, :i] = expit(logit(probability) + exponent)
    return chances


def paper_epsilon(
    matrix: Array, *, probability: float, sigma: float, delta: float, grid: int = 256
) -> float:
    """ε at δ, half of δ for the events as in the paper; matrix: (n, n) with n > 1.

    Entries are rounded up to multiples of a ``grid``-th of the largest, as MMCC does.
    """
    chances = paper_chances(matrix, probability=probability, sigma=sigma, failure=delta / 2)
    unit = float(matrix.max()) / grid
    laws = [
        row_law(row[: i + 1], chance[: i + 1], unit=unit)
        for i, (row, chance) in enumerate(zip(matrix, chances, strict=True))
    ]
    weights = np.zeros((len(laws), max(law.size for law, _ in laws) + 1))
    for weight, (law, beyond) in zip(weights, laws, strict=True):
        weight[: law.size], weight[-1] = law, beyond
    means = np.asarray(unit * np.arange(weights.shape[1]) * (1 + 1e-13), float)
    means[-1] = max(float(matrix.sum(axis=1).max()), float(means[-1]))
    mixtures, counts = GaussianMixtures(weights, means), [1] * len(laws)
    worst = 0.0
    for remove in (True, False):
        spacing = common_spacing(mixtures.spread(sigma=sigma, remove=remove), counts)
        losses = mixtures.discretized(sigma=sigma, spacing=spacing, remove=remove)
        composed = HeterogeneousComposition(zip(losses, counts, strict=True))
        worst = max(worst, composed.epsilon(delta / 2))
    return worst
