"""Learning rates that fall over a run."""

import numpy as np


def linear_decay(steps: int) -> tuple[float, ...]:
    """Rates that are 1 for a quarter of the run, .05 for the last quarter, and linear between."""
    rates = np.interp(np.arange(steps), [0.25 * steps, 0.75 * steps], [1.0, 0.05])
    return tuple(rates.tolist())
