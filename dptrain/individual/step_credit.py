"""How many more steps the budgets of many examples surely allow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dptrain.individual.gaussian_dominance import GaussianDominance

Single = npt.NDArray[np.float32]
Buckets = npt.NDArray[np.intp]
Counts = npt.NDArray[np.integer]
Credits = npt.NDArray[np.int64]

_CELLS = 1 << 21  # of the linear part at a time
_TRIALS = 6
_WORTH = 0.02  # a trial must promise this share more steps


def step_credits(test: GaussianDominance, counts: Counts, buckets: Buckets, most: int) -> Credits:
    """Steps with norms in the given bucket that still fit; 0 only where not even one does.

    The answer may fall a little short of the largest. Every answer was tried: the total
    with so many more steps is dominated, and therefore with fewer steps, and with smaller norms
    (more noise is post-processing).

    Args:
        test: against the budget.
        counts: steps so far, shape (n, grid).
        buckets: above 0, shape (n,).
        most: upper limit of the answer.
    """
    result = np.zeros(len(counts), dtype=np.int64)
    size = max(1, _CELLS // test.cells)
    for at in range(0, len(counts) if most > 0 else 0, size):
        rows = slice(at, at + size)
        result[rows] = _seen(test, counts[rows], buckets[rows], most)
    return result


def _seen(test: GaussianDominance, counts: Counts, buckets: Buckets, most: int) -> Credits:
    """Sought where the reference is decided, and tried everywhere."""
    credit = _searched(test.leading, counts, buckets, most)
    total = counts.astype(np.float32)  # exact up to 2^24 steps
    total[np.arange(len(counts)), buckets] += credit
    fits = (test.log_ratios(test.exponents(total)) <= 0.0).all(axis=1)
    again = np.flatnonzero(~fits & (credit > 0))
    if again.size:
        credit[again] = _searched(test, counts[again], buckets[again], most)
    return credit


def _searched(test: GaussianDominance, counts: Counts, buckets: Buckets, most: int) -> Credits:
    """Newton's steps from below: log δ rises by at most about its cumulant with every step."""
    start = test.exponents(counts)
    norms, norm = np.unique(buckets, return_inverse=True)
    norm = norm.reshape(-1)
    charges = test.charges(norms)
    slopes = test.slopes(charges)
    credit = np.zeros(len(counts), dtype=np.int64)

    def ratios(rows: Buckets, steps: Credits) -> Single:
        more = charges[norm[rows]] if norms.size > 1 else charges
        return test.log_ratios(start[rows] + steps[:, None, None].astype(np.float32) * more)

    def room(rows: Buckets, found: Single) -> Credits:
        least = np.min(-found / slopes[norm[rows]], axis=1)
        return np.minimum(np.clip(least, 0.0, most).astype(np.int64), most - credit[rows])

    everybody = np.arange(len(counts))
    left = room(everybody, test.log_ratios(start))
    failed = np.full(len(counts), np.iinfo(np.int64).max)  # least that was seen not to fit
    for _ in range(_TRIALS):
        open_ = np.flatnonzero(left > _WORTH * credit)
        if open_.size == 0:
            break
        trial = credit[open_] + left[open_]
        found = ratios(open_, trial)
        fits = (found <= 0.0).all(axis=1)
        good, bad = open_[fits], open_[~fits]
        credit[good] = trial[fits]
        left[good] = np.minimum(room(good, found[fits]), failed[good] - 1 - credit[good])
        failed[bad] = trial[~fits]
        left[bad] //= 2
    none = np.flatnonzero((credit == 0) & (failed > 1))
    if none.size:
        one = np.ones(none.size, dtype=np.int64)
        credit[none] = (ratios(none, one) <= 0.0).all(axis=1)
    return credit
