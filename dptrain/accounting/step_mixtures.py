"""From bounds on the posterior hazards of every step to the composition of all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from tqdm import tqdm

from dptrain.accounting.gaussian_mixture import GaussianMixtures, common_spacing
from dptrain.accounting.heterogeneous import HeterogeneousComposition
from dptrain.accounting.loss_distribution import Array, LossDistribution
from dptrain.accounting.reverse_hazard import Step, mixture_weights, steps

# Steps with the same levels: the weights of each and how many steps have them.
_Groups = dict[bytes, dict[bytes, int]]


def compose_steps(
    means: Array, log_odds: Callable[[Step], Array], *, sigma: float, remove: bool
) -> HeterogeneousComposition:
    """All steps' losses of (P_n, Q_n) (remove) or (Q_n, P_n) (add), on one grid, composed.

    Args:
        means: of the bins, shape (b, n), ≥ 0.
        log_odds: bounds on the log odds of the reverse hazards of a step's rows.
        sigma: deviation of the noise.
        remove: the direction.
    """
    made = [
        (
            GaussianMixtures(
                np.stack([np.frombuffer(weights) for weights in group]), np.frombuffer(levels)
            ),
            list(group.values()),
        )
        for levels, group in _grouped(means, log_odds).items()
    ]
    spreads = [s for mixture, _ in made for s in mixture.spread(sigma=sigma, remove=remove)]
    counts = [count for _, group in made for count in group]
    spacing = common_spacing(spreads, counts)

    def parts() -> Iterator[tuple[LossDistribution, int]]:
        for mixture, repeated in made:
            losses = mixture.discretised(sigma=sigma, spacing=spacing, remove=remove)
            yield from zip(losses, repeated, strict=True)

    bar = tqdm(parts(), total=len(counts), desc="privacy losses", delay=2.0, leave=False)
    return HeterogeneousComposition(bar)


def _grouped(means: Array, log_odds: Callable[[Step], Array]) -> _Groups:
    """Levels and weights of the dominating mixture of every step; equal steps are counted."""
    result: _Groups = {}
    bar = tqdm(steps(means), total=means.shape[1], desc="posteriors", delay=2.0, leave=False)
    for step in bar:
        lowest = step.means.min()
        levels, place = np.unique(np.append(lowest, step.means[step.rows]), return_inverse=True)
        if levels[-1] == 0.0:
            continue  # nothing of the example is in this row
        weights = np.bincount(place, weights=mixture_weights(log_odds(step)))
        group = result.setdefault(levels.tobytes(), {})
        group[weights.tobytes()] = group.get(weights.tobytes(), 0) + 1
    return result
