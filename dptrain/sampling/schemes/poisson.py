"""Poisson sampling: every example tosses its own coin at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import Indices, SampledRun, Scheme
from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.schemes.drawing import inclusion_probability, successes, truncate
from dptrain.sampling.stream import SeededStream


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson(AnySizeScheme):
    """Each example takes part in each step with probability p, independently of all else.

    With ``max_batch_size`` = B every batch has room for B examples: of more than B that are drawn,
    a uniformly random B-subset is kept, and smaller batches are padded with rows of weight 0 (Chua
    et al. 2024, arXiv 2411.04205; Ganesh 2025, arXiv 2508.15089). The examples of a batch are then
    *not* independent, as the presence of one can cut another, and the run is accounted for as
    truncated Poisson sampling.

    >>> Poisson.for_batch_size(batch_size=50, dataset_size=1000, steps=10).probability
    0.05
    >>> scheme = Poisson.for_batch_size(
    ...     batch_size=50, dataset_size=1000, steps=10, max_batch_size=64
    ... )
    >>> scheme.probability, scheme.physical_batch_size, round(scheme.expected_batch_size, 3)
    (0.05, 64, 49.931)

    Args:
        probability: p in (0, 1], before truncation.
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
        max_batch_size: B ≥ 1; with B ≥ N nothing is ever cut and only the padding remains.
            ``None``: batches are neither cut nor padded.
        nominal_size: a public number in place of a private N (``AnySizeScheme``); with
            ``max_batch_size`` at least N.

    Raises:
        TypeError, ValueError: if a field is of another type or out of range.
    """

    probability: float
    dataset_size: int
    steps: int
    max_batch_size: int | None = None

    _later_fields = ("nominal_size", "max_batch_size")

    def __post_init__(self) -> None:
        fields.settle(
            self,
            integers=("dataset_size", "steps", "max_batch_size"),
            probabilities=("probability",),
        )
        self._settle_size()

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        steps: int,
        max_batch_size: int | None = None,
        nominal_size: int | None = None,
    ) -> Self:
        """The scheme with N·p = ``batch_size``, which need not be an integer.

        That is the expected size *before* truncation: with ``max_batch_size`` the
        ``expected_batch_size`` is smaller, by the examples that are cut.

        Raises:
            ValueError: if the batch size is not in (0, N] (or up to ``nominal_size``, if given).
        """
        size, public = fields.batch_of_dataset("Poisson", batch_size, dataset_size, nominal_size)
        return cls(
            probability=size / public,
            dataset_size=dataset_size,
            steps=steps,
            max_batch_size=max_batch_size,
            nominal_size=nominal_size,
        )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Whole batches and cut ones."""
        plain = cls.for_batch_size(
            batch_size=run.batch_size, dataset_size=run.dataset_size, steps=run.steps
        )
        cut = dataclasses.replace(plain, max_batch_size=run.largest_batch(1))
        return {"": plain, "max_batch_size": cut}

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """Proposals for independent noise, with whole batches and cut ones."""
        return [{}, {"max_batch_size": run.largest_batch(1)}] if run.separation == 1 else []

    @property
    def rate(self) -> float:
        """p0: p; with truncation E[min(Bin(N, p), B)]/N, the chance to be drawn and kept."""
        if self.max_batch_size is None:
            return self.probability
        return float(
            inclusion_probability(self.dataset_size, self.probability, self.max_batch_size)
        )

    @property
    def min_sep(self) -> int:
        """1: nothing keeps an example from two steps in a row."""
        return 1

    def prefix(self, steps: int) -> Self:
        """The scheme of so many steps. Every step tosses new coins."""
        return dataclasses.replace(self, steps=checks.integer("steps", steps, maximum=self.steps))

    def stream(self, seed: int) -> PoissonStream:
        """Batches in O(N·p) work a step by geometric skipping; no state but the generator."""
        return PoissonStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        # Also where batches are cut: the steps are independent of each other, as everybody's coins
        # are tossed anew.
        return rng.random((size, self.steps)) < self.rate


class PoissonStream(SeededStream):
    """Batches of ``Poisson``."""

    def __init__(self, scheme: Poisson, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme

    def _draw(self) -> Indices:
        drawn = successes(self._rng, self._scheme.dataset_size, self._scheme.probability)
        return truncate(self._rng, drawn, self._scheme.max_batch_size)
