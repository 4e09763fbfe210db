"""The examples that share a user with a recent one: exclusion of multi-attribution b-min-sep."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from dptrain.core import checks
from dptrain.sampling.scheme import Indices
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.graph_edges import any_in_row, gather

Exclusion = Literal["sampling", "participation"]
"""The event that bars an example's neighbors: that it was sampled, or that it took part."""

EXCLUSIONS: tuple[Exclusion, ...] = ("sampling", "participation")


def checked(owner: str, exclusion: Any) -> Exclusion:
    """``exclusion`` if it is one of ``EXCLUSIONS``."""
    checks.choice("exclusion", exclusion, EXCLUSIONS, owner=owner)
    found: Exclusion = exclusion
    return found


def default_burn_in(min_sep: int, exclusion: Exclusion) -> int:
    """Steps to draw before the first one of a run, or of an average.

    S_{t-b+1}, …, S_t are all that a batch depends on under ``"sampling"``, so b-1 earlier steps are
    the stationary regime itself. Under ``"participation"`` it is approached in waves of period b.
    With one example a user a wave shrinks by about e^(-2π²c/(1+c)³) in each period, c = b·p (the
    renewal equation of gaps b-1 + Geometric(p)): after ten the mean is within 1e-6 of its limit for
    c = 1 and within 1e-3 for c = 2. Shared examples slow it down: at c = 3, five users an example,
    a fifth of the mean is left.
    """
    return min_sep - 1 if exclusion == "sampling" else 10 * min_sep


class RecentUsers:
    """The last step at which a user barred others, and the examples that this leaves out.

    An example is left out at step t if one of its users was touched at a step in [t-b+1, t-1]. It
    shares a user with a touching example e exactly if it is in N(e), so this is the exclusion set
    of Dong & Ganesh 2026 (arXiv 2602.09338): of Algorithm 3 where every *sampled* example touches
    its users (``"sampling"``), of Algorithm 4 where only those do that were used
    (``"participation"``). The work is proportional to the users of the sampled examples.

    Args:
        graph: with its edges.
        min_sep: b.
        start: the first step, which sees no earlier one; it may be negative.

    Attributes:
        last: int32, shape (users,): the last step at which a user was touched, ``start - 1`` before
            the first.
    """

    def __init__(
        self, graph: AttributionGraph, min_sep: int, exclusion: Exclusion, *, start: int = 0
    ) -> None:
        _ = graph.offsets  # refuse a graph without edges now, not at the first step
        self._graph = graph
        self._min_sep = min_sep
        self._by_sampling = exclusion == "sampling"
        self._never = start - 1
        self.last = np.full(graph.users, self._never, dtype=np.int32)

    def admit(self, step: int, sampled: Indices) -> Indices:
        """The batch B_t of the sampled examples S_t, in their order; call it once for each step."""
        if not len(sampled):
            return sampled
        rows, users = gather(self._graph.offsets, self._graph.members, sampled)
        # A user never touched is not recent, however far back b reaches.
        recent = self.last[users] > max(step - self._min_sep, self._never)
        free = ~any_in_row(recent, rows)
        touching = users if self._by_sampling else users[np.repeat(free, np.diff(rows))]
        self.last[touching] = step
        return sampled[free]
