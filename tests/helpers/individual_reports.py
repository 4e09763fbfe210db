"""Individual reports to test with."""

import numpy as np

from dptrain.contrib.individual.report import IndividualReport
from dptrain.core.guarantee import Kind

DELTA = 1e-5


def report(epsilon=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), active=None, **changes):
    fields = {
        "epsilon": np.array(epsilon, dtype=float),
        "delta": DELTA,
        "active": np.array([e < 0.45 for e in epsilon] if active is None else active),
        "active_counts": (6, 5, 4),
        "filter": "individual GDP filter",
        "kind": Kind.UPPER_BOUND,
        "condition": "Every example has its own budget of B-GDP",
        "bound": 0.8,
    }
    return IndividualReport(**{**fields, **changes})
