"""What a plan is asked for."""

from __future__ import annotations

import dataclasses
import math
from typing import Self

from dptrain.accounting.statement import check_delta, check_epsilon
from dptrain.sampling import Poisson
from dptrain.strategies.workload import PREFIX_SUMS, Workload, checked_workload

DEFAULT_BANDS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """The run that is to be planned.

    Args:
        epsilon: target ε > 0.
        delta: target δ in (0, 1).
        dataset_size: N.
        batch_size: B̄, the expected number of examples a step, in (0, N].
        steps: n ≥ 1.
        max_bands: most bands of a strategy, at most n.
        workload: which queries count.
        buffers: of the BLT strategy that is compared; 0 leaves it out.
        parameters: size of the model, for memory and time of the noise.
        physical_batch_size: rows that the device holds at a time, or ``None``: batches of constant
            size are made multiples of it.
        memory: most bytes of noise state, or ``None``.
        fixed_size: choose only among schemes whose batches all have the same number of rows.

    Raises:
        ValueError: naming the argument, its value and the remedy.
    """

    epsilon: float
    delta: float
    dataset_size: int
    batch_size: float
    steps: int
    max_bands: int = 1
    workload: Workload = PREFIX_SUMS
    buffers: int = 3
    parameters: int = 10_000_000
    physical_batch_size: int | None = None
    memory: float | None = None
    fixed_size: bool = False

    def __post_init__(self) -> None:
        for name in ("dataset_size", "steps", "max_bands", "parameters", "physical_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.buffers < 0:
            raise ValueError(f"buffers={self.buffers}: must be 0 (no BLT) or more, e.g. 3")
        check_epsilon(self.epsilon)
        size = Poisson.for_batch_size(
            batch_size=self.batch_size, dataset_size=self.dataset_size, steps=self.steps
        )
        check_delta(self.delta, size)
        if self.max_bands > self.steps:
            raise ValueError(
                f"max_bands={self.max_bands} exceeds steps={self.steps}: use at most {self.steps}"
            )
        if self.memory is not None and not self.memory >= 0:
            raise ValueError(f"memory={self.memory}: must be a number of bytes, at least 0")
        checked_workload(self.workload)

    @classmethod
    def of_run(
        cls,
        *,
        epochs: float | None = None,
        steps: int | None = None,
        max_bands: int | None = None,
        **others: object,
    ) -> Self:
        """The question for a run stated by epochs or steps; bands up to 64 unless stated.

        A whole number of epochs becomes so many times round(N/B̄) steps, which balls-in-bins can
        run too.

        Raises:
            ValueError: unless exactly one of ``epochs`` and ``steps`` is given, or as the class.
        """
        if (epochs is None) == (steps is None):
            raise ValueError(f"give exactly one of epochs and steps (got {epochs=}, {steps=})")
        size: float = others["batch_size"]  # type: ignore[assignment]
        population: int = others["dataset_size"]  # type: ignore[assignment]
        if steps is None:
            assert epochs is not None
            if not (math.isfinite(epochs) and epochs > 0):
                raise ValueError(f"epochs={epochs}: must be positive")
            if not 0 < size <= population:
                raise ValueError(
                    f"batch_size={size}: must be above 0 and at most dataset_size={population}"
                )
            if float(epochs).is_integer():
                steps = int(epochs) * round(population / size)
            else:
                steps = max(1, round(epochs * population / size))
        bands = max(1, min(DEFAULT_BANDS, steps)) if max_bands is None else max_bands
        return cls(steps=steps, max_bands=bands, **others)  # type: ignore[arg-type]

    @property
    def bands(self) -> tuple[int, ...]:
        """1, 2, 4, … up to ``max_bands``."""
        return tuple(1 << i for i in range(self.max_bands.bit_length()))

    @property
    def epoch_length(self) -> float:
        """N/B̄, steps."""
        return self.dataset_size / self.batch_size
