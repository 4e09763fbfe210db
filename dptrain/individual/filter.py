"""An individual privacy filter: the settings by which examples stop taking part."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import ClassVar

from dptrain.accounting.base import SETTINGS_ARE_PUBLIC, check_delta, check_epsilon
from dptrain.core import Adjacency, Guarantee, JsonValue, Kind, checks
from dptrain.individual.record import IndividualRecord
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson, Scheme
from dptrain.strategies import Identity, Strategy

ADJACENCIES = (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE)
CONDITIONS = (SETTINGS_ARE_PUBLIC,)  # of a plan, which a filter rests on as well


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndividualFilter(
    JsonValue, ABC, family="individual filter", joined_by="dptrain.contrib.individual"
):
    """Every example has a privacy budget, and is left out once its own gradients have spent it.

    The run keeps (``target_epsilon``, ``target_delta``) for every example however many steps
    follow, up to ``max_steps``, which the theorems want bounded beforehand (Koskela, Tobaben &
    Honkela 2023, Alg. 1; Feldman & Zrnic 2021, Alg. 3). They are about independent Gaussian noise
    and the example being there or not: zero-out or add-remove, not replace-one.

    Who is charged for a gradient follows from its row: the model has to see a batch in the order
    in which the loader gives its examples. A ``collate_fn`` or a model that sorts or shuffles rows
    would charge one example for another's gradient, and the guarantee would be false.

    Args:
        target_epsilon: ε > 0 that no example exceeds.
        target_delta: δ in (0, 1).
        max_steps: most steps of the run, at least those of its scheme.

    Raises:
        ValueError, TypeError: if a value is out of range or of another type.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]

    target_epsilon: float
    target_delta: float
    max_steps: int

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for field in ("target_epsilon", "target_delta"):
            object.__setattr__(self, field, checks.number(field, getattr(self, field), owner=owner))
        check_epsilon(self.target_epsilon, name="target_epsilon")
        if not 0 < self.target_delta < 1:
            raise ValueError(
                f"target_delta={self.target_delta}: must lie strictly between 0 and 1, below 1/N"
            )
        steps = self.max_steps
        if steps is None or (isinstance(steps, float) and steps == math.inf):
            raise ValueError(
                f"max_steps={steps}: the theorem needs a bound on the number of steps that is "
                "fixed beforehand; set one, however large"
            )
        object.__setattr__(self, "max_steps", checks.steps(steps, name="max_steps", owner=owner))

    def check_plan(self, scheme: Scheme, strategy: Strategy) -> None:
        """Refuse batches and correlations that the filter's theorem is not about.

        Raises:
            ValueError: saying which, and what to use.
        """
        kind = type(self).__name__
        if not isinstance(strategy, Identity):
            raise ValueError(
                f"individual={kind} with strategy={type(strategy).__name__}: individual filters "
                "are proven for independent noise only, for which the cost of a step is known "
                "when it is released; use strategy=Identity()"
            )
        if type(scheme) is not Poisson:
            raise ValueError(
                f"individual={kind} with scheme={type(scheme).__name__}: individual filters are "
                "proven for full batches and Poisson sampling; use "
                "scheme=Poisson(probability=1, ...) or Poisson.for_batch_size(...)"
            )
        if (largest := scheme.max_batch_size) is not None:
            raise ValueError(
                f"individual={kind} with max_batch_size={largest}: individual filters are not "
                "proven for truncated batches, in which an example also influences which others "
                "take part; use max_batch_size=None"
            )
        if scheme.steps > self.max_steps:
            raise ValueError(
                f"individual: max_steps={self.max_steps} is below the {scheme.steps} steps of the "
                "scheme; raise it"
            )

    def check(self, mechanism: MatrixMechanism) -> None:
        """Refuse a mechanism that the filter's theorem is not about.

        Raises:
            ValueError: saying which part, and what to use.
        """
        self.check_plan(mechanism.scheme, mechanism.strategy)
        if not mechanism.noise_multiplier > 0:
            raise ValueError(
                f"individual={type(self).__name__} with noise_multiplier=0: without noise every "
                "step costs an infinite budget; set noise_multiplier > 0"
            )
        check_delta(self.target_delta, mechanism.scheme)

    @abstractmethod
    def record(self, mechanism: MatrixMechanism) -> IndividualRecord:
        """A fresh record for a run of this mechanism.

        Raises:
            ValueError: as ``check``.
        """

    @abstractmethod
    def full_norm_steps(self, mechanism: MatrixMechanism) -> int:
        """Number of steps that an example with gradients of the full norm R may take part in."""

    def state(self, planned: Guarantee, record: IndividualRecord) -> Guarantee:
        """The run's guarantee: the plan's, or the budget's where that is smaller.

        The plan's bound holds for a filtered run although the filter's state is hidden
        (docs/theory/individual.md#thm-filtered-plan;
        ``test_no_adaptive_filtered_run_exceeds_the_plan``).

        Args:
            planned: of the same mechanism without a filter.
            record: of the run.

        Raises:
            ValueError: if the plan is about a relation that no filter's theorem covers.
        """
        if planned.adjacency not in ADJACENCIES:
            raise ValueError(
                f"adjacency={planned.adjacency.value}: an individual filter protects the presence "
                "of an example; use zero_out or add_remove"
            )
        bound = record.epsilon_bound(planned.delta)
        if planned.epsilon <= bound:
            return planned.with_notes(
                "An individual filter runs as well, but its budget is not the smaller bound"
            )
        return dataclasses.replace(
            planned,
            epsilon=bound,
            accountant=self.name,
            kind=self.kind,
            certificate=None,
            notes=(*(note for note in planned.notes if note in CONDITIONS), record.condition),
        )
