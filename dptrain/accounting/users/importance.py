"""Certified noise of user-level sampling by weighted samples, below what revealed draws prove.

They answer by themselves where hidden draws pay and the time is bounded, by facts of the scheme
that are public: see ``WeightedUser.reserved``.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from typing import Any

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve
from dptrain.accounting.best_of import BestOf
from dptrain.accounting.simulation.weighted.accountant import (
    Bounds,
    TermsAtEpsilon,
    WeightedAccountant,
)
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.accounting.users.disjoint import UserMinSepMonteCarlo
from dptrain.accounting.users.exposed import ExposedSteps
from dptrain.accounting.users.importance_terms import TiltedUser
from dptrain.accounting.users.law import UserLaw
from dptrain.accounting.users.monte_carlo import SimulatedUser
from dptrain.accounting.users.neighbors import paths_to_neighbors
from dptrain.accounting.users.revealed import RevealedDraws
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep

# Messages of the draws, for each number of examples: steps times separation.
_MOST_BYTES = 1 << 30
# Nanoseconds of a core for a step of a sample: for itself, for each number of examples that occurs,
# and for each band (measured at 100 to 1,000 steps, 2 to 128 bands, 1 to 8 numbers).
_STEP, _NUMBER, _BAND = 30.0, 60.0, 1.0
# What the samples of one look may take; all looks of a calibration take about twice that.
_MOST_NANOSECONDS = 6e10
# So many samples are worth starting for: M up to about 200 δ.
_FEWEST = 20_000
# Share of exposed steps from which on hidden draws gain less than a per cent: at .77 σ was 9 % less
# than with revealed draws, at .98 not at all (arXiv's graph, k = 2, δ = 2e-6).
_MOST_EXPOSED = 0.9
_MOST_PATHS = 4 * 10**8  # about half a minute


class _UserBounds(Bounds):
    def __init__(self, law: UserLaw, proven: BestOf, mechanism: MatrixMechanism) -> None:
        self._law, self._proven, self._mechanism = law, proven, mechanism

    @functools.cached_property
    def curve(self) -> Curve:
        return self._proven.curve(self._mechanism)

    @property
    def most_samples(self) -> int:
        return affordable(self._law)

    def to_dict(self) -> dict[str, Any]:
        return {"law": "user chain", **self._law.to_dict()}

    def least_sigma(self, epsilon: float, delta: float, *, progress: bool) -> float | None:
        """To the precision of deterministic calibration, which it answers instead of."""
        found = self._proven.calibrate(self._mechanism, epsilon=epsilon, delta=delta)
        return found.noise_multiplier

    def tilted(self, sigma: float) -> TermsAtEpsilon:
        return TiltedUser(self._law, sigma).both


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedUser(WeightedAccountant):
    """Certifies ``UserMinSep`` by the terms of ``TiltedUser``.

    The top of the grid is what follows if all draws of the user are revealed
    (docs/theory/users.md#thm-users-revealed, docs/theory/users.md#thm-users-blocking), or if no use
    is made of them, whichever is less: so no statement is above what would be stated without
    samples. Samples are limited to what a core draws in a minute, and a calibration to about two.
    """

    max_samples: int = 2 * 10**6  # fewer where a sample has many steps

    refines = True
    ample = 200_000

    @abstractmethod
    def simulated(self) -> SimulatedUser:
        """The accountant that draws from the same law without weights."""

    def proven(self, scheme: UserMinSep) -> BestOf:
        """The deterministic accountants that would answer instead."""
        return BestOf.of([RevealedDraws(), *([UnsampledGaussian()] if scheme.unamplified else [])])

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses what the simulation or the deterministic bound refuses, and large tables."""
        scheme = mechanism.scheme
        if reason := self.simulated().refusal(mechanism):
            return reason
        assert isinstance(scheme, UserMinSep)
        if reason := self.proven(scheme).members[0].refusal(mechanism):
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
        """By name only where samples would gain little, or take long.

        It reads the public graph, the scheme and the number of bands, and nothing else.
        """
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        by_name = f"ask for it by name (accountant={self.name!r})"
        if scheme.min_sep == 1 and mechanism.strategy.bands == 1:
            return f"with min_sep=1 the loss is known without samples; {by_name}"
        if reason := self.known_elsewhere(scheme):
            return f"{reason}; {by_name}"
        if scheme.graph.attached and (paths := paths_to_neighbors(scheme.graph)) > _MOST_PATHS:
            return f"counting neighbors would follow {paths:.1g} paths in the graph; {by_name}"
        law = self.simulated().law(mechanism)
        if (share := law.exposed_share) > _MOST_EXPOSED:
            return f"{share:.0%} of the steps are exposed, so that little stays hidden; {by_name}"
        if affordable(law) < _FEWEST:
            return f"a sample of {law.steps} steps takes too long for a minute of them; {by_name}"
        return None

    def known_elsewhere(self, scheme: UserMinSep) -> str | None:
        """Why another simulation answers, or ``None``."""
        return None

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Minutes, also at δ = 1e-6 and a thousand steps."""
        return Cost.MINUTES

    def bounds(self, mechanism: MatrixMechanism) -> Bounds:
        """What revealed draws prove."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        law = self.simulated().law(mechanism)
        return _UserBounds(law, self.proven(scheme), mechanism)


def affordable(law: UserLaw) -> int:
    """Samples of a pair that a core draws in about a minute, with compiled code."""
    step = _STEP + _NUMBER * len(law.examples) + _BAND * law.columns.shape[1]
    return int(_MOST_NANOSECONDS / (law.steps * step))


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

    def known_elsewhere(self, scheme: UserMinSep) -> str | None:
        """Disjoint graphs have the user's own chain."""
        if scheme.graph.is_disjoint:
            return "every example has one user, where 'user-min-sep-importance' knows the chain"
        return None


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
