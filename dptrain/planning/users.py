"""The choice of bounding, sampling and strategy to protect users, all at the same (ε, δ)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from tqdm.auto import tqdm

from dptrain.accounting import accountants_for, calibrate, find_accountants
from dptrain.accounting.base import DeterministicAccountant, check_epsilon, told_once
from dptrain.core import checks
from dptrain.mechanism import MatrixMechanism
from dptrain.planning.user_plan import UserPlan, UserRow, in_lines
from dptrain.planning.user_schemes import UserWays, Way, told
from dptrain.sampling import AttributionGraph, BoundedGraph, Scheme, UserCyclic
from dptrain.strategies import (
    PREFIX_SUMS,
    BandMF,
    ColumnNormalizedBandMF,
    Identity,
    Strategy,
    Workload,
    checked_workload,
)

BOUNDS = (1, 2, 4, 8)
"""Most examples of a user that are tried, unless told otherwise."""

_ROUNDS = 3  # in which the gaps around the best cycle are halved
_FAMILIES = 2  # of bound, copies and spread that are refined
_NORMALIZED = 3  # rows that are tried with normalized columns
_MOST_ENTRIES = 8e6  # n·bands², about a quarter of a minute of optimization


def plan_users(
    graph: AttributionGraph,
    *,
    epsilon: float,
    delta: float,
    batch_size: int,
    steps: int,
    bounds: Sequence[int] = BOUNDS,
    duplicates: Sequence[bool] = (False, True),
    alignment: float = 1.0,
    max_bands: int = 64,
    workload: Workload = PREFIX_SUMS,
    seed: int = 0,
    progress: bool = True,
) -> UserPlan:
    """Compare bounds on users' examples, schemes, slots and bands at the same (ε, δ) for a user.

    Every bound k is tried with and without copies, and under each ``UserCyclic`` (1, 2, 4, … slots,
    a user's examples in one slot or spread over several), Poisson sampling with independent noise
    (``UserMinSep`` with ``min_sep=1``), ``UserMinSep`` with separations, and ``UserFixed``. Where
    every example has one user, nobody's examples need be left out: ``PerUser`` is compared too,
    which averages up to k of them a step and clips the mean once, with users drawn by Poisson
    sampling or in cycles. Cycles between the powers of two follow around the best, and
    ``ColumnNormalizedBandMF`` for the best few rows. Every σ is proven by a deterministic
    accountant.

    What is compared is RMSE·σ/B̄ over the share of the examples that are kept, at an equal number of
    examples a step. B̄ counts what is clipped. For ``PerUser`` that is users, so the noise of a step
    is divided by fewer; but a mean over several gradients that do not all point one way is shorter,
    and so is the clipping norm that suits it: by ``UserRow.norm``, which follows from the
    ``alignment`` of a user's gradients. At 1, the default, nothing is gained; a smaller number is a
    claim about the data, which no privacy depends on (docs/guides/multi-attribution.md).

    Args:
        graph: the users of every example, with its edges.
        epsilon: target ε > 0.
        delta: target δ in (0, 1).
        batch_size: B̄ ≥ 1, examples a step.
        steps: n ≥ 1.
        bounds: numbers k ≥ 1.
        duplicates: which of ``bound``'s two ways to try.
        alignment: in [0, 1]: the mean inner product of two gradients of one user over the mean
            square norm of one. Only a number that does not come from the private data is free.
        max_bands: most bands of a strategy.
        workload: which queries count.
        seed: of bounding and partition; public.
        progress: show a progress bar.

    Raises:
        TypeError, ValueError: if an argument is out of range, or nothing can be computed.
    """
    checks.instance("graph", graph, AttributionGraph)
    epsilon = check_epsilon(epsilon)
    delta = checks.number("delta", delta, above=0, below=1, owner="plan_users")
    size = checks.integer("batch_size", batch_size, owner="plan_users")
    steps = checks.steps(steps, owner="plan_users")
    alignment = checks.number("alignment", alignment, minimum=0, maximum=1, owner="plan_users")
    most = min(checks.integer("max_bands", max_bands), steps)
    checked_workload(workload).check(steps)
    pairs = [(checks.integer("bounds", k), bool(copies)) for k in bounds for copies in duplicates]
    skipped: list[tuple[str, str]] = []
    ways = UserWays(size=size, steps=steps, max_bands=most, seed=seed, skipped=skipped)
    search = _UserSearch(epsilon, delta, alignment, workload, ways)
    with tqdm(disable=not progress, delay=2, unit="pair", leave=False) as bar:
        for k, copies in pairs:
            copied = ", with copies" if copies else ""
            bar.set_description(f"k={k}{copied}", refresh=False)  # or it shows before its delay
            bounded = graph.bound(k, duplicates=copies, seed=seed, progress=False)
            search.run(ways.of_examples(bounded), bar)
        if graph.is_disjoint:
            bar.set_description("means of users", refresh=False)
            for group_size in sorted({min(k, graph.max_examples) for k, _ in pairs}):
                search.run(ways.of_users(graph, group_size), bar)
        bar.set_description("around the best", refresh=False)
        search.refine(bar)
    if not search.found:
        reasons = "\n".join(in_lines(skipped))
        raise ValueError(
            f"no scheme runs batches of {size} of these examples for {steps} steps:\n{reasons}"
        )
    return UserPlan(
        epsilon=epsilon,
        delta=delta,
        batch_size=size,
        steps=steps,
        alignment=alignment,
        examples=graph.examples,
        users=graph.users,
        rows=tuple(sorted((row for row, _ in search.found), key=lambda row: row.cost)),
        skipped=tuple(skipped),
    )


@dataclasses.dataclass
class _UserSearch:
    """Rows for one way after the other, and the results so far."""

    epsilon: float
    delta: float
    alignment: float
    workload: Workload
    ways: UserWays
    found: list[tuple[UserRow, Way]] = dataclasses.field(default_factory=list)

    def run(self, ways: Iterator[Way], bar: tqdm) -> None:
        """Calibrate each way with as many bands as it allows."""
        for way in ways:
            self._add(way, _banded(way.bands, self.ways.steps, self.workload))
            bar.update()

    def _add(self, way: Way, strategy: Strategy) -> None:
        try:
            row = self._row(way, strategy)
        except ValueError as error:
            what = told(way.bounded, type(way.scheme), way.settings)
            self.ways.skipped.append((what, str(error)))
        else:
            self.found.append((row, way))

    def _row(self, way: Way, strategy: Strategy) -> UserRow:
        with told_once():
            shown = min(
                (
                    calibrate(
                        scheme=way.scheme,
                        strategy=strategy,
                        epsilon=self.epsilon,
                        delta=self.delta,
                        accountant=name,
                    ).guarantee
                    for name in _proven(way.scheme, strategy)
                ),
                key=lambda each: each.noise_multiplier,
            )
        return UserRow(
            bound=None if way.bounded is None else way.bounded.k,
            duplicates=way.bounded is not None and way.bounded.duplicates,
            kept=way.kept,
            scheme=way.settings,
            mechanism=MatrixMechanism(
                scheme=way.scheme, strategy=strategy, noise_multiplier=shown.noise_multiplier
            ),
            accountant=shown.accountant,
            kind=shown.kind,
            rmse=strategy.rmse(way.scheme.steps, self.workload),
            batch_size=way.batch_size,
            parts=way.parts,
            alignment=self.alignment,
        )

    def _best(self) -> list[tuple[UserRow, Way]]:
        return sorted(self.found, key=lambda pair: pair[0].cost)

    def _families(self) -> dict[_Family, BoundedGraph]:
        """The slots of a bounded graph that are refined, best first."""
        found: dict[_Family, BoundedGraph] = {}
        for _, way in self._best():
            if isinstance(way.scheme, UserCyclic) and way.bounded is not None:
                bounded = way.bounded
                spread = way.scheme.partition.spread
                found.setdefault((bounded.k, bounded.duplicates, spread), bounded)
        return dict(list(found.items())[:_FAMILIES])

    def refine(self, bar: tqdm) -> None:
        """Try cycles between the powers of two around the best ones; then normalized columns."""
        for family, bounded in self._families().items():
            for _ in range(_ROUNDS):
                before = len(self.found)
                for cycle in self._between(family):
                    self.run(self.ways.cyclic(bounded, cycle, family[2], quiet=True), bar)
                if len(self.found) == before:
                    break
        for _, way in self._best()[:_NORMALIZED]:
            if way.bands == 1 or self.ways.steps * way.bands**2 > _MOST_ENTRIES:
                continue
            bar.update()
            try:
                strategy = ColumnNormalizedBandMF(bands=way.bands, workload=self.workload)
                self._add(way, strategy.bind(self.ways.steps))
            except ValueError:  # not made for so many steps, or for this workload
                continue

    def _between(self, family: _Family) -> list[int]:
        """The middles of the gaps beside the family's best cycle, as multiples of its spread."""
        k, copies, spread = family
        costs = {
            way.scheme.cycle: row.cost
            for row, way in self.found
            if isinstance(way.scheme, UserCyclic)
            and (row.bound, row.duplicates, way.scheme.partition.spread) == (k, copies, spread)
        }
        known = sorted(costs)
        at = known.index(min(known, key=lambda cycle: costs[cycle]))
        middles = [
            (low + high) // (2 * spread) * spread
            for low, high in itertools.pairwise(known)
            if known[at] in (low, high)
        ]
        return [cycle for cycle in middles if cycle not in costs]


_Family = tuple[int, bool, int]  # k, copies, spread


def _proven(scheme: Scheme, strategy: Strategy) -> list[str | None]:
    """``[None]`` if deterministic accountants answer; else names that a simulation would refine."""
    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    answering = find_accountants(mechanism)
    if all(isinstance(each, DeterministicAccountant) for each in answering):
        return [None]
    table = [each.accountant for each in accountants_for(mechanism) if each.reason is None]
    names = [each.name for each in table if isinstance(each, DeterministicAccountant)]
    if not names:
        raise ValueError(f"only a simulation ({answering[0].name}) covers it")
    return [*names]


def _banded(bands: int, steps: int, workload: Workload) -> Strategy:
    if bands == 1:
        return Identity().bind(steps)
    return BandMF(bands=bands, workload=workload).bind(steps)
