"""Conditional composition with the failure budget of the paper: for its figures only, no bound."""

from __future__ import annotations

import numpy as np

from dptrain.accounting.balls_in_bins import (
    ConditionalComposition,
    Step,
    bin_means,
    compose_steps,
    hazard_log_odds,
    steps,
)
from dptrain.accounting.base import check_delta
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism


def paper_budget_epsilon(mechanism: MatrixMechanism, *, delta: float) -> float:
    """ε at δ as in Appendix E of Schuchardt & Kalinin. **Not a privacy guarantee.**

    With δ_E = δ/2 and k epochs: each bound of the first epoch may fail with δ_E/(n(b-1)), each of a
    later one with δ_E/(k(b-1)), and at each rank every step of a later epoch takes the largest
    bound of that epoch. But Pr[X_n > q_n] ≤ β for every n does not give Pr[max X_n > max q_n] ≤ β:
    the probability that some bound fails may be up to b times what is accounted for. No accountant
    uses this; it exists so that published curves can be drawn beside valid ones.

    Raises:
        ValueError: if the conditional composition accountant refuses the mechanism, or σ = 0.
    """
    check_delta(delta, mechanism.scheme)
    if reason := ConditionalComposition().refusal(mechanism):
        raise ValueError(f"mechanism: {reason}")
    sigma = mechanism.noise_multiplier
    if sigma == 0.0:
        raise ValueError("noise_multiplier=0: there is no figure without noise; give a σ above 0")
    bins, total = mechanism.scheme.min_sep, mechanism.steps
    means = bin_means(mechanism.strategy, steps=total, bins=bins)
    return max(_epsilon(means, sigma, delta, remove=remove) for remove in (True, False))


def _epsilon(means: Array, sigma: float, delta: float, *, remove: bool) -> float:
    bins, total = means.shape
    epochs = -(-total // bins)
    bounds: list[Array] = []
    # By epoch and rank from the top.
    largest = np.full((epochs, bins), -np.inf)
    for n, step in enumerate(steps(means)):
        epoch = n // bins
        share = total if epoch == 0 else epochs
        failure = delta / 2.0 / (share * max(bins - 1, 1))
        bounds.append(hazard_log_odds(step, sigma=sigma, failure=failure, remove=remove))
        ranks = np.arange(bounds[-1].size)[::-1]
        largest[epoch, ranks] = np.maximum(largest[epoch, ranks], bounds[-1])
    by_step = iter(
        bound if n < bins else largest[n // bins, : bound.size][::-1]
        for n, bound in enumerate(bounds)
    )

    def log_odds(step: Step) -> Array:
        return next(by_step)

    composed = compose_steps(means, log_odds, sigma=sigma, remove=remove)
    return composed.epsilon(delta / 2.0)
