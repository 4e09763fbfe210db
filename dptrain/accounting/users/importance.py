"""Certified noise of user-level sampling by weighted samples, below what revealed draws prove."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import Any

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.simulation.weighted.accountant import (
    Bounds,
    TermsAtEpsilon,
    WeightedAccountant,
)
from dptrain.accounting.users.disjoint import UserMinSepMonteCarlo
from dptrain.accounting.users.exposed import ExposedSteps
from dptrain.accounting.users.importance_terms import TiltedUser
from dptrain.accounting.users.law import UserLaw
from dptrain.accounting.users.monte_carlo import SimulatedUser
from dptrain.accounting.users.revealed import RevealedDraws, RevealedDrawsAnyBlocking
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep

# Messages of the draws, for each number of examples: steps times separation.
_MOST_BYTES = 1 << 30


class _UserBounds(Bounds):
    def __init__(self, law: UserLaw, curve: Curve) -> None:
        self._law, self._curve = law, curve

    @property
    def curve(self) -> Curve:
        return self._curve

    def to_dict(self) -> dict[str, Any]:
        return {"law": "user chain", **self._law.to_dict()}

    def tilted(self, sigma: float) -> TermsAtEpsilon:
        return TiltedUser(self._law, sigma).both


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedUser(WeightedAccountant):
    """Certifies ``UserMinSep`` by the terms of ``TiltedUser``.

    The top of the grid is what follows if all draws of the user are revealed
    (docs/theory/users.md#thm-users-revealed, docs/theory/users.md#thm-users-blocking).
    """

    max_samples: int = 2 * 10**6  # a tenth of a millisecond each at a thousand steps

    ample = 200_000

    @abstractmethod
    def simulated(self) -> SimulatedUser:
        """The accountant that draws from the same law without weights."""

    def proven(self, scheme: UserMinSep) -> DeterministicAccountant:
        """The deterministic accountant of the rule of exclusion."""
        sampled = scheme.exclusion == "sampling"
        return RevealedDraws() if sampled else RevealedDrawsAnyBlocking()

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses what the simulation or the deterministic bound refuses, and large tables."""
        scheme = mechanism.scheme
        if reason := self.simulated().refusal(mechanism):
            return reason
        assert isinstance(scheme, UserMinSep)
        if reason := self.proven(scheme).refusal(mechanism):
            return reason
        numbers = scheme.graph.max_examples  # no more of them occur
        size = 8 * scheme.steps * scheme.min_sep * numbers
        if size > _MOST_BYTES:
            return (
                f"its tables of {scheme.steps} steps and min_sep={scheme.min_sep} for {numbers} "
                f"numbers of examples take {size / 2**30:.3g} GiB, more than "
                f"{_MOST_BYTES / 2**30:.3g}; use a smaller min_sep, bound the graph, or "
                f"accountant={self.simulated().name!r}"
            )
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """By name only: it simulates for minutes, and others cover every such scheme."""
        return f"it simulates for minutes; ask for it by name (accountant={self.name!r})"

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes, also at δ = 1e-6 and a thousand steps."""
        return Cost.MINUTES

    def bounds(self, mechanism: MatrixMechanism) -> Bounds:
        """What revealed draws prove."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        law = self.simulated().law(mechanism)
        return _UserBounds(law, self.proven(scheme).curve(mechanism))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExposedStepsImportance(WeightedUser):
    """``ExposedSteps`` by weighted samples: any graph, exclusion by sampled examples.

    (docs/theory/users.md#thm-users-exposed, docs/theory/users.md#thm-users-weighted.)
    """

    name = "exposed-steps-importance"
    display = "exposed steps, importance sampling"

    def simulated(self) -> SimulatedUser:
        """``ExposedSteps``."""
        return ExposedSteps()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserMinSepImportance(WeightedUser):
    """``UserMinSepMonteCarlo`` by weighted samples: disjoint graphs, both rules of exclusion.

    (docs/theory/users.md#thm-users-disjoint, docs/theory/users.md#thm-users-weighted.)
    """

    name = "user-min-sep-importance"
    display = "user b-min-sep importance sampling"

    def simulated(self) -> SimulatedUser:
        """``UserMinSepMonteCarlo``."""
        return UserMinSepMonteCarlo()
