"""The engine with noise in floating point, as in ``broken_engines``, and what finds it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch
from scipy.stats import binom

from tests.helpers.broken_engines import CHANCE
from tests.helpers.released import in_floating_point, membership
from tests.oracles.membership_game import leaks
from tests.oracles.reachable import share_unreachable

_SIGMA, _BOUND = 20.0, 0.7
_NUMBERS, _RELEASES = 500, 40


@dataclasses.dataclass(frozen=True)
class ReleaseFault:
    """A way to break the release; as a ``Fault``, but that the audit is of numbers, not of noise.

    Attributes:
        what: in words.
        found_by: what finds it, in words.
        broken: the engine is, in this context.
        dtype: of the parameters of the run that is audited.
    """

    what: str
    found_by: str
    broken: Callable[[], contextlib.AbstractContextManager[None]]
    dtype: torch.dtype

    def audited(self, seed: int) -> tuple[str, ...]:
        """What a run of the engine, as it is at the moment, contradicts."""
        game = membership(
            _SIGMA,
            dtype=self.dtype,
            seed=1000 * seed,
            bound=_BOUND,
            numbers=_NUMBERS,
            releases=_RELEASES,
        )
        return leaks(game, chance=CHANCE)

    def power(self) -> float:
        """One number that the other sum cannot have tells a release; enough of these tell all.

        The share of such numbers is computed to first order, and a tenth is taken off.
        """
        told = 1 - (1 - 0.9 * share_unreachable(_SIGMA * _BOUND)) ** _NUMBERS
        needed = int(binom.isf(CHANCE / 2, _RELEASES, 0.5)) + 1
        return float(binom.sf(needed - 1, _RELEASES, told))


RELEASE_FAULTS = {
    name: ReleaseFault(
        what=f"{dtype} sums with float32 noise, added in floating point",
        found_by="which of two known sums every number can be of",
        broken=in_floating_point,
        dtype=getattr(torch, dtype),
    )
    for name, dtype in (("float32", "float32"), ("float64", "float64"))
}
