"""Shuffled epochs, as in ordinary training: for comparison, without amplification by sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import ExchangeableScheme, Indices, SampledRun, Scheme
from dptrain.sampling.stream import SeededStream, index_dtype


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffled(ExchangeableScheme):
    """Every example exactly once an epoch, in batches of a fixed size from a random order.

    This is what ``DataLoader(shuffle=True)`` does. It is *not* Poisson sampling and must not be
    accounted for as such (Chua et al. 2024, arXiv 2403.17673): its guarantee is that of the
    Gaussian mechanism with the sensitivity of C under ``min_sep`` and ``max_participations``.

    The last batch of an epoch is smaller if ``batch_size`` does not divide N. The public number B̄
    that sums are divided by is nevertheless one number for all steps, the mean N/steps_per_epoch:
    so an epoch's updates add up to those of mean gradients. Against ordinary SGD, which divides a
    full batch by ``batch_size``, a full batch then weighs batch_size/B̄ ≥ 1 times as much: 1 if it
    divides N, below 1 + 1/(steps_per_epoch - 1) otherwise. ``batch_size=ceil(N/steps_per_epoch)``
    keeps the number of steps and brings the factor below 1 + steps_per_epoch/N.

    >>> scheme = Shuffled(batch_size=32, dataset_size=1000, epochs=3)
    >>> scheme.steps_per_epoch, scheme.steps, scheme.expected_batch_size
    (32, 96, 31.25)

    Args:
        batch_size: from 1 to N.
        dataset_size: N ≥ 1.
        epochs: E ≥ 1.
        reshuffle: whether each epoch has a new order. ``False`` keeps the first one, so that an
            example's steps are exactly steps_per_epoch apart.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    batch_size: int
    dataset_size: int
    epochs: int
    reshuffle: bool = True

    unamplified: ClassVar[bool] = True  # nothing that is proven uses the order

    def __post_init__(self) -> None:
        fields.settle(self, integers=("batch_size", "dataset_size", "epochs"))
        checks.flag("reshuffle", self.reshuffle, owner="Shuffled")
        fields.check_steps(self, "dataset_size", "batch_size", "epochs")
        if self.batch_size > self.dataset_size:
            raise ValueError(
                f"Shuffled: batch_size={self.batch_size} is not reachable; the largest possible "
                f"batch size is {self.dataset_size} (dataset_size, since every example is drawn "
                "once per epoch)"
            )

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: int,
        dataset_size: int,
        epochs: int | None = None,
        steps: int | None = None,
        reshuffle: bool = True,
    ) -> Self:
        """The scheme, its length stated in epochs or in steps, which are whole epochs.

        Raises:
            ValueError: as the class, or if the steps are no whole epochs.
        """
        one = cls(batch_size=batch_size, dataset_size=dataset_size, epochs=1, reshuffle=reshuffle)
        epochs = fields.whole_epochs("Shuffled", one.steps_per_epoch, epochs=epochs, steps=steps)
        return dataclasses.replace(one, epochs=epochs)

    @property
    def steps_per_epoch(self) -> int:
        """ceil(N / batch size)."""
        return -(-self.dataset_size // self.batch_size)

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """A new order every epoch."""
        return {
            "": cls.for_batch_size(
                batch_size=round(run.batch_size), dataset_size=run.dataset_size, steps=run.steps
            )
        }

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """Beside a dense strategy, to see what amplification is worth."""
        return [{}] if run.separation == 0 else []

    @property
    def steps(self) -> int:
        """n = epochs·steps_per_epoch."""
        return self.epochs * self.steps_per_epoch

    @property
    def rate(self) -> float:
        """p0 = 1/steps_per_epoch, the mean over an epoch (less at its last step, if smaller)."""
        return 1.0 / self.steps_per_epoch

    @property
    def expected_batch_size(self) -> float:
        """B̄ = N/steps_per_epoch, the mean size over an epoch; at most ``batch_size``."""
        return self.dataset_size / self.steps_per_epoch

    @property
    def min_sep(self) -> int:
        """steps_per_epoch if the order is kept, else 1: last in one epoch, first in the next."""
        return 1 if self.reshuffle else self.steps_per_epoch

    @property
    def period(self) -> int | None:
        """steps_per_epoch if the order is kept."""
        return None if self.reshuffle else self.steps_per_epoch

    @property
    def max_participations(self) -> int:
        """One step an epoch."""
        return self.epochs

    def prefix(self, steps: int) -> Self:
        """The scheme of as many epochs as have so many steps: an order knows no later one."""
        steps = checks.integer("steps", steps, maximum=self.steps)
        return dataclasses.replace(self, epochs=-(-steps // self.steps_per_epoch))

    def stream(self, seed: int) -> ShuffledStream:
        """O(batch) work a step and O(N) for each new order; at most 8 bytes an example."""
        return ShuffledStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        orders = self.epochs if self.reshuffle else 1
        places = rng.integers(self.dataset_size, size=(size, orders, 1))
        taken = np.zeros((size, orders, self.steps_per_epoch), dtype=bool)
        np.put_along_axis(taken, places // self.batch_size, True, axis=2)
        return np.tile(taken.reshape(size, -1), (1, self.epochs // orders))


class ShuffledStream(SeededStream):
    """Batches of ``Shuffled``: consecutive pieces of ``_order``."""

    _kept = ("order",)

    def __init__(self, scheme: Shuffled, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        self._order = np.arange(scheme.dataset_size, dtype=index_dtype(scheme.dataset_size))

    def _draw(self) -> Indices:
        epoch, place = divmod(self.step, self._scheme.steps_per_epoch)
        if place == 0 and (epoch == 0 or self._scheme.reshuffle):
            self._rng.shuffle(self._order)
        start = place * self._scheme.batch_size
        return np.sort(self._order[start : start + self._scheme.batch_size].astype(np.int64))
