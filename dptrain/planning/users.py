"""How to bound, sample and correlate where users are protected: everything at the same (ε, δ)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dptrain.accounting import calibrate
from dptrain.accounting.base import check_epsilon, told_once
from dptrain.core import Kind, aligned, checks
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import (
    AttributionGraph,
    BoundedGraph,
    Scheme,
    UserCyclic,
    UserMinSep,
)
from dptrain.sampling.users import largest_min_sep
from dptrain.strategies import PREFIX_SUMS, BandMF, Identity, Strategy, Workload, checked_workload

BOUNDS = (1, 2, 4, 8)
"""Most examples of a user that are tried, unless told otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserRow:
    """One way to train, at the noise that the target takes.

    Attributes:
        bound: k, the most examples of a user.
        duplicates: whether copies fill up users below k.
        kept: the share of the different examples that are trained on.
        scheme: the scheme's settings, as its ``for_batch_size`` takes them.
        mechanism: scheme, strategy and σ.
        accountant: who proved it.
        kind: how.
        rmse: root mean square error of the workload's queries per unit of σ.
    """

    bound: int
    duplicates: bool
    kept: float
    scheme: dict[str, Any]
    mechanism: MatrixMechanism
    accountant: str
    kind: Kind
    rmse: float

    @property
    def error(self) -> float:
        """RMSE·σ/B̄, of the means that the optimizer gets, per unit of the clipping norm."""
        sigma = self.mechanism.noise_multiplier
        return self.rmse * sigma / self.mechanism.scheme.expected_batch_size

    @property
    def cost(self) -> float:
        """``error`` over ``kept``: what rows are compared by."""
        return self.error / self.kept

    @property
    def name(self) -> str:
        """The scheme as a user writes it, without graph and batch size."""
        settings = ", ".join(f"{key}={value}" for key, value in self.scheme.items())
        return f"{type(self.mechanism.scheme).__name__}({settings})"

    @property
    def strategy_name(self) -> str:
        """The strategy and its bands."""
        strategy = self.mechanism.strategy
        return f"{type(strategy).__name__}({strategy.bands})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready figures."""
        return {
            "max_examples": self.bound,
            "duplicates": self.duplicates,
            "kept": self.kept,
            "rows": self.mechanism.scheme.dataset_size,
            "scheme": {"type": type(self.mechanism.scheme).__name__, **self.scheme},
            "strategy": self.mechanism.strategy.to_dict(),
            "accountant": self.accountant,
            "kind": self.kind.value,
            "noise_multiplier": self.mechanism.noise_multiplier,
            "rmse": self.rmse,
            "error": self.error,
            "error_over_kept": self.cost,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class UserPlan:
    """What was compared; ``print`` it.

    Attributes:
        epsilon, delta, batch_size, steps: the question.
        examples, users: of the graph before bounding.
        rows: by ``cost``, the least first.
        skipped: what could not be computed, and why.
    """

    epsilon: float
    delta: float
    batch_size: int
    steps: int
    examples: int
    users: int
    rows: tuple[UserRow, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def best(self) -> UserRow:
        """The row of least cost."""
        return self.rows[0]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        asked = ("epsilon", "delta", "batch_size", "steps", "examples", "users")
        return {
            **{name: getattr(self, name) for name in asked},
            "rows": [row.to_dict() for row in self.rows],
            "skipped": [list(pair) for pair in self.skipped],
        }

    def to_markdown(self, most: int | None = None) -> str:
        """A Markdown table of the first ``most`` rows; ``*`` marks the best."""
        lines = [
            "| k | copies | kept | scheme | strategy | σ | RMSE·σ/B̄ | over kept |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows[:most]:
            star = "* " if row is self.best else ""
            lines.append(
                f"| {star}{row.bound} | {'yes' if row.duplicates else 'no'} | {row.kept:.1%} "
                f"| {row.name} | {row.strategy_name} | {row.mechanism.noise_multiplier:.4g} "
                f"| {row.error:.4g} | {row.cost:.4g} |"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [
            f"ε = {self.epsilon:g}, δ = {self.delta:g} for every user; {self.examples:,} examples "
            f"of {self.users:,} users; B̄ = {self.batch_size}, n = {self.steps} steps.",
            "",
            aligned(self.to_markdown(12), left=5),
        ]
        if len(self.rows) > 12:
            parts.append(f"and {len(self.rows) - 12} more, with --json")
        parts += [
            "",
            "Compared by the error of the average gradient over the share of the examples that are "
            "kept: fewer examples mean less to learn from, which no error of noise shows.",
        ]
        if self.skipped:
            parts += ["", "Not computed:", *(f"- {what}: {why}" for what, why in self.skipped)]
        best = self.best
        copies = ", duplicates=True" if best.duplicates else ""
        settings = "".join(f", {key}={value!r}" for key, value in best.scheme.items())
        parts += [
            "",
            f"Best (*): σ = {best.mechanism.noise_multiplier:.5g} ({best.kind.value}). To train "
            "with it:",
            f"  bounded = graph.bound({best.bound}{copies}, seed=0)",
            f"  scheme = {type(best.mechanism.scheme).__name__}.for_batch_size("
            f"graph=bounded.graph, batch_size={self.batch_size}, steps={self.steps}{settings})",
            f"  strategy = {_call(best.mechanism.strategy)}",
        ]
        return "\n".join(parts)


def plan_users(
    graph: AttributionGraph,
    *,
    epsilon: float,
    delta: float,
    batch_size: int,
    steps: int,
    bounds: Sequence[int] = BOUNDS,
    duplicates: Sequence[bool] = (False, True),
    max_bands: int = 64,
    workload: Workload = PREFIX_SUMS,
    seed: int = 0,
    progress: bool = True,
) -> UserPlan:
    """Compare bounds on users' examples, schemes, slots and bands at the same (ε, δ) for a user.

    Every bound k is tried with and without copies, and under each ``UserCyclic`` (1, 2, 4, … slots,
    a user's examples in one slot or spread over several), Poisson sampling with independent noise
    (``UserMinSep`` with ``min_sep=1``), ``UserMinSep`` with separations, and ``UserFixed``. Every σ
    is proven by a deterministic accountant.

    Args:
        graph: the users of every example, with its edges.
        epsilon: target ε > 0.
        delta: target δ in (0, 1).
        batch_size: B̄ ≥ 1, examples a step.
        steps: n ≥ 1.
        bounds: numbers k ≥ 1.
        duplicates: which of ``bound``'s two ways to try.
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
    most = min(checks.integer("max_bands", max_bands), steps)
    checked_workload(workload).check(steps)
    rows: list[UserRow] = []
    skipped: list[tuple[str, str]] = []
    pairs = [(checks.integer("bounds", k), bool(copies)) for k in bounds for copies in duplicates]
    with tqdm(disable=not progress, delay=2, unit="pair", leave=False) as bar:
        for k, copies in pairs:
            copied = ", with copies" if copies else ""
            bar.set_description(f"k={k}{copied}", refresh=False)  # or it shows before its delay
            bounded = graph.bound(k, duplicates=copies, seed=seed, progress=False)
            for settings, scheme, bands in _schemes(bounded, size, steps, most, seed, skipped):
                strategy = _strategy(bands, steps, workload)
                try:
                    rows.append(_row(bounded, settings, scheme, strategy, epsilon, delta, workload))
                except ValueError as error:
                    skipped.append((f"k={k}, {type(scheme).__name__}{settings}", str(error)))
                bar.update()
        if rows:
            bar.set_description("around the best", refresh=False)
            best = min(rows, key=lambda row: row.cost)
            rows += _refined(graph, best, epsilon, delta, most, seed, workload)
    if not rows:
        raise ValueError(
            f"no scheme runs batches of {size} of these examples for {steps} steps: "
            + "; ".join(dict.fromkeys(why for _, why in skipped))
        )
    return UserPlan(
        epsilon=epsilon,
        delta=delta,
        batch_size=size,
        steps=steps,
        examples=graph.examples,
        users=graph.users,
        rows=tuple(sorted(rows, key=lambda row: row.cost)),
        skipped=tuple(skipped),
    )


def _row(
    bounded: BoundedGraph,
    settings: dict[str, Any],
    scheme: Scheme,
    strategy: Strategy,
    epsilon: float,
    delta: float,
    workload: Workload,
) -> UserRow:
    with told_once():
        shown = calibrate(scheme=scheme, strategy=strategy, epsilon=epsilon, delta=delta)
    return UserRow(
        bound=bounded.k,
        duplicates=bounded.duplicates,
        kept=_share(bounded, scheme),
        scheme=settings,
        mechanism=shown.mechanism,
        accountant=shown.guarantee.accountant,
        kind=shown.guarantee.kind,
        rmse=shown.mechanism.strategy.rmse(scheme.steps, workload),
    )


def _refined(
    graph: AttributionGraph,
    best: UserRow,
    epsilon: float,
    delta: float,
    max_bands: int,
    seed: int,
    workload: Workload,
) -> list[UserRow]:
    """Cycles between the powers of two around the best one."""
    scheme = best.mechanism.scheme
    if not isinstance(scheme, UserCyclic):
        return []
    bounded = graph.bound(best.bound, duplicates=best.duplicates, seed=seed, progress=False)
    spread = scheme.partition.spread
    steps, size, found = scheme.steps, scheme.batch_size, []
    for quarters in (3, 5, 6):
        cycle = scheme.cycle * quarters // 4
        if cycle % spread or cycle == scheme.cycle or cycle * size > bounded.graph.examples:
            continue
        settings = {**best.scheme, "cycle": cycle}
        try:
            tried = UserCyclic.for_batch_size(
                graph=bounded.graph, batch_size=size, steps=steps, seed=seed, **settings
            )
            strategy = _strategy(min(tried.min_sep, max_bands), steps, workload)
            found.append(_row(bounded, settings, tried, strategy, epsilon, delta, workload))
        except ValueError:  # a slot too small: the cycle that is known stays
            continue
    return found


def _schemes(
    bounded: BoundedGraph,
    size: int,
    steps: int,
    max_bands: int,
    seed: int,
    skipped: list[tuple[str, str]],
) -> Iterator[tuple[dict[str, Any], Scheme, int]]:
    """(settings, scheme, bands) of every way to sample the bounded examples."""
    graph = bounded.graph

    def made(kind: Any, **settings: Any) -> Scheme | None:
        known = {"graph": graph, "batch_size": size, "steps": steps, "seed": seed, "method": None}
        allowed = inspect.signature(kind.for_batch_size).parameters
        fixed = {name: value for name, value in known.items() if name in allowed}
        try:
            found: Scheme = kind.for_batch_size(**fixed, **settings)
        except ValueError as error:
            skipped.append((f"k={bounded.k}, {kind.__name__}{settings}", str(error)))
            return None
        return found

    longest = min(graph.examples // size, 2 * max_bands)
    for b in (1 << i for i in range(max(1, longest).bit_length())):
        if b > longest:
            break
        spreads = {1} | {m for m in (2, bounded.k) if m <= bounded.k and b % m == 0}
        for spread in sorted(spreads):
            settings = {"cycle": b} if spread == 1 else {"cycle": b, "spread": spread}
            if (scheme := made(UserCyclic, **settings)) is not None:
                yield settings, scheme, min(scheme.min_sep, max_bands)
    if (scheme := made(UserMinSep, min_sep=1)) is not None:
        yield {"min_sep": 1}, scheme, 1
    for b in (1 << i for i in range(1, max_bands.bit_length())):
        if (scheme := made(UserMinSep, min_sep=b)) is None:
            break  # exclusion leaves ever fewer examples
        yield {"min_sep": b}, scheme, min(b, max_bands)
    if size <= graph.examples:
        yield from _fixed(graph, size, steps, max_bands, seed)


def _fixed(
    graph: AttributionGraph, size: int, steps: int, max_bands: int, seed: int
) -> Iterator[tuple[dict[str, Any], Scheme, int]]:
    """``UserFixed`` with the largest separation at which all its batches are full."""
    try:
        found = largest_min_sep(graph, batch_size=size, steps=steps, seed=seed)
    except ValueError:  # no batches are full: it says so when it is made
        return
    yield {"min_sep": found.min_sep}, found, min(found.min_sep, max_bands)


def _strategy(bands: int, steps: int, workload: Workload) -> Strategy:
    if bands == 1:
        return Identity().bind(steps)
    return BandMF(bands=bands, workload=workload).bind(steps)


def _share(bounded: BoundedGraph, scheme: Scheme) -> float:
    """The share of the different examples that a run can draw."""
    rows = bounded.rows
    if isinstance(scheme, UserCyclic):
        slots = scheme.partition.slots
        rows = rows[(slots >= 0) & (slots < scheme.steps)]  # later slots have no turn
    return len(np.unique(rows)) / bounded.source.examples


def _call(strategy: Strategy) -> str:
    if isinstance(strategy, Identity):
        return "Identity()"
    return f"BandMF(bands={strategy.bands})"
