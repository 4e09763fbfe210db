"""The cost of the steps that have run, by themselves: for a display, and no guarantee of a run."""

from __future__ import annotations

import dataclasses
import math

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.base.statement import told_once
from dptrain.accounting.dispatch import accountants_for
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.core import Guarantee, checks
from dptrain.mechanism import MatrixMechanism

PARTS = 20
"""At so many places of a run, evenly spread, its ε so far is computed, and no more often."""


def priced_steps(steps: int, planned: int) -> int:
    """The place whose ε is shown after ``steps``: the next twentieth of the plan, rounded up.

    Args:
        steps: that have run, 0..planned.
        planned: n.
    """
    part = math.ceil(steps * PARTS / planned)
    return min(planned, math.ceil(part * planned / PARTS))


def epsilon_so_far(mechanism: MatrixMechanism, steps: int, *, planned: Guarantee) -> float | None:
    """A bound on ε, at the plan's δ, for somebody who saw the first ``steps`` releases only.

    The release of the first t steps is a mechanism of its own (``MatrixMechanism.prefix``), and a
    part of what t' ≥ t steps release, so that its ε is at most theirs, and at most that of the plan
    (docs/theory/run.md#thm-prefix). It is computed at the next twentieth of the plan, by whoever of
    the accountants proves it under a second. It is *no* guarantee of a run that stops after t steps
    because of what it released, which has the plan's (docs/theory/run.md#thm-interruption).

    Args:
        mechanism: of the plan.
        steps: t in 0..n.
        planned: what an accountant said of the mechanism; its adjacency and δ are taken.

    Returns:
        ε ≥ 0, below the plan's before the last step; ``None`` where nobody proves less than the
        plan's in that time.

    Raises:
        TypeError, ValueError: if an argument is of another type or out of range.
    """
    checks.instance("mechanism", mechanism, MatrixMechanism)
    steps = checks.integer("steps", steps, minimum=0, maximum=mechanism.steps)
    checks.instance("planned", planned, Guarantee)
    if steps == 0:
        return 0.0
    place = priced_steps(steps, mechanism.steps)
    if place == mechanism.steps:
        return planned.epsilon
    begun = mechanism.prefix(place)
    if begun is None or begun.steps == mechanism.steps:
        return None
    found = [
        each.accountant
        for each in accountants_for(begun, adjacency=planned.adjacency)
        if each.cost is Cost.INSTANT
        and isinstance(each.accountant, DeterministicAccountant)
        and (each.reason is None or each.name in (planned.accountant, UnsampledGaussian.name))
    ]
    with told_once():
        asked = begun.participants
        epsilons = [each.guarantee(asked, delta=planned.delta).epsilon for each in found]
    least = min(epsilons, default=math.inf)
    return least if least < planned.epsilon else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoFar:
    """The state of a run, as progress bars and logs tell it; no statement to publish.

    Attributes:
        steps: that have run.
        steps_planned: n.
        epsilon: ``epsilon_so_far`` of them; ``None`` where only the plan's is known.
        planned: ε of the planned run, which is the guarantee of whatever comes of it; ``None`` if
            it is not known yet, as where it takes a simulation.
    """

    steps: int
    steps_planned: int
    epsilon: float | None
    planned: float | None

    @property
    def figures(self) -> dict[str, float]:
        """The known figures by name, for a log."""
        named = {"epsilon_so_far": self.epsilon, "epsilon_planned": self.planned}
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        if self.planned is None:
            return "ε: see the end"
        plan = f"ε {self.planned:.3g} planned"
        if self.epsilon is None or self.steps == self.steps_planned:
            return plan
        return f"ε {self.epsilon:.3g} so far, {self.planned:.3g} planned"
