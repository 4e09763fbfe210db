"""The ways to sample users' examples that a plan compares."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from dptrain.sampling import (
    AttributionGraph,
    BoundedGraph,
    PerUser,
    Scheme,
    UserCyclic,
    UserMinSep,
)
from dptrain.sampling.users import largest_min_sep

Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A scheme and what a plan has to know of it.

    Attributes:
        settings: what ``for_batch_size`` was given besides graph, batch size, steps and seed.
        bands: most bands that its accountants allow, and the plan.
        kept: see ``UserRow``.
        batch_size: what ``for_batch_size`` was given.
        bounded: the graph whose examples are drawn, ``None`` where that is the whole one.
        parts: see ``UserRow``.
    """

    settings: Settings
    scheme: Scheme
    bands: int
    kept: float
    batch_size: float
    bounded: BoundedGraph | None = None
    parts: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserWays:
    """Makes schemes for one question, and notes which cannot be made.

    Args:
        size: examples a step.
        steps: n.
        max_bands: most bands of a strategy.
        seed: of partitions; public.
        skipped: where it is noted what cannot be made, and why.
    """

    size: int
    steps: int
    max_bands: int
    seed: int
    skipped: list[tuple[str, str]]

    def of_examples(self, bounded: BoundedGraph) -> Iterator[Way]:
        """Every way to draw the bounded examples, each of which is clipped by itself."""
        graph = bounded.graph
        longest = min(graph.examples // self.size, 2 * self.max_bands)
        for b in _powers(longest):
            spreads = {1} | {m for m in (2, bounded.k) if m <= bounded.k and b % m == 0}
            for spread in sorted(spreads):
                yield from self.cyclic(bounded, b, spread)
        yield from self._made(bounded, UserMinSep, min_sep=1)
        for b in _powers(self.max_bands)[1:]:
            found = list(self._made(bounded, UserMinSep, min_sep=b))
            if not found:
                break  # exclusion leaves ever fewer examples
            yield from found
        if self.size <= graph.examples:
            yield from self._fixed(bounded)

    def cyclic(
        self, bounded: BoundedGraph, cycle: int, spread: int, *, quiet: bool = False
    ) -> Iterator[Way]:
        """``UserCyclic`` with these slots, if there is one; ``quiet`` does not note a failure."""
        settings = {"cycle": cycle} if spread == 1 else {"cycle": cycle, "spread": spread}
        yield from self._made(bounded, UserCyclic, quiet=quiet, **settings)

    def of_users(self, graph: AttributionGraph, group_size: int) -> Iterator[Way]:
        """``PerUser`` with groups of that size: Poisson sampling of users, or in cycles.

        So many users a step are drawn that they have ``size`` examples on average: a step costs
        the same gradients as elsewhere.
        """
        groups = np.minimum(graph.examples_per_user(), group_size)
        batch = self.size / float(groups.mean())
        parts = float((1.0 / groups).mean())
        longest = min(int(graph.users // batch), 2 * self.max_bands, self.steps)
        for b in _powers(max(1, longest)):
            users: Any = "Poisson" if b == 1 else {"type": "CyclicPoisson", "cycle": b}
            settings = {"group_size": group_size, "users": users}
            try:
                scheme = PerUser.for_batch_size(
                    graph=graph, batch_size=batch, steps=self.steps, **settings
                )
            except ValueError as error:
                self.skipped.append((f"PerUser{settings}", str(error)))
                return
            yield Way(
                settings=settings,
                scheme=scheme,
                bands=min(b, self.max_bands),
                kept=1.0,  # which examples of a user are used is drawn anew each time
                batch_size=batch,
                parts=parts,
            )

    def _made(
        self, bounded: BoundedGraph, kind: Any, *, quiet: bool = False, **settings: Any
    ) -> Iterator[Way]:
        known = {
            "graph": bounded.graph,
            "batch_size": self.size,
            "steps": self.steps,
            "seed": self.seed,
            "method": None,
        }
        allowed = inspect.signature(kind.for_batch_size).parameters
        fixed = {name: value for name, value in known.items() if name in allowed}
        try:
            found: Scheme = kind.for_batch_size(**fixed, **settings)
        except ValueError as error:
            if not quiet:
                self.skipped.append((told(bounded, kind, settings), str(error)))
            return
        yield self._of(bounded, settings, found)

    def _fixed(self, bounded: BoundedGraph) -> Iterator[Way]:
        """``UserFixed`` with the largest separation at which all its batches are full."""
        try:
            found = largest_min_sep(
                bounded.graph, batch_size=self.size, steps=self.steps, seed=self.seed
            )
        except ValueError:  # no batches are full: it says so when it is made
            return
        yield self._of(bounded, {"min_sep": found.min_sep}, found)

    def _of(self, bounded: BoundedGraph, settings: Settings, scheme: Scheme) -> Way:
        return Way(
            settings=settings,
            scheme=scheme,
            bands=min(scheme.min_sep, self.max_bands),
            kept=_share(bounded, scheme),
            batch_size=self.size,
            bounded=bounded,
        )


def told(bounded: BoundedGraph | None, kind: Any, settings: Settings) -> str:
    """The name by which a plan lists a way that it skipped."""
    stated = ", ".join(f"{name}={value}" for name, value in settings.items())
    bound = "" if bounded is None else f"k={bounded.k}{', copies' * bounded.duplicates}, "
    return f"{bound}{kind.__name__}({stated})"


def _powers(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``."""
    return [1 << i for i in range(most.bit_length())] if most > 0 else []


def _share(bounded: BoundedGraph, scheme: Scheme) -> float:
    """The share of the different examples that a run can draw."""
    rows = bounded.rows
    if isinstance(scheme, UserCyclic):
        slots = scheme.partition.slots
        rows = rows[(slots >= 0) & (slots < scheme.steps)]  # later slots have no turn
    return len(np.unique(rows)) / bounded.source.examples
