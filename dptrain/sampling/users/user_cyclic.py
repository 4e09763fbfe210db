"""Cyclic Poisson sampling of users who share examples: the public graph decides who meets whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import Indices, SampledRun, Scheme
from dptrain.sampling.schemes.drawing import mean_truncated_binomial, successes, truncate
from dptrain.sampling.stream import SeededStream, index_dtype
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.partition import GraphPartition
from dptrain.sampling.users.partition.pieces import Method
from dptrain.sampling.users.user_scheme import UserScheme, shared_examples


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class UserCyclic(UserScheme):
    """Step t draws from slot t mod b of a partition of the public graph, each example by a coin.

    All examples of a user lie in one slot, or in slots that are ``min_sep`` steps apart, so that
    nobody's draws bar anybody else's: what the others do shows nothing about a user, and the
    guarantee uses that the user's own draws are hidden (docs/theory/users.md#thm-users-cyclic).
    Other schemes for users who share examples leave out whoever shares a user with someone drawn
    lately, which gives the draws away (docs/theory/users.md#thm-users-attack).

    An example of slot s is drawn with probability B̄ over the size of the slot. Examples that
    ``GraphPartition`` had to drop are never drawn; ``shortfall`` says how many. The guarantee is
    for the fixed public graph, as everywhere with users.

    Args:
        partition: the slot of every example; public. Drawing needs one with its slots.
        batch_size: B̄ > 0, the expected number of examples drawn in a step, the same at every step;
            at most the size of the smallest slot.
        steps: n ≥ 1.
        max_batch_size: B ≥ 1: of more than B drawn examples, B are kept, each subset being as
            likely, and every batch is padded to B rows of weight 0. ``None``: neither.

    Raises:
        TypeError, ValueError: if a field is of another type or out of range.
    """

    partition: GraphPartition
    batch_size: float
    steps: int
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        owner = "UserCyclic"
        checks.instance("partition", self.partition, GraphPartition, owner=owner)
        fields.settle(self, integers=("steps", "max_batch_size"))
        least = min(self.partition.sizes)
        size = fields.expected_batch_size(
            owner,
            self.batch_size,
            largest=least,
            why=f"the smallest of cycle={self.partition.cycle} slots has {least} examples; lower "
            "batch_size or cycle",
        )
        object.__setattr__(self, "batch_size", size)

    @classmethod
    def for_batch_size(
        cls,
        *,
        graph: AttributionGraph,
        batch_size: float,
        cycle: int,
        steps: int,
        spread: int = 1,
        max_batch_size: int | None = None,
        method: Method | None = None,
        seed: int = 0,
    ) -> Self:
        """The scheme with the partition that ``GraphPartition.of_graph`` finds.

        Args:
            graph, cycle, spread, method, seed: of the partition.
            batch_size, steps, max_batch_size: of the scheme.

        Raises:
            TypeError, ValueError: as there.
        """
        partition = GraphPartition.of_graph(
            graph, cycle=cycle, spread=spread, method=method, seed=seed
        )
        return cls(
            partition=partition, batch_size=batch_size, steps=steps, max_batch_size=max_batch_size
        )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Users who share examples, in one slot and in several, with whole batches and cut ones."""
        graph = shared_examples(run.dataset_size)
        cycle = max(1, min(run.separation, int(run.epoch_length)))
        plain = cls(
            partition=GraphPartition.of_graph(graph, cycle=cycle, method="greedy"),
            batch_size=run.batch_size,
            steps=run.steps,
        )
        return {
            "": plain,
            "max_batch_size": dataclasses.replace(plain, max_batch_size=run.largest_batch(cycle)),
        }

    @property
    def graph(self) -> AttributionGraph:  # type: ignore[override]
        """The users of every example."""
        return self.partition.graph

    @property
    def cycle(self) -> int:
        """b, the number of slots."""
        return self.partition.cycle

    @property
    def min_sep(self) -> int:
        """Steps between any two of a user's slots, b where each user has one."""
        return self.partition.separation

    @property
    def max_participations(self) -> int:
        """Most steps of a user: so many slots, each every b steps."""
        turns = -(-self.steps // self.cycle) * self.partition.max_slots
        return min(turns, -(-self.steps // self.min_sep))

    @property
    def max_per_batch(self) -> int:
        """Most examples of a user in one slot: all of them may be drawn together."""
        return self.partition.max_per_slot

    @property
    def expected_batch_size(self) -> float:
        """B̄, or the mean number of examples kept, over the slots, where batches are cut."""
        if self.max_batch_size is None:
            return self.batch_size
        sizes, counts = np.unique(self.partition.sizes, return_counts=True)
        kept = [
            mean_truncated_binomial(int(m), self.probability(int(m)), self.max_batch_size)
            for m in sizes
        ]
        return float(np.average(kept, weights=counts))

    def probability(self, size: int) -> float:
        """The chance of an example in a slot of ``size`` examples when the slot has its turn."""
        return min(1.0, self.batch_size / size)

    def attach(self, source: AttributionGraph | GraphPartition) -> Self:
        """This scheme with its slots, which one read from a file lacks.

        Args:
            source: the graph, in which the partition is found anew, or the partition.

        Raises:
            ValueError: if it is another graph, or the slots differ.
        """
        return dataclasses.replace(self, partition=self.partition.attach(source))

    def shortfall(self, seed: int) -> str | None:
        """A message on examples never drawn, for want of a slot or of a turn, and what helps."""
        partition = self.partition
        late = sum(partition.sizes[self.steps :])
        found = []
        if partition.dropped:
            found.append(
                f"UserCyclic: {partition.dropped} of {self.dataset_size} examples are never drawn, "
                "because they share users with examples in conflicting slots "
                f"(cycle={partition.cycle}, spread={partition.spread}, "
                f"method={partition.method!r}). A smaller cycle, or bound() with fewer examples "
                "per user, drops fewer"
            )
        if late:
            found.append(
                f"UserCyclic: {late} of {self.dataset_size} examples are never drawn, because with "
                f"steps={self.steps} and cycle={self.cycle} the run ends before their slots are "
                "due. Use a cycle of at most that many steps"
            )
        return ". ".join(found) or None

    def stream(self, seed: int) -> UserCyclicStream:
        """Batches in O(B̄) work a step; 4 bytes an example.

        Raises:
            ValueError: if the partition holds no slots, as one read from a file; ``attach`` it.
        """
        return UserCyclicStream(self, seed)


class UserCyclicStream(SeededStream):
    """Batches of ``UserCyclic``; slot s is ``members[offsets[s]:offsets[s + 1]]``, ascending."""

    def __init__(self, scheme: UserCyclic, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        partition = scheme.partition
        order = np.argsort(partition.slots, kind="stable")
        self._members = order[partition.dropped :].astype(index_dtype(scheme.dataset_size))
        self._offsets = np.concatenate(([0], np.cumsum(partition.sizes)))

    def _draw(self) -> Indices:
        slot = self.step % self._scheme.cycle
        members: npt.NDArray[Any] = self._members[self._offsets[slot] : self._offsets[slot + 1]]
        rows = successes(self._rng, len(members), self._scheme.probability(len(members)))
        return members[truncate(self._rng, rows, self._scheme.max_batch_size)].astype(np.int64)
