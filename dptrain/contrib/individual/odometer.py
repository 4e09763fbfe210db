"""The individual GDP odometer: a filter whose budget grows when the user decides to go on."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from typing_extensions import override

from dptrain.accounting.base import check_epsilon
from dptrain.accounting.losses import gaussian
from dptrain.contrib.individual.gdp import GDPFilter, GDPRecord
from dptrain.core import checks
from dptrain.mechanism import MatrixMechanism

PUBLIC = "released outputs and public facts only"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GDPOdometer(GDPFilter):
    """Rounds of full batches: while m rounds are open, every example keeps to Σ μ² ≤ B_m².

    B_m² = Δ_1² + ... + Δ_m² (Koskela, Tobaben & Honkela 2023, App. C.5, arXiv 2209.15596). The
    first round is open from the start; ``private.individual.open_round()`` opens the next one,
    between two steps, and what an example has left of earlier rounds stays its own. No example
    spends of a round that is not opened.

    Whether and when to open a round is the user's decision, and may depend on released outputs and
    public facts only: parameters, noisy updates, what follows from them, public data. It must not
    depend on what is computed from the training examples without noise: ``private.individual`` and
    its active counts, training losses, metrics of examples that are to be protected. The theorem
    takes the moment at which a round is opened for a function of the outputs
    (docs/theory/individual.md#thm-gdp-odometer;
    ``test_an_odometer_holds_for_every_number_of_rounds``).

    The guarantee is that of all rounds, B_M-GDP, however many are open: their number may follow
    from what was released, and ε of the open ones by itself would be exceeded
    (``test_the_statement_holds_whenever_rounds_are_opened``). A note says B_m of the m rounds that
    are open, for whoever had fixed m before the run. A run that is set back to an earlier
    checkpoint counts all rounds as open until it has caught up with what was released (give
    ``PrivacyEngine`` a ``ledger=``, or it cannot know in another process).

    Args:
        increments: (Δ_1, ..., Δ_M), each positive, fixed beforehand.
        target_delta, max_steps: see ``IndividualFilter``.
        full_consumption: see ``GDPFilter``; for every round.

    Attributes:
        target_epsilon: ε of all rounds, B_M-GDP, at ``target_delta``.
    """

    name: ClassVar[str] = "individual GDP odometer"

    increments: tuple[float, ...]
    target_epsilon: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "increments", _positive("increments", self.increments))
        object.__setattr__(self, "target_epsilon", 1.0)  # until δ is known to be one
        super().__post_init__()
        epsilon = gaussian.epsilon(self.target_delta, self.budget)
        check_epsilon(epsilon)
        object.__setattr__(self, "target_epsilon", epsilon)

    @classmethod
    def for_epsilons(
        cls,
        epsilons: Sequence[float],
        *,
        target_delta: float,
        max_steps: int,
        full_consumption: bool = False,
    ) -> Self:
        """The odometer with ε_m after m rounds, at ``target_delta``.

        Args:
            epsilons: (ε_1, ..., ε_M), ascending.
            target_delta, max_steps, full_consumption: as for the class.

        Raises:
            ValueError: if they are not positive and ascending.
        """
        wanted = _positive("epsilons", epsilons)
        if any(one >= other for one, other in itertools.pairwise(wanted)):
            raise ValueError(
                f"epsilons={wanted}: must ascend, since they are totals after each round"
            )
        if not 0 < target_delta < 1:
            raise ValueError(f"target_delta={target_delta}: must lie strictly between 0 and 1")
        totals = [gaussian.largest_mu(epsilon, target_delta) ** 2 for epsilon in wanted]
        # A hair less, so that the squares do not add up to more than the totals.
        increments = tuple(
            math.sqrt(total - before) * (1.0 - 1e-13)
            for before, total in itertools.pairwise([0.0, *totals])
        )
        return cls(
            increments=increments,
            target_delta=target_delta,
            max_steps=max_steps,
            full_consumption=full_consumption,
        )

    @property
    def budgets(self) -> tuple[float, ...]:
        """(B_1, ..., B_M)."""
        squares = [increment**2 for increment in self.increments]
        return tuple(math.sqrt(math.fsum(squares[: m + 1])) for m in range(len(squares)))

    @functools.cached_property
    def budget(self) -> float:
        """B_M, of all rounds."""
        return self.budgets[-1]

    @override
    def record(self, mechanism: MatrixMechanism) -> OdometerRecord:
        self.check(mechanism)
        return OdometerRecord(
            size=mechanism.scheme.dataset_size,
            noise_multiplier=mechanism.noise_multiplier,
            budgets=self.budgets,
            max_steps=self.max_steps,
            full_consumption=self.full_consumption,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as of every value, without the ε that follows from the increments."""
        value = super().to_dict()
        del value["target_epsilon"]
        return value


