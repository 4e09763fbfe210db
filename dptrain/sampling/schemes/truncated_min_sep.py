"""b-min-sep sampling with a constant number of rows: large draws are cut, small ones padded."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.scheme import ExchangeableScheme, Indices
from dptrain.sampling.schemes.min_sep import MinSep, MinSepStream, probability_for
from dptrain.sampling.schemes.truncation import inclusion_probability, truncate


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedMinSep(ExchangeableScheme):
    """A b-min-sep draw, of which a uniformly random subset is kept if it is too large.

    Dong & Ganesh 2026, Appendix D. Of more than B = ``max_batch_size`` drawn examples, B are kept,
    each subset being as likely, and every batch is padded to B rows of weight 0. An example that
    was drawn and then cut stays barred for b-1 steps like one that was kept, so that before the cut
    examples are independent of each other; after it they are *not*, so the scheme is not accounted
    as ``MinSep``. b = 1 is truncated Poisson sampling; B ≥ N is b-min-sep, padded.

    Args:
        probability: p in (0, 1], the chance of an *available* example before truncation.
        min_sep: b ≥ 1; it may exceed ``steps``.
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
        max_batch_size: B ≥ 1; with B ≥ N nothing is ever cut and only the padding remains.
        warm_start: whether to start in the stationary regime.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    probability: float
    min_sep: int
    dataset_size: int
    steps: int
    max_batch_size: int
    warm_start: bool = True

    def __post_init__(self) -> None:
        fields.settle(
            self,
            integers=("min_sep", "dataset_size", "steps", "max_batch_size"),
            probabilities=("probability",),
        )
        checks.flag("warm_start", self.warm_start, owner="TruncatedMinSep")

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        min_sep: int,
        steps: int,
        max_batch_size: int,
        warm_start: bool = True,
    ) -> Self:
        """The scheme that draws ``batch_size`` in expectation, *before* truncation.

        That is in the stationary regime; ``expected_batch_size`` is smaller, by the examples
        that are cut.

        Raises:
            ValueError: if batch_size > N/b; the message gives the largest batch size.
        """
        p = probability_for(
            "TruncatedMinSep", batch_size=batch_size, dataset_size=dataset_size, min_sep=min_sep
        )
        return cls(
            probability=p,
            min_sep=min_sep,
            dataset_size=dataset_size,
            steps=steps,
            max_batch_size=max_batch_size,
            warm_start=warm_start,
        )

    @property
    def untruncated(self) -> MinSep:
        """How examples are drawn, before the cut."""
        return MinSep(
            probability=self.probability,
            min_sep=self.min_sep,
            dataset_size=self.dataset_size,
            steps=self.steps,
            warm_start=self.warm_start,
        )

    @property
    def rate(self) -> float:
        """E[min(X, B)]/N with X ~ Bin(N, p/(1 + (b-1)p)): the chance to be drawn and kept.

        In the stationary regime X, the number drawn in a step, has exactly that law: examples are
        independent before the cut.
        """
        drawn = self.untruncated.rate
        return float(inclusion_probability(self.dataset_size, drawn, self.max_batch_size))

    @property
    def physical_batch_size(self) -> int:
        """B: every batch is padded to it."""
        return self.max_batch_size

    def stream(self, seed: int) -> TruncatedMinSepStream:
        """Batches in work proportional to what is drawn; at most 8 bytes an example."""
        return TruncatedMinSepStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps), true where kept."""
        drawn, others = self.sample_draws(rng, size)
        # Among others + 1 drawn examples every B-subset is as likely; below B nothing is cut.
        return drawn & (rng.random(drawn.shape) * (others + 1) < self.max_batch_size)

    def sample_draws(
        self, rng: np.random.Generator, size: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Whether one example is drawn in a step, and how many of the N-1 others are (r_t).

        The two are independent before the cut. Given them, the example is kept in a step in which
        it is drawn with probability min(1, B/(r_t + 1)), steps being independent of each other.

        Returns:
            Two arrays of shape (size, steps), one row for each of ``size`` independent runs.
        """
        drawn = self.untruncated.sample_participation(rng, size)
        return drawn, self._sample_counts(rng, size)

    def _sample_counts(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """r_t of N-1 independent examples: a Markov chain of available and barred ones."""
        b, p = self.min_sep, self.probability
        counts = np.zeros((size, self.steps), dtype=np.int64)
        available = np.full(size, self.dataset_size - 1, dtype=np.int64)
        waiting = np.zeros(size, dtype=np.int64)  # barred at the start and not released yet
        if self.warm_start:
            available = rng.binomial(available, 1.0 / (1.0 + (b - 1) * p))
            waiting += self.dataset_size - 1 - available
        for step in range(self.steps):
            if 1 <= step < b:
                # A first bar is uniform on 1..b-1: given that it is at least `step`, it is `step`
                # with probability 1/(b - step).
                released = rng.binomial(waiting, 1.0 / (b - step))
                waiting -= released
                available += released
            elif step >= b:
                available += counts[:, step - b]
            counts[:, step] = rng.binomial(available, p)
            available -= counts[:, step]
        return counts


class TruncatedMinSepStream(MinSepStream):
    """Batches of ``TruncatedMinSep``."""

    def __init__(self, scheme: TruncatedMinSep, seed: int) -> None:
        super().__init__(scheme.untruncated, seed, scheme)
        self._largest = scheme.max_batch_size

    def _draw(self) -> Indices:
        drawn = super()._draw()  # it bars all of them, whatever is cut below
        return truncate(self._rng, drawn, self._largest)
