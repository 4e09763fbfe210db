"""The slot of a cycle that every example of an attribution graph has, as public knowledge."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from dptrain.core import JsonValue, checks
from dptrain.sampling import fields
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.graph_edges import Offsets
from dptrain.sampling.users.graph_statistics import Distribution
from dptrain.sampling.users.partition.coloring import colored
from dptrain.sampling.users.partition.packing import cover, imbalance, packed
from dptrain.sampling.users.partition.pieces import (
    METHODS,
    Method,
    Rows,
    components,
    conflicts,
    cut_up,
    default_method,
)

# Keeps the order of the pieces apart from anything else that is derived from an equal seed.
_DOMAIN = 0x7061727473
# Components are cut finer while parts differ by more than this.
_UNEVEN = 0.02
_FINEST = 16
_OWN = "given"
# What follows from the slots.
_FACTS = ("cycle", "separation", "sizes", "profiles", "dropped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphPartition(JsonValue, family="graph partition"):
    """Every example's slot in a cycle of b steps, found in the public graph alone.

    All examples of a user lie in one slot, or in slots that are at least ``separation`` steps
    apart, round the cycle. An example that cannot be placed so is *dropped*: it takes part in no
    step. Like the graph, the value that is stored holds a few facts and a fingerprint; the slots
    themselves stay out of its JSON.

    ``GraphPartition.of_graph`` finds the slots, ``from_slots`` takes your own.

    Args:
        graph: the users of every example.
        cycle: b ≥ 1, the number of slots.
        spread: m ≥ 1, the number of slots over which the examples of a part are spread; a divisor
            of b.
        separation: steps between any two slots of one user, b where each has one.
        sizes: the number of examples in every slot, b numbers.
        profiles: what users there are. Each is the size of a slot and then descending numbers: some
            users have so many examples in each of their slots, none of which is smaller; every
            user has at most as many in each slot, and no smaller slots, as one of these.
        dropped: examples without a slot.
        method: ``"metis"``, ``"greedy"``, or ``"given"`` for slots of your own.
        seed: of the partition; public.
        fingerprint: SHA-256 (hex) of the slots.
    """

    graph: AttributionGraph
    cycle: int
    spread: int
    separation: int
    sizes: tuple[int, ...]
    profiles: tuple[tuple[int, ...], ...]
    dropped: int
    method: str
    seed: int
    fingerprint: str

    def __post_init__(self) -> None:
        owner = "GraphPartition"
        checks.instance("graph", self.graph, AttributionGraph, owner=owner)
        fields.settle(self, integers=("cycle", "spread", "separation"))
        for name in ("dropped", "seed"):
            found = checks.integer(name, getattr(self, name), minimum=0, owner=owner)
            object.__setattr__(self, name, found)
        object.__setattr__(self, "sizes", _integers("sizes", self.sizes))
        profiles = tuple(_integers("profiles", profile) for profile in self.profiles)
        object.__setattr__(self, "profiles", profiles)
        if self.method not in (*METHODS, _OWN):
            raise ValueError(f"{owner}: method={self.method!r} must be one of {(*METHODS, _OWN)}")
        whole = (
            len(self.sizes) == self.cycle
            and min(self.sizes) >= 0
            and sum(self.sizes) + self.dropped == self.graph.examples
            and self.separation <= self.cycle
            and profiles
            and all(len(p) >= 2 and min(p) >= 1 and p[0] in self.sizes for p in profiles)
            and all(sum(p[1:]) <= self.graph.max_examples for p in profiles)
            # Somebody has so many examples, and a profile covers those that have a slot.
            and max(sum(p[1:]) for p in profiles) >= self.graph.max_examples - self.dropped
            and all((len(p) - 1) * self.separation <= self.cycle for p in profiles)
        )
        if not whole:
            raise ValueError(
                f"{owner}: sizes, profiles, dropped={self.dropped} and separation="
                f"{self.separation} are impossible with cycle={self.cycle} and "
                f"{self.graph.examples} examples; make it with GraphPartition.of_graph"
            )

    @classmethod
    def of_graph(
        cls,
        graph: AttributionGraph,
        *,
        cycle: int,
        spread: int = 1,
        method: Method | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> Self:
        """The partition that this package finds: parts of nearly equal size, few dropped examples.

        Connected components stay whole unless they are larger than a part; larger ones are cut with
        few conflicts between the pieces (METIS, Karypis & Kumar 1998). Pieces are packed into
        ``cycle/spread`` parts, the largest first, and an example is dropped for every conflict
        that is left between parts (a greedy vertex cover). With ``spread=m`` each part has m slots,
        ``cycle/m`` steps apart, and a user at most ceil(k/m) examples in any of them: who cannot be
        placed so (an odd cycle of conflicts, with m = 2) is dropped as well.

        The result depends on the graph, the arguments and, for METIS, the version of ``pymetis``.

        Args:
            graph: with its edges.
            cycle: b ≥ 1, the number of slots.
            spread: m ≥ 1, a divisor of ``cycle``.
            method: ``"metis"``, which needs the extra ``dptrain[users]``, or ``"greedy"``; by
                default METIS if it is installed.
            seed: non-negative; it need not be secret.
            progress: whether bars are shown when it takes over two seconds.

        Raises:
            TypeError, ValueError: if an argument is out of range, there are fewer examples than
                slots, or the graph is detached.
        """
        owner = "GraphPartition"
        checks.instance("graph", graph, AttributionGraph, owner=owner)
        cycle = checks.integer("cycle", cycle, owner=owner)
        spread = checks.integer("spread", spread, owner=owner)
        seed = checks.integer("seed", seed, minimum=0, owner=owner)
        if cycle % spread:
            raise ValueError(
                f"{owner}: spread={spread} does not divide cycle={cycle}, but each part of the "
                "graph has that many slots at equal distances: change one of the two"
            )
        _check_cycle(graph, cycle)
        if method is None:
            method = default_method()
        if method not in METHODS:
            raise ValueError(f"{owner}: method={method!r} is unknown; use one of {METHODS}")
        parts = cycle // spread
        with tqdm(total=4, desc="Partition", unit="stage", delay=2, disable=not progress) as bar:
            by_user, of_user = graph.by_user()
            bar.update()
            part = _parts(graph, by_user, of_user, parts, method, seed)
            bar.update()
            between = _between(part, by_user, of_user)
            part[cover(*between)] = -1
            bar.update()
            slot = part
            if spread > 1:
                most = -(-graph.max_examples // spread)
                color = colored(
                    graph.offsets,
                    graph.members,
                    by_user,
                    of_user,
                    part,
                    parts=parts,
                    spread=spread,
                    most=most,
                )
                slot = np.where(color < 0, -1, part + color * parts)
            bar.update()
        return cls._of(graph, slot, cycle=cycle, spread=spread, method=method, seed=seed)

    @classmethod
    def from_slots(cls, graph: AttributionGraph, slots: npt.ArrayLike, *, cycle: int) -> Self:
        """The partition with slots of your own, for instance those of a run that is resumed.

        Args:
            graph: with its edges.
            slots: a number from 0 to ``cycle`` - 1 for every example, or -1 for one that is
                dropped, shape (examples,). ``slots`` of a partition is such an array.
            cycle: b ≥ 1.

        Raises:
            TypeError, ValueError: if they are none, no example has a slot, or there are fewer
                examples than slots.
        """
        owner = "GraphPartition"
        checks.instance("graph", graph, AttributionGraph, owner=owner)
        cycle = checks.integer("cycle", cycle, owner=owner)
        _check_cycle(graph, cycle)
        try:
            slot = np.asarray(slots)
        except ValueError as error:
            raise ValueError(f"{owner}: slots must be one row of integers") from error
        if slot.dtype.kind not in "iu" or slot.shape != (graph.examples,):
            raise ValueError(
                f"{owner}: slots of type {slot.dtype} and shape {slot.shape}: give an integer for "
                f"each of the {graph.examples} examples"
            )
        # Before they are converted: 2^64 - 1 would become -1.
        if slot.min() < -1 or slot.max() >= cycle or slot.max() < 0:
            raise ValueError(
                f"{owner}: slots from {slot.min()} to {slot.max()}: must lie in 0 to {cycle - 1}, "
                "or be -1 for examples that are dropped, and at least one must be kept"
            )
        return cls._of(graph, slot.astype(np.int64), cycle=cycle, spread=1, method=_OWN, seed=0)

    @classmethod
    def _of(
        cls,
        graph: AttributionGraph,
        slot: Rows,
        *,
        cycle: int,
        spread: int,
        method: str,
        seed: int,
    ) -> Self:
        """The facts about slots, which it keeps and makes read-only."""
        sizes = np.bincount(slot[slot >= 0], minlength=cycle)
        profiles, separation = _profiles(graph, slot, sizes, cycle)
        narrow = slot.astype(np.int16 if cycle <= np.iinfo(np.int16).max else np.int32)
        narrow.setflags(write=False)
        found = cls(
            graph=graph,
            cycle=cycle,
            spread=spread,
            separation=separation,
            sizes=tuple(sizes.tolist()),
            profiles=profiles,
            dropped=int(np.count_nonzero(slot < 0)),
            method=method,
            seed=seed,
            fingerprint=hashlib.sha256(slot.astype("<i4").tobytes()).hexdigest(),
        )
        object.__setattr__(found, "_slots", narrow)
        return found

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value, profiles as lists of lists; without the slots."""
        return {**super().to_dict(), "profiles": [list(profile) for profile in self.profiles]}

    @property
    def attached(self) -> bool:
        """True if this value holds the slots."""
        return hasattr(self, "_slots")

    @property
    def slots(self) -> npt.NDArray[np.signedinteger]:
        """The slot of every example, -1 for who is dropped, shape (examples,); read-only.

        Raises:
            ValueError: if the partition was read from a file; ``attach`` it first.
        """
        if not self.attached:
            raise ValueError(
                "this partition was read from a file and holds no slots: build the graph from the "
                "data again and pass it to attach()"
            )
        return cast(npt.NDArray[np.signedinteger], self._slots)  # type: ignore[attr-defined]

    @property
    def kept(self) -> int:
        """Number of examples with a slot."""
        return self.graph.examples - self.dropped

    def component_sizes(self) -> Distribution:
        """The number of connected components of every size, in examples.

        Raises:
            ValueError: if the graph holds no edges.
        """
        label = components(self.graph.examples, *self.graph.by_user())
        return Distribution.of(np.bincount(label))

    @property
    def max_per_slot(self) -> int:
        """Most examples of a user in one slot."""
        return max(profile[1] for profile in self.profiles)

    @property
    def max_slots(self) -> int:
        """Most slots of a user."""
        return max(len(profile) - 1 for profile in self.profiles)

    def attach(self, source: AttributionGraph | GraphPartition) -> GraphPartition:
        """This partition with its slots: found anew in the graph, or taken from another value.

        Raises:
            TypeError: if it is neither.
            ValueError: if it is another graph, or other slots, or these have other sizes, profiles
                or distances than this partition states.
        """
        if isinstance(source, GraphPartition):
            found = source
        elif self.method == _OWN:
            raise ValueError(
                "the slots of this partition were given by hand and cannot be computed from the "
                "graph: pass GraphPartition.from_slots(graph, slots, cycle=…) to attach()"
            )
        else:
            found = GraphPartition.of_graph(
                self.graph.attach(source),
                cycle=self.cycle,
                spread=self.spread,
                method=cast(Method, self.method),
                seed=self.seed,
            )
        if found.fingerprint == self.fingerprint and found.graph == self.graph:
            self._check_facts(found)
        else:
            raise ValueError(
                "the partition has changed: its slots have the fingerprint "
                f"{found.fingerprint[:12]}… instead of {self.fingerprint[:12]}…, which another "
                "version of pymetis may cause. Pass attach() the partition that the run started "
                "with, from its slots: GraphPartition.from_slots(graph, slots, cycle=…)"
            )
        attached = dataclasses.replace(self, graph=found.graph)
        object.__setattr__(attached, "_slots", found.slots)
        return attached

    def _check_facts(self, found: GraphPartition) -> None:
        """Refuse a value whose facts are not those of its slots: accountants read them."""
        for name in _FACTS:
            stated, true = getattr(self, name), getattr(found, name)
            if stated != true:
                raise ValueError(
                    f"the partition read from a file states {name}={_short(stated)}, but its slots "
                    f"have {name}={_short(true)}: create it again with GraphPartition.of_graph or "
                    "from_slots"
                )


