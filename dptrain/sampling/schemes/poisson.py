"""Poisson sampling: every example tosses its own coin at every step."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np
import numpy.typing as npt

from dptrain.sampling import fields
from dptrain.sampling.scheme import Indices
from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.schemes.drawing import successes
from dptrain.sampling.stream import SeededStream


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson(AnySizeScheme):
    """Each example takes part in each step with probability p, independently of all else.

    >>> Poisson.for_batch_size(batch_size=50, dataset_size=1000, steps=10).probability
    0.05

    Args:
        probability: p in (0, 1].
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
        nominal_size: see ``AnySizeScheme``.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    probability: float
    dataset_size: int
    steps: int

    def __post_init__(self) -> None:
        fields.settle(self, integers=("dataset_size", "steps"), probabilities=("probability",))
        self._settle_size()

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        steps: int,
        nominal_size: int | None = None,
    ) -> Self:
        """The scheme with B̄ = ``batch_size``, which need not be an integer.

        Raises:
            ValueError: if the batch size is not in (0, N] (or up to ``nominal_size``, if given).
        """
        size, public = fields.batch_of_dataset("Poisson", batch_size, dataset_size, nominal_size)
        return cls(
            probability=size / public,
            dataset_size=dataset_size,
            steps=steps,
            nominal_size=nominal_size,
        )

    @property
    def rate(self) -> float:
        """p0 = p."""
        return self.probability

    @property
    def min_sep(self) -> int:
        """1: nothing keeps an example from two steps in a row."""
        return 1

    def stream(self, seed: int) -> PoissonStream:
        """Batches in O(B̄) work a step by geometric skipping; no state but the generator."""
        return PoissonStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        return rng.random((size, self.steps)) < self.probability


class PoissonStream(SeededStream):
    """Batches of ``Poisson``."""

    def __init__(self, scheme: Poisson, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme

    def _draw(self) -> Indices:
        return successes(self._rng, self._scheme.dataset_size, self._scheme.probability)
