"""A sampling scheme: a random cohort, drawn once, trains in full batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch

from dptrain import register_scheme
from dptrain.core import checks
from dptrain.sampling import ExchangeableScheme, SampledRun, Scheme, SeededStream


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cohort(ExchangeableScheme):
    """Every example joins the cohort with probability p; its members take part in every step.

    Args:
        probability: p in (0, 1].
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
    """

    probability: float
    dataset_size: int
    steps: int

    def __post_init__(self) -> None:
        settled = {
            "probability": checks.probability("probability", self.probability, owner="Cohort"),
            "dataset_size": checks.integer("dataset_size", self.dataset_size, owner="Cohort"),
            "steps": checks.steps(self.steps, owner="Cohort"),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @classmethod
    def for_batch_size(cls, *, batch_size: float, dataset_size: int, steps: int) -> Self:
        """The scheme with N·p = ``batch_size``."""
        size = checks.number("batch_size", batch_size, above=0, maximum=dataset_size)
        return cls(probability=size / dataset_size, dataset_size=dataset_size, steps=steps)

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """One, for the table of schemes and accountants."""
        p = 1.0 / run.epoch_length
        return {"": cls(probability=p, dataset_size=run.dataset_size, steps=run.steps)}

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """Beside dense strategies, which no distance between participations helps."""
        return [{}] if run.separation == 0 else []

    @property
    def rate(self) -> float:
        """p."""
        return self.probability

    @property
    def min_sep(self) -> int:
        """1: a member takes part in every step."""
        return 1

    def stream(self, seed: int) -> CohortStream:
        """The same batch at every step."""
        return CohortStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Rows of ones and rows of zeros, shape (size, steps)."""
        joins = rng.random(size) < self.probability
        return np.repeat(joins[:, None], self.steps, axis=1)


class CohortStream(SeededStream):
    """Batches of ``Cohort``."""

    def __init__(self, scheme: Cohort, seed: int) -> None:
        super().__init__(scheme, seed)
        self._members = np.flatnonzero(self._rng.random(scheme.dataset_size) < scheme.probability)

    def _draw(self) -> np.ndarray:
        return self._members.copy()

    def _own_state(self) -> dict[str, Any]:
        return {"members": torch.from_numpy(self._members.copy())}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        self._members = state["members"].numpy().astype(np.int64)
