"""Balls-in-bins sampling: one random bin an example, visited in turn every epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import ExchangeableScheme, Indices, SampledRun, Scheme
from dptrain.sampling.stream import SeededStream, index_dtype

# Examples whose bins are drawn at a time when the bins are counted.
_BLOCK = 1 << 18


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class BallsInBins(ExchangeableScheme):
    """Each example picks one of b bins uniformly; step t draws bin t mod b.

    (Chua et al. 2024, arXiv 2412.16802.) An example in bin s takes part in steps s, s+b, s+2b, …
    and n = b·epochs, so it takes part exactly once in every epoch of b steps.

    Args:
        bins: b ≥ 1.
        epochs: E ≥ 1.
        dataset_size: N ≥ 1.

    Raises:
        TypeError, ValueError: if a field is of another type or out of range.
    """

    bins: int
    epochs: int
    dataset_size: int

    def __post_init__(self) -> None:
        fields.settle(self, integers=("bins", "epochs", "dataset_size"))
        fields.check_steps(self, "bins", "epochs")

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> Self:
        """The scheme with b = round(N / batch size), so B̄ is near ``batch_size``.

        Its length is stated in epochs or in steps, which are a multiple of b.

        Raises:
            ValueError: if the batch size is not in (0, N], or the steps are no whole epochs.
        """
        size, n_examples = fields.batch_of_dataset("BallsInBins", batch_size, dataset_size)
        bins = round(n_examples / size)
        count = fields.whole_epochs("BallsInBins", bins, epochs=epochs, steps=steps)
        return cls(bins=bins, epochs=count, dataset_size=n_examples)

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """One scheme, with as many bins as an epoch has steps."""
        return {
            "": cls.for_batch_size(
                batch_size=run.batch_size, dataset_size=run.dataset_size, steps=run.steps
            )
        }

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """One proposal for every strategy, without settings."""
        return [{}]

    @property
    def steps(self) -> int:
        """n = b·epochs."""
        return self.bins * self.epochs

    @property
    def rate(self) -> float:
        """p0 = 1/b."""
        return 1.0 / self.bins

    @property
    def expected_batch_size(self) -> float:
        """B̄ = N/b."""
        return self.dataset_size / self.bins

    @property
    def min_sep(self) -> int:
        """b: an example's steps are exactly b apart."""
        return self.bins

    @property
    def period(self) -> int:
        """b."""
        return self.bins

    @property
    def max_participations(self) -> int:
        """One step an epoch."""
        return self.epochs

    def prefix(self, steps: int) -> Self:
        """The scheme of as many epochs as have so many steps: the bins know no number of epochs."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        return dataclasses.replace(self, epochs=-(-steps // self.bins))

    def stream(self, seed: int) -> BallsInBinsStream:
        """The bins are drawn at once; a step then sorts a copy of its bin.

        4 bytes an example and a bin (8 from 2^31 examples on).
        """
        return BallsInBinsStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        chosen = rng.integers(self.bins, size=size)
        in_epoch = np.eye(self.bins, dtype=bool)[chosen]
        return np.tile(in_epoch, (1, self.epochs))


class BallsInBinsStream(SeededStream):
    """Batches of ``BallsInBins``; bin s holds ``members[offsets[s]:offsets[s + 1]]``.

    Given how many examples each bin has, every way to place the examples is equally likely. So
    the counts are drawn first and a uniformly random order is cut at them, which is the law of a
    bin for every example and needs no array of bins.
    """

    _kept = ("members", "offsets")

    def __init__(self, scheme: BallsInBins, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        n_examples = scheme.dataset_size
        dtype = index_dtype(n_examples)
        counts = np.zeros(scheme.bins, dtype=dtype)
        for start in range(0, n_examples, _BLOCK):
            bins = self._rng.integers(scheme.bins, size=min(_BLOCK, n_examples - start))
            np.add.at(counts, bins, 1)
        self._offsets = np.zeros(scheme.bins + 1, dtype=dtype)
        np.cumsum(counts, out=self._offsets[1:])
        self._members = np.arange(n_examples, dtype=dtype)
        self._rng.shuffle(self._members)

    def _draw(self) -> Indices:
        chosen = self.step % self._scheme.bins
        start, stop = self._offsets[chosen], self._offsets[chosen + 1]
        return np.sort(self._members[start:stop]).astype(np.int64)
