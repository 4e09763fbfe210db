"""The privacy cost of a choice among several runs on the same data, as one statement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from dptrain.accounting.base import WEAKEST, TradeOff
from dptrain.accounting.losses import least_true
from dptrain.contrib.selection.composed import ComposedRuns
from dptrain.contrib.selection.selection import SelectionCurve
from dptrain.contrib.selection.trials import TrialCount
from dptrain.core import Kind, checks

_TOLERANCE = 1e-4  # of ε, relative, rounded up

PLANNED = (
    "all runs that might be made, their number and the mechanism of each (scheme, strategy, σ and "
    "number of steps) were fixed before the first result of any of them was seen"
)
"""Belongs to every statement about runs that are composed."""
_SECRET = (
    "nothing else of the search is released: neither other runs and their scores nor how many "
    "there were"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoicePrivacy:
    """An (ε, δ) about all that a search for the best run releases.

    Attributes:
        epsilon: ε ≥ 0, rounded up; ``inf`` where nothing is shown.
        delta: δ in (0, 1].
        kind: how it was shown: that of the runs, where it is weaker than a bound.
        runs: how many runs were planned, of which any may be made and released; ``None`` where
            one of a random number is.
        trials: the law of that number, ``None`` where all runs are released.
        accountant: whose statements about single runs it rests on.
    """

    epsilon: float
    delta: float
    kind: Kind
    runs: int | None
    trials: TrialCount | None
    accountant: str

    def __str__(self) -> str:
        numbers = f"(ε = {self.epsilon:.6g}, δ = {self.delta:.6g})-differentially private"
        if self.trials is None:
            what = (
                f"All {self.runs} planned runs together, whichever of them were made, with "
                f"whatever was chosen by looking at their results, are {numbers}"
            )
        else:
            what = (
                f"The best of a secret, random number of runs ({self.trials.describe()}) is "
                f"{numbers}"
            )
        return (
            f"{what}, if {self.condition}; this is {self.kind.sentence} (runs: {self.accountant})."
        )

    @property
    def condition(self) -> str:
        """The condition on the search under which the statement is true."""
        return PLANNED if self.trials is None else _SECRET

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value (ε = ∞ as ``"inf"``)."""
        return {
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf",
            "delta": self.delta,
            "kind": self.kind.value,
            "condition": self.condition,
            "runs": self.runs,
            "trials": None if self.trials is None else self.trials.to_dict(),
            "accountant": self.accountant,
        }


def compose_runs(runs: Sequence[TradeOff], *, delta: float) -> ChoicePrivacy:
    """The least ε at δ of several planned runs together, whichever of them are made.

    Give every run that might be made, not those that were: when to stop is a result, and ε of the
    runs so far is exceeded by whoever stops where it is best
    (``test_the_runs_that_were_made_are_no_plan``). Where no plan was fixed, ``BudgetFilter`` keeps
    a total. Hyperparameters, which runs are made and which is chosen may follow from whatever was
    released before; noise and steps may not. The runs' pairs compose
    (docs/theory/selection.md#thm-several-runs), each direction by itself; of runs of which one
    (ε, δ) is known this is the optimal composition of Kairouz, Oh & Viswanath 2015, Theorem 3.3,
    arXiv 1311.0776 (``test_bare_guarantees_compose_as_they_best_can``).

    Args:
        runs: what is known of each that was planned, ``TradeOff.of(guarantee)`` or
            ``trade_off(mechanism, guarantee)``; their noise has to be independent.
        delta: of the statement. Below what the runs' own δ add up to, nothing may be shown.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there are no runs, they are about different adjacencies or units, or δ is
            not in (0, 1).
    """
    together = ComposedRuns(runs)
    delta = checks.number("delta", delta, above=0, below=1)
    kept = together.runs
    return ChoicePrivacy(
        epsilon=together.epsilon(delta),
        delta=delta,
        kind=weakest_kind(kept),
        runs=len(kept),
        trials=None,
        accountant=", ".join(dict.fromkeys(run.accountant for run in kept)),
    )


def select_run(run: TradeOff, trials: TrialCount, *, delta: float) -> ChoicePrivacy:
    """The least ε at δ of the best of a secret, random number of independent runs.

    The bound of ``SelectionCurve``, which is at most those of Papernot & Steinke 2022, Theorem 2,
    arXiv 2110.03620, and ((2+η) ε, E[K] δ) of Liu & Talwar 2019, arXiv 1811.07971
    (docs/theory/selection.md#thm-selection). It holds if (docs/theory/selection.md#thm-trial)

    * the number of runs is drawn from ``trials`` before the first, and is kept secret;
    * every run draws its hyperparameters and all other randomness by itself, in one way
      (``one_of_runs``), which no other run and no result changes;
    * the score is a function of what the run releases and of data that are public, and the rule
      that stops a run early looks at that run alone;
    * only the best run is released.

    Args:
        run: what is known of one run, its draw of hyperparameters included.
        trials: the law of the number of runs.
        delta: of the statement, above ``trials.mean`` times the δ below which nothing is known of
            the run.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if δ is not in (0, 1).
    """
    checks.instance("run", run, TradeOff)
    checks.instance("trials", trials, TrialCount, example="PoissonTrials(10)")
    delta = checks.number("delta", delta, above=0, below=1)
    curves = [SelectionCurve(run, trials, remove=remove) for remove in (True, False)]

    def reached(epsilon: float) -> bool:
        return all(curve.delta(epsilon) <= delta for curve in curves)

    return ChoicePrivacy(
        epsilon=_least(reached),
        delta=delta,
        kind=weakest_kind([run]),
        runs=None,
        trials=trials,
        accountant=run.accountant,
    )


_LARGEST = 1e6


def _least(reached: Callable[[float], bool]) -> float:
    """Least ε ≥ 0, to a relative 1e-4, rounded up; ∞ if there is none."""
    if reached(0.0):
        return 0.0
    high = 1e-3
    while not reached(high):
        high *= 2.0
        if high > _LARGEST:
            return math.inf
    low = high / 2.0 if high > 1e-3 else 0.0
    return least_true(reached, low=low, high=high, tolerance=_TOLERANCE * high / 2.0)


def weakest_kind(runs: Sequence[TradeOff]) -> Kind:
    """The kind of a statement about all of these runs: a bound, or that of the weakest run."""
    return max((Kind.UPPER_BOUND, *(run.kind for run in runs)), key=WEAKEST.index)
