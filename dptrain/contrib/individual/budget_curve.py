"""δ(ε) of a run whose guarantee is that of an individual filter's budget."""

from __future__ import annotations

import numpy as np

from dptrain.accounting import Profile
from dptrain.core import Guarantee
from dptrain.individual import IndividualRecord

_POINTS = 81
_LEAST_DELTA, _LARGEST_DELTA = 1e-30, 1 - 1e-9


def filter_profile(record: IndividualRecord, guarantee: Guarantee) -> Profile:
    """The profile that the budget keeps at other δ, up to twice the guarantee's ε.

    The curve of the planned noise is not it: the noise alone promises more steps less. The bound
    holds for both directions.

    Args:
        record: of the run, ``private.stated_individual``; only its budget is asked, nothing of
            the examples.
        guarantee: of the run, by its filter.

    Raises:
        ValueError: if the guarantee is not that of the record's budget.
    """
    kept = guarantee.accountant.startswith("individual ")
    if not kept or record.epsilon_bound(guarantee.delta) != guarantee.epsilon:
        raise ValueError(
            f"guarantee: its ε = {guarantee.epsilon:.6g} (accountant: {guarantee.accountant}) does "
            "not match the record's budget; pass private.stated_individual and "
            "private.guarantee(), and no profile if the plan's bound is the smaller one"
        )
    least = guarantee.delta
    while least > _LEAST_DELTA and record.epsilon_bound(least) < 2 * guarantee.epsilon:
        least /= 10
    deltas = np.geomspace(_enough_at_zero(record), least, _POINTS)
    epsilons = np.array([record.epsilon_bound(float(delta)) for delta in deltas])
    kept = np.isfinite(epsilons)
    return Profile(
        epsilon=epsilons[kept],
        remove=deltas[kept],
        add=deltas[kept],
        kind=guarantee.kind,
        accountant=guarantee.accountant,
        adjacency=guarantee.adjacency,
        unit=guarantee.unit,
        mechanism_hash=guarantee.mechanism_hash,
    )


def _enough_at_zero(record: IndividualRecord) -> float:
    """Least δ, rounded up, at which ε = 0; the largest where a bound is above 0 at all of them."""
    low, high = 0.0, _LARGEST_DELTA
    if record.epsilon_bound(high) > 0:
        return high
    while high - low > 1e-6 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if record.epsilon_bound(middle) <= 0 else (middle, high)
    return high
