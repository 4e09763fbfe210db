"""Batches of fixed size in which every user appears rarely, and at most so often.

A greedy choice goes through a queue of all examples, which a ring of fixed memory holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import Indices, SampledRun, Scheme
from dptrain.sampling.stream import SeededStream, index_dtype, to_array, to_tensor
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.graph_edges import Offsets, Users, any_in_row, gather
from dptrain.sampling.users.user_scheme import UserScheme, shared_examples


class Queue:
    """Examples in order, in memory that does not move.

    Args:
        entries: the first contents, from the front; copied.
        capacity: most entries that it will ever hold; their number now unless given.
    """

    def __init__(self, entries: npt.NDArray[Any], capacity: int | None = None) -> None:
        self._size = len(entries)
        capacity = max(1, self._size if capacity is None else capacity)
        self._ring = np.empty(capacity, dtype=entries.dtype)
        self._ring[: self._size] = entries
        self._front = 0

    def __len__(self) -> int:
        return self._size

    def _places(self, begin: int, count: int) -> npt.NDArray[np.int64]:
        return (begin + np.arange(count)) % len(self._ring)

    def entries(self) -> npt.NDArray[Any]:
        """A copy of the contents, from the front."""
        return self._ring[self._places(self._front, self._size)]

    def pop_front(self, count: int) -> npt.NDArray[Any]:
        """Remove and return the first ``count`` entries, at most as many as there are."""
        taken = self._ring[self._places(self._front, count)]
        self._front = (self._front + count) % len(self._ring)
        self._size -= count
        return taken

    def push_front(self, entries: npt.NDArray[Any]) -> None:
        """Put entries before all others, within the capacity."""
        self._front = (self._front - len(entries)) % len(self._ring)
        self._ring[self._places(self._front, len(entries))] = entries
        self._size += len(entries)

    def push_back(self, entries: npt.NDArray[Any]) -> None:
        """Put entries after all others, within the capacity."""
        self._ring[self._places(self._front + self._size, len(entries))] = entries
        self._size += len(entries)


Examples = npt.NDArray[Any]


class Packing:
    """Users' last and total participations, and the greedy choice under their limits.

    Args:
        graph: with its edges.
        min_sep: b.
        max_participations: m.

    Attributes:
        last: int32, shape (users,): step of the last participation, negative before the first.
        used: int32, shape (users,): number of participations.
    """

    def __init__(self, graph: AttributionGraph, min_sep: int, max_participations: int) -> None:
        _ = graph.offsets  # refuse a graph without edges now, not at the first step
        self._graph = graph
        self._min_sep = min_sep
        self._most = max_participations
        self.last = np.full(graph.users, -1, dtype=np.int32)
        self.used = np.zeros(graph.users, dtype=np.int32)

    def choose(
        self, step: int, tried: Examples, most: int
    ) -> tuple[Examples, Examples, npt.NDArray[np.int64], int]:
        """Use the first ``most`` examples that fit into this step's batch, one after the other.

        Args:
            step: t.
            tried: distinct examples, in the order in which they are looked at.
            most: how many are wanted, ≥ 1.

        Returns:
            The examples used; those that were blocked and may be free later; the step at which to
            look at each of these again, none being free before; how many were looked at. An example
            with a user who has no participation left is in neither.
        """
        rows, users = gather(self._graph.offsets, self._graph.members, tried)
        last = self.last[users]
        # Those who are in the batch already were free when the step began.
        in_batch = any_in_row(last == step, rows)
        free_at = np.where((last < 0) | (last == step), 0, last + np.int64(self._min_sep))
        until = np.maximum.reduceat(free_at, rows[:-1])
        exhausted = any_in_row(self.used[users] >= self._most, rows)
        chosen = _first_disjoint(rows, users, (until <= step) & ~in_batch & ~exhausted)
        places = np.flatnonzero(chosen)[:most]
        looked_at = len(tried) if len(places) < most else int(places[-1]) + 1
        taken = np.zeros(len(tried), dtype=bool)
        taken[places] = True
        touched = users[np.repeat(taken, np.diff(rows))]
        self.last[touched] = step
        self.used[touched] += 1
        rest = np.flatnonzero(~(taken | exhausted)[:looked_at])
        # Who was free when the step began shares a user with the batch.
        later = np.where(until[rest] > step, until[rest], step + self._min_sep)
        return tried[places], tried[rest], later, looked_at


def _first_disjoint(
    rows: Offsets, users: Users, candidate: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """The candidates that a walk in order takes, taking each that shares no user with one taken.

    A candidate that comes first for all its users among the undecided is taken, and those who
    share a user with it are not. The first undecided one is decided in each round, and most are in
    a few.
    """
    chosen = np.zeros(len(candidate), dtype=bool)
    row = np.repeat(np.arange(len(candidate)), np.diff(rows))
    alive = candidate[row]
    users, row = users[alive], row[alive]
    while len(row):
        distinct, first, inverse = np.unique(users, return_index=True, return_inverse=True)
        is_first = np.zeros(len(row), dtype=bool)
        is_first[first] = True  # edges are in the order of their rows
        behind = np.zeros(len(candidate), dtype=bool)
        behind[row[~is_first]] = True
        wins = ~behind[row]
        chosen[row[wins]] = True
        taken = np.zeros(len(distinct), dtype=bool)
        taken[inverse[wins]] = True
        decided = np.zeros(len(candidate), dtype=bool)
        decided[row[taken[inverse]]] = True  # the winners, and those who share a user with one
        left = ~decided[row]
        users, row = users[left], row[left]
    return chosen


@dataclasses.dataclass(frozen=True)
class Fill:
    """A measure of how full the batches of one run are.

    Attributes:
        smallest: examples in the smallest batch.
        short_steps: batches with fewer than ``batch_size`` examples.
        first_short_step: index of the first of them, or ``None``.
        missing: examples that they lack in all.
    """

    smallest: int
    short_steps: int
    first_short_step: int | None
    missing: int


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class UserFixed(UserScheme):
    """Batches of fixed size in which a user has at most one example, every b steps at most.

    The batches are chosen greedily over a random order of the examples, as the unamplified
    baseline of multi-attribution is (Ganesh et al. 2025, arXiv 2503.03622; Dong & Ganesh 2026,
    arXiv 2602.09338, section 7.3). An example is used if none of its users is in the batch, in
    one of the b-1 batches before, or in m batches already. One that does not fit waits until it
    does, and then goes first; one that was used may be used again once all others had their turn;
    one with a user who was in m batches is never used again. The guarantee needs no randomness.

    A batch is smaller than ``batch_size`` where nothing more fits, and may be empty. That depends
    on the public graph only: ``check`` says beforehand what a run will find, and
    ``dptrain.sampling.users.user_fixed_limits`` finds limits under which all batches are full.

    Args:
        graph: the users of every example; public. Drawing needs one with its edges.
        batch_size: largest batch, in 1..N; also B̄, the public constant that sums are divided by.
        min_sep: b ≥ 1.
        steps: n ≥ 1.
        max_participations: m ≥ 1, most batches that a user is in. It cannot exceed ceil(n/b), which
            takes the place of a larger number and is what leaving it out means.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    graph: AttributionGraph
    batch_size: int
    min_sep: int
    steps: int
    max_participations: int = None  # type: ignore[assignment]  # None becomes ceil(n/b)

    unamplified: ClassVar[bool] = True

    def __post_init__(self) -> None:
        owner = "UserFixed"
        self._check_graph()
        fields.settle(self, integers=("batch_size", "min_sep", "steps"))
        if self.batch_size > self.graph.examples:
            raise ValueError(
                f"{owner}: batch_size={self.batch_size} is more than the {self.graph.examples} "
                "examples of the graph; lower it"
            )
        fit = -(-self.steps // self.min_sep)
        most = self.max_participations
        most = fit if most is None else checks.integer("max_participations", most, owner=owner)
        object.__setattr__(self, "max_participations", min(most, fit))

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Users who share examples and take part once an epoch at most."""
        return {
            "": cls(
                graph=shared_examples(run.dataset_size),
                batch_size=round(run.batch_size),
                min_sep=run.separation,
                steps=run.steps,
                max_participations=round(run.steps / run.epoch_length),
            )
        }

    @classmethod
    def for_batch_size(
        cls,
        *,
        graph: AttributionGraph,
        batch_size: int,
        min_sep: int,
        steps: int,
        max_participations: int | None = None,
    ) -> Self:
        """The scheme, as the class makes it: B̄ is the size of a batch.

        Raises:
            ValueError: as the class.
        """
        return cls(
            graph=graph,
            batch_size=batch_size,
            min_sep=min_sep,
            steps=steps,
            max_participations=max_participations,  # type: ignore[arg-type]
        )

    @property
    def expected_batch_size(self) -> float:
        """B̄ as it was given; batches that could not be filled are smaller."""
        return float(self.batch_size)

    def stream(self, seed: int) -> UserFixedStream:
        """Batches in O(B̄·users per example) amortized work a step.

        4 bytes an example and 8 a user; where users block most examples, those that wait take
        about 10 bytes more each, and a step that looks through all of them several times that.

        Raises:
            ValueError: if the graph holds no edges, as one read from a file; ``attach`` it first.
        """
        return UserFixedStream(self, seed)

    def check(self, seed: int) -> Fill:
        """The ``Fill`` of the batches of the run with this seed, by drawing them all.

        Raises:
            ValueError: if the graph holds no edges.
        """
        bar = tqdm(self.stream(seed), total=self.steps, desc="checking batches", delay=2)
        sizes = np.array([len(batch) for batch in bar])
        short = np.flatnonzero(sizes < self.batch_size)
        return Fill(
            smallest=int(sizes.min()),
            short_steps=len(short),
            first_short_step=int(short[0]) if len(short) else None,
            missing=int((self.batch_size - sizes).sum()),
        )

    def shortfall(self, seed: int) -> str | None:
        """A message on batches of the run with this seed that are not full, and what to change."""
        found = self.check(seed)
        if not found.short_steps:
            return None
        average = self.batch_size - found.missing / self.steps
        return (
            f"UserFixed: {found.short_steps} of {self.steps} batches have fewer than "
            f"batch_size={self.batch_size} examples, although sums are divided by batch_size: the "
            f"first is that of step {found.first_short_step}, the smallest has {found.smallest}, "
            f"and {found.missing} are missing in total. The noise is that of full batches, but on "
            f"average {average:.6g} examples share it. Lower batch_size to at most that "
            f"number, min_sep={self.min_sep} or steps={self.steps}, or raise "
            f"max_participations={self.max_participations}; largest_batch_size, largest_min_sep "
            "and fewest_participations of dptrain.sampling.users.user_fixed_limits compute limits "
            "under which all batches are full"
        )


class UserFixedStream(SeededStream):
    """Batches of ``UserFixed``.

    Every example that may be used again is in ``_queue``, or in ``_waiting`` under the first step
    at which the users it has now allow it.
    """

    def __init__(self, scheme: UserFixed, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        self._dtype = index_dtype(scheme.dataset_size)
        order = self._rng.permutation(np.arange(scheme.dataset_size, dtype=self._dtype))
        self._queue = Queue(order)
        self._packing = Packing(scheme.graph, scheme.min_sep, scheme.max_participations)
        self._waiting: dict[int, list[npt.NDArray[Any]]] = {}

    def _draw(self) -> Indices:
        released = self._waiting.pop(self.step, None)
        if released is not None:
            self._queue.push_front(np.concatenate(released))
        size = self._scheme.batch_size
        batch: list[npt.NDArray[Any]] = []
        missing = ahead = size
        while missing and len(self._queue):
            # Those that are blocked leave the queue: looking ever further costs each of them once.
            tried = self._queue.pop_front(min(len(self._queue), ahead + ahead // 8 + 8))
            used, blocked, until, looked_at = self._packing.choose(self.step, tried, missing)
            self._queue.push_front(tried[looked_at:])
            self._wait(blocked, until)
            batch.append(used)
            missing -= len(used)
            ahead *= 2
        chosen = np.concatenate(batch) if batch else np.empty(0, dtype=self._dtype)
        self._queue.push_back(chosen)
        return np.sort(chosen).astype(np.int64)

    def _wait(self, blocked: npt.NDArray[Any], until: npt.NDArray[np.int64]) -> None:
        order = np.argsort(until, kind="stable")
        times, starts = np.unique(until[order], return_index=True)
        for time, group in zip(times.tolist(), np.split(blocked[order], starts[1:]), strict=False):
            if time < self.steps:
                self._waiting.setdefault(time, []).append(group)

    def _own_state(self) -> dict[str, Any]:
        times = sorted(self._waiting)
        groups = [np.concatenate(self._waiting[time]) for time in times]
        waiting = np.concatenate(groups) if groups else np.empty(0, dtype=self._dtype)
        return {
            "queue": to_tensor(self._queue.entries()),
            "waiting_until": to_tensor(np.array(times, dtype=np.int64)),
            "waiting_sizes": to_tensor(np.array([len(g) for g in groups], dtype=np.int64)),
            "waiting": to_tensor(waiting),
            "last_used": to_tensor(self._packing.last),
            "times_used": to_tensor(self._packing.used),
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        users = self._scheme.graph.users
        times = to_array(state["waiting_until"], np.int64)
        ends = np.cumsum(to_array(state["waiting_sizes"], np.int64))
        groups = np.split(to_array(state["waiting"], self._dtype), ends[:-1]) if len(ends) else []
        self._waiting = {
            time: [group.copy()] for time, group in zip(times.tolist(), groups, strict=True)
        }
        entries = to_array(state["queue"], self._dtype)
        self._queue = Queue(entries, self._scheme.dataset_size)
        self._packing.last = to_array(state["last_used"], np.int32, users)
        self._packing.used = to_array(state["times_used"], np.int32, users)
