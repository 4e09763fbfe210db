"""Poisson sampling with a constant number of rows: large draws are cut, small ones padded."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np
import numpy.typing as npt

from dptrain.sampling import fields
from dptrain.sampling.scheme import Indices
from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.schemes.drawing import successes
from dptrain.sampling.schemes.truncation import inclusion_probability, truncate
from dptrain.sampling.stream import SeededStream


@dataclasses.dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(AnySizeScheme):
    """A Poisson draw, of which a uniformly random subset is kept if it is too large.

    Each step draws every example with probability p; of more than B = ``max_batch_size`` drawn
    examples, B are kept, each subset being as likely. Every batch is padded to B rows of weight 0
    (Chua et al. 2024; Ganesh 2025, arXiv 2508.15089). Examples of a batch are *not* independent:
    another example's presence can cut this one, so the scheme is not accounted as Poisson.

    >>> scheme = TruncatedPoisson.for_batch_size(
    ...     batch_size=50, dataset_size=1000, steps=10, max_batch_size=64
    ... )
    >>> scheme.probability, scheme.physical_batch_size, round(scheme.expected_batch_size, 3)
    (0.05, 64, 49.931)

    Args:
        probability: p in (0, 1], before truncation.
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
        max_batch_size: B ≥ 1; with B ≥ N nothing is ever cut and only the padding remains.
        nominal_size: at least N, see ``AnySizeScheme``.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    probability: float
    dataset_size: int
    steps: int
    max_batch_size: int

    def __post_init__(self) -> None:
        fields.settle(
            self,
            integers=("dataset_size", "steps", "max_batch_size"),
            probabilities=("probability",),
        )
        self._settle_size(self.max_batch_size)

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        steps: int,
        max_batch_size: int,
        nominal_size: int | None = None,
    ) -> Self:
        """The scheme with N·p = ``batch_size``: the expected size *before* truncation.

        ``expected_batch_size`` is smaller, by the examples that are cut.

        Raises:
            ValueError: if the batch size is not in (0, N] (or up to ``nominal_size``, if given).
        """
        size, public = fields.batch_of_dataset(
            "TruncatedPoisson", batch_size, dataset_size, nominal_size
        )
        return cls(
            probability=size / public,
            dataset_size=dataset_size,
            steps=steps,
            max_batch_size=max_batch_size,
            nominal_size=nominal_size,
        )

    @property
    def rate(self) -> float:
        """p0 = E[min(Bin(N, p), B)]/N: the chance to be drawn and kept."""
        return float(
            inclusion_probability(self.dataset_size, self.probability, self.max_batch_size)
        )

    @property
    def min_sep(self) -> int:
        """1: nothing keeps an example from two steps in a row."""
        return 1

    @property
    def physical_batch_size(self) -> int:
        """B: every batch is padded to it."""
        return self.max_batch_size

    def stream(self, seed: int) -> TruncatedPoissonStream:
        """Batches in O(N·p) work a step by geometric skipping; no state but the generator."""
        return TruncatedPoissonStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        # The steps are independent of each other: others' coins are tossed anew every time.
        return rng.random((size, self.steps)) < self.rate


class TruncatedPoissonStream(SeededStream):
    """Batches of ``TruncatedPoisson``."""

    def __init__(self, scheme: TruncatedPoisson, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme

    def _draw(self) -> Indices:
        drawn = successes(self._rng, self._scheme.dataset_size, self._scheme.probability)
        return truncate(self._rng, drawn, self._scheme.max_batch_size)
