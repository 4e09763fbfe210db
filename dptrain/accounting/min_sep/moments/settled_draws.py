"""Compiled draws by settled messages alone: weighted, and in the memory of one level."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep.moments.settled import Settled, chances_of, full_gram, settle
from dptrain.accounting.min_sep.moments.tilted import TiltedPatterns
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array


class SettledPatterns(TiltedPatterns):
    """α copies of one example's participations, drawn as if the run had neither start nor end.

    The messages of every step are the settled ones. What this makes of the tilted law is corrected
    by a weight for each sample: overlaps with participations before step 0 and those that the end
    of C cuts are taken back, and the message of the state at the end is divided by. Weights are at
    most 1 relative to ``log_moment``, and far from the ends equal
    (docs/theory/min-sep.md#thm-min-sep-settled-draws;
    ``test_settled_draws_times_weights_have_the_tilted_law``).

    The law is one that ``settled.covers``; ``known`` are its settled messages, if they are known.
    """

    def __init__(
        self, law: MinSepLaw, sigma: float, order: int, known: Settled | None = None
    ) -> None:
        self.law, self.sigma, self.order = law, sigma, order
        self._settled = settle(law, sigma, order) if known is None else known
        self.log_moment = self._settled.log_moment
        self._chances = chances_of(law, order)
        self._grams = full_gram(law, sigma)[None]
        # Participations in the b steps after the run are drawn, too, and left out.
        self._end = law.steps + law.min_sep
        growth = math.log(self._settled.growth)
        self._levels = self._settled.messages[None]
        self._level_of = np.zeros(self._end + 1, dtype=np.int64)
        self._gram_of = self._level_of[:-1]
        self._log_scale = growth * np.arange(self._end, -1.0, -1.0)
        quiet = math.log(self._chances[order, 0]) - growth
        self._log_quiet = np.minimum(quiet, 0.0) * np.arange(self._end + 1.0)

    def _first(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Waits before step 0, ascending, drawn in proportion to their chance times h."""
        b, p = self.law.min_sep, self.law.probability
        found = np.zeros((size, self.order), dtype=np.int64)
        if not self.law.warm_start or b == 1:
            return found
        missing = np.arange(size)
        while missing.size:
            # A copy is free with weight 1, and barred for each of 1..b-1 steps with weight p.
            u = rng.random((missing.size, self.order)) * (1.0 + (b - 1) * p)
            barred = np.minimum(1.0 + (u - 1.0) // p, b - 1)
            waits = np.sort(np.where(u < 1.0, 0.0, barred).astype(np.int64), axis=1)
            keep = (
                np.log(rng.random(missing.size)) < self._log_message(waits) - self._settled.log_most
            )
            found[missing[keep]] = waits[keep]
            missing = missing[~keep]
        return found

    def _log_message(self, waits: npt.NDArray[np.int64]) -> Array:
        """log h of states, with or without a free copy: waits ascending, shape (k, α)."""
        rest = waits[:, 0]
        number = np.zeros(len(waits), dtype=np.int64)
        for column in range(1, self.order):
            wait = waits[:, column] - rest
            number += math.prod(wait + i for i in range(column)) // math.factorial(column)
        growth = math.log(self._settled.growth)
        return np.asarray(np.log(self._settled.messages[number]) - rest * growth)

    def _times(
        self, first: npt.NDArray[np.int64], events: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Times of the longer run, as far as this one goes."""
        times, counts = self._drawn_times(first, events, self._end)
        seen = np.arange(times.shape[0])[:, None] < counts
        return times, np.asarray((seen & (times < self.law.steps)).sum(axis=0))

    def _weights(
        self,
        first: npt.NDArray[np.int64],
        times: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int64],
    ) -> Array:
        """Log of what the run's ends take from the settled weight, relative to the largest."""
        from dptrain.accounting.min_sep.moments import settled_kernel

        law, found = self.law, np.empty(counts.size)
        settled_kernel.log_weights(
            first, law.steps, law.min_sep, law.bands, law.column_products / self.sigma**2,
            self._settled.messages, math.log(self._settled.growth), times, counts, found,
        )  # fmt: skip
        return found + self._settled.log_least

    @property
    def variation(self) -> float:
        """Bound on the distance in total variation between the patterns drawn and exact ones.

        The exact law is that of the chain of the stored messages, whose weight is exact. Boundaries
        are those of ``TiltedPatterns``, with α b in the draw of the start, which is accepted by
        logarithms. A step without participation has the chance of messages that grow by one
        factor: all of them do but for ``uneven`` and what the rounding of a step's sum hides.
        """
        n, b, order = self._end, self.law.min_sep, self.order
        events = order * -(-n // b)
        keep = abs(math.log1p(-self.law.probability))
        scale = float(self._log_scale[0])
        exponent = 2.0 * abs(scale) + order * b * keep
        choices = (events * order + order * b + 64) * 2.0**-51
        quiet = (events + 1) * (n + abs(float(self._log_quiet[-1])) * n) * 2.0**-51
        others = (2 * events + order) * b * (2.0**-49 + 2.0**-51 * exponent)
        largest = order * (order - 1) * float(self._grams.max())
        rounded = 2 * (order + 4) * (largest + 6.0) * 2.0**-53
        steps = n * (rounded + 2.0**-50 * abs(scale) + self._settled.uneven)
        return choices + quiet + others + 2.0 * steps