class OdometerRecord(GDPRecord):
    """Σ (μ^(i))² of every example, and how many rounds are open.

    Args:
        budgets: (B_1, ..., B_M).
        options: the others of ``GDPRecord``.

    Attributes:
        rounds: m, how many rounds are open; public.
        budget: B_m.
    """

    def __init__(self, *, budgets: Sequence[float], **options: Any) -> None:
        super().__init__(budget=budgets[0], **options)
        self.budgets = tuple(budgets)
        self.rounds = 1

    def open_round(self) -> None:
        """Permit every example to spend the next increment too; see ``GDPOdometer`` for when.

        Raises:
            ValueError: if all rounds are open.
            RuntimeError: if a step is under way: some of its examples were admitted already.
        """
        if self.rounds == len(self.budgets):
            raise ValueError(
                f"all {self.rounds} rounds of the odometer are open, and their number and "
                "increments are fixed before the run; set more increments in another run. Whether "
                f"to open one may depend on {PUBLIC}"
            )
        if self._staged:
            raise RuntimeError(
                "open_round() was called in the middle of a step: open a round between two steps, "
                "when optimizer.at_step_boundary is true (finish an abandoned step first). The "
                f"decision may depend on {PUBLIC}"
            )
        self._open(self.rounds + 1)

    @override
    def with_all_rounds(self) -> OdometerRecord:
        record = copy.copy(self)
        record._open(len(self.budgets))
        return record

    def _open(self, rounds: int) -> None:
        self.rounds, self.budget = rounds, self.budgets[rounds - 1]

    @override
    def epsilon_bound(self, delta: float) -> float:
        """ε of B_M-GDP, of all rounds."""
        return gaussian.epsilon(delta, self.budgets[-1])

    @property
    def condition(self) -> str:
        """The budget of all rounds, and that of the open ones."""
        last, rounds = len(self.budgets), self.rounds
        kept = self._kept_to(self.budgets[-1])
        every = f"{kept}. {rounds} of {last} rounds of an odometer are open"
        if rounds == last:
            return every
        return (
            f"{every}; the statement is about all of them, as others may be opened depending on "
            f"{PUBLIC}. Had their number been fixed before the run, what is released before the "
            f"next one opens would be {self.budget:.6g}-GDP"
        )

    def _budget_in(self, spending: dict[str, Any]) -> float:
        rounds = spending["rounds"]
        if not 1 <= rounds <= len(self.budgets):
            raise ValueError(
                f"the individual record has {rounds} open rounds, but the odometer has "
                f"{len(self.budgets)}, so the checkpoint was changed after it was written: resume "
                "from an unchanged one"
            )
        return self.budgets[rounds - 1]

    def _spending(self) -> dict[str, Any]:
        return {**super()._spending(), "rounds": self.rounds}

    def _load_spending(self, spending: dict[str, Any]) -> None:
        super()._load_spending(spending)
        self._open(spending["rounds"])


def _positive(name: str, values: Any) -> tuple[float, ...]:
    """A tuple of positive finite numbers, at least one."""
    found = checks.numbers(name, values)
    if not found:
        raise ValueError(f"{name}=(): at least one round")
    return tuple(checks.number(f"{name}[{i}]", value, above=0) for i, value in enumerate(found))
