"""The hockey-stick terms (1 - e^{ε-L})_+ whose mean over privacy losses L is δ(ε)."""

from __future__ import annotations

import numpy as np

from dptrain.core import Array


def hockey_stick(losses: Array, epsilon: float) -> Array:
    """(1 - e^{ε-L})_+ of each loss: its mean over L estimates δ(ε)."""
    return -np.expm1(np.minimum(epsilon - losses, 0.0))
