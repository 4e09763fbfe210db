"""What the simulating accountants of user-level b-min-sep sampling share."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod

from dptrain.accounting.simulation.monte_carlo import MonteCarloAccountant
from dptrain.accounting.users.law import MOST_EXAMPLES, UserLaw
from dptrain.accounting.users.losses import UserLosses
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep

# Numbers in the table of C's columns.
_MOST_ENTRIES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedUser(MonteCarloAccountant):
    """Bounds for ``UserMinSep`` from simulated losses, bands ≤ min_sep, any C."""

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, bands beyond the separation and users of many examples."""
        scheme, strategy = mechanism.scheme, mechanism.strategy
        if not isinstance(scheme, UserMinSep):
            return "it needs UserMinSep sampling"
        if reason := self.scheme_refusal(scheme):
            return reason
        if strategy.bands > scheme.min_sep:
            return (
                f"it needs bands <= min_sep, the strategy has bands={strategy.bands} and the "
                f"scheme min_sep={scheme.min_sep}; use fewer bands or a larger min_sep"
            )
        if strategy.rows(scheme.steps) != scheme.steps:
            return "it needs a square strategy matrix"
        if scheme.graph.max_examples > MOST_EXAMPLES:
            return (
                f"it covers at most {MOST_EXAMPLES} examples a user, one has "
                f"{scheme.graph.max_examples}; bound the attribution graph first"
            )
        if scheme.steps * min(strategy.bands, scheme.steps) > _MOST_ENTRIES:
            return f"its table of C would hold more than {_MOST_ENTRIES} numbers; use fewer bands"
        return None

    @abstractmethod
    def scheme_refusal(self, scheme: UserMinSep) -> str | None:
        """Why the scheme's graph or rule of exclusion is not covered, or ``None``."""

    @abstractmethod
    def law(self, mechanism: MatrixMechanism) -> UserLaw:
        """The pair that dominates every user of a mechanism that is not refused."""

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """By name only: it takes minutes of simulation, and others cover every such scheme."""
        return f"it simulates for minutes; ask for it by name (accountant={self.name!r})"

    def simulation(self, mechanism: MatrixMechanism) -> UserLosses:
        """The losses of ``law``."""
        return UserLosses(self.law(mechanism))
