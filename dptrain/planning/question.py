"""The question that a plan answers."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from dptrain.accounting.base import check_delta, check_epsilon
from dptrain.core import checks
from dptrain.sampling import Poisson
from dptrain.strategies import PREFIX_SUMS, Workload, checked_workload

DEFAULT_BANDS = 64
"""Most bands of the strategies that are compared, unless told otherwise."""


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
        settled: dict[str, Any] = {
            "epsilon": check_epsilon(self.epsilon),
            "dataset_size": checks.integer("dataset_size", self.dataset_size),
            "batch_size": checks.number("batch_size", self.batch_size, above=0),
            "steps": checks.steps(self.steps),
            "max_bands": checks.integer("max_bands", self.max_bands),
            "buffers": checks.integer("buffers", self.buffers, minimum=0),
            "parameters": checks.integer("parameters", self.parameters),
            "fixed_size": checks.flag("fixed_size", self.fixed_size),
        }
        if self.physical_batch_size is not None:
            size = checks.integer("physical_batch_size", self.physical_batch_size)
            settled["physical_batch_size"] = size
        if self.memory is not None:
            settled["memory"] = checks.number("memory", self.memory, minimum=0)
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        scheme = Poisson.for_batch_size(
            batch_size=self.batch_size, dataset_size=self.dataset_size, steps=self.steps
        )
        object.__setattr__(self, "delta", check_delta(self.delta, scheme))
        if self.max_bands > self.steps:
            raise ValueError(
                f"max_bands={self.max_bands} exceeds steps={self.steps}: use at most {self.steps}"
            )
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
            ValueError: unless exactly one of ``epochs`` and ``steps`` is given, or if ``Question``
                refuses a value.
        """
        if (epochs is None) == (steps is None):
            raise ValueError(f"give exactly one of epochs and steps (got {epochs=}, {steps=})")
        size = checks.number("batch_size", others["batch_size"], above=0)
        population = checks.integer("dataset_size", others["dataset_size"])
        if steps is None:
            assert epochs is not None
            epochs = checks.number("epochs", epochs, above=0)
            if size > population:
                raise ValueError(f"batch_size={size:g}: must be at most dataset_size={population}")
            if epochs * population / size > checks.MOST_STEPS:
                raise ValueError(
                    f"epochs={epochs:g} are {epochs * population / size:.3g} steps, but a run has "
                    f"at most {checks.MOST_STEPS}: lower epochs"
                )
            if float(epochs).is_integer():
                steps = int(epochs) * round(population / size)
            else:
                steps = max(1, round(epochs * population / size))
        steps = checks.steps(steps)
        bands = max(1, min(DEFAULT_BANDS, steps)) if max_bands is None else max_bands
        return cls(steps=steps, max_bands=bands, **others)  # type: ignore[arg-type]

    @property
    def bands(self) -> tuple[int, ...]:
        """Numbers of bands to try: 1, 2, 4, … up to ``max_bands``."""
        return tuple(1 << i for i in range(self.max_bands.bit_length()))

    @property
    def epoch_length(self) -> float:
        """N/B̄, the number of steps of an epoch."""
        return self.dataset_size / self.batch_size