def _integers(name: str, row: Iterable[object]) -> tuple[int, ...]:
    return tuple(checks.integer(name, n, minimum=0, owner="GraphPartition") for n in row)


def _check_cycle(graph: AttributionGraph, cycle: int) -> None:
    if cycle > graph.examples:
        raise ValueError(
            f"GraphPartition: cycle={cycle} slots for {graph.examples} examples leave some empty; "
            f"lower it to at most {graph.examples}"
        )


def _short(value: object) -> str:
    """A few characters of a value that may be a long tuple."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _parts(
    graph: AttributionGraph, by_user: Offsets, of_user: Rows, parts: int, method: Method, seed: int
) -> Rows:
    """The part of every example: pieces, packed."""
    label = components(graph.examples, by_user, of_user)
    best, least = label, float("inf")
    finer = 1
    while True:
        largest = max(1, graph.examples // (parts * finer))
        piece = cut_up(label, by_user, of_user, largest=largest, method=method, seed=seed)
        sequence = np.random.SeedSequence(seed, spawn_key=(_DOMAIN,))
        rng = np.random.Generator(np.random.PCG64DXSM(sequence))
        part = packed(np.bincount(piece), parts, rng)[piece]
        uneven = imbalance(np.bincount(part, minlength=parts))
        if uneven < least:
            best, least = part, uneven
        finer *= 2
        if least <= _UNEVEN or finer > _FINEST or largest == 1:
            return best


def _between(part: Rows, by_user: Offsets, of_user: Rows) -> tuple[Rows, Rows]:
    """The pairs of examples that share a user and lie in different parts."""
    follows = np.ones(len(of_user), dtype=bool)
    follows[by_user[:-1]] = False
    at = np.flatnonzero(follows)
    differs = at[part[of_user[at - 1]] != part[of_user[at]]]
    torn = np.unique(np.searchsorted(by_user, differs, side="right") - 1)
    left, right = conflicts(by_user, of_user, torn)
    apart = part[left] != part[right]
    return left[apart], right[apart]


def _profiles(
    graph: AttributionGraph, slot: Rows, sizes: Rows, cycle: int
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The users' slots, those that others cover left out, and the least distance between them."""
    of_edge = np.repeat(slot, np.diff(graph.offsets))
    placed = of_edge >= 0
    key = graph.members[placed].astype(np.int64) * cycle + of_edge[placed]
    pairs, counts = np.unique(key, return_counts=True)
    users, slots = pairs // cycle, pairs % cycle
    firsts = np.flatnonzero(np.concatenate(([True], users[1:] != users[:-1])))
    number = np.diff(np.concatenate((firsts, [len(users)])))
    separation, found = cycle, []
    for many in np.unique(number).tolist():
        rows = firsts[number == many][:, None] + np.arange(many)
        where = slots[rows]  # ascending
        if many > 1:
            around = where[:, 0] + cycle - where[:, -1]
            separation = min(separation, int(around.min()), int(np.diff(where, axis=1).min()))
        least = sizes[where].min(axis=1)
        profile = np.column_stack((-np.sort(-counts[rows], axis=1), least))
        # Of equal numbers the smallest slot stands for all; lexicographic order puts it first.
        distinct = np.unique(profile, axis=0)
        first = np.concatenate(([True], (distinct[1:, :-1] != distinct[:-1, :-1]).any(axis=1)))
        found += [(int(p[-1]), *map(int, p[:-1])) for p in distinct[first]]
    return tuple(sorted(p for p in found if not any(_covers(q, p) for q in found))), separation


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if users of profile ``one`` have all that those of ``other`` have, and more."""
    if one == other or len(one) < len(other) or one[0] > other[0]:
        return False
    return all(more >= less for more, less in zip(one[1:], other[1:], strict=False))
