"""Statistics of contribution bounding: counts, distributions and the batch sizes to expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.sampling.users.neighbors import expected_batch_size

Counts = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Distribution:
    """The number of times that each value occurs.

    Args:
        values: the different values, ascending, shape (different values,).
        counts: how often each occurs, positive, same shape.
    """

    values: Counts
    counts: Counts

    @classmethod
    def of(cls, data: Counts) -> Distribution:
        """The distribution of the numbers in ``data``."""
        return cls(*np.unique(data, return_counts=True))

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return float(np.dot(self.values, self.counts) / self.counts.sum())

    @property
    def median(self) -> float:
        """The middle value, or the mean of the two in the middle."""
        ends = np.cumsum(self.counts)
        middle = [(int(ends[-1]) - 1) // 2, int(ends[-1]) // 2]
        return float(self.values[np.searchsorted(ends, middle, side="right")].mean())

    @property
    def largest(self) -> int:
        """The largest value."""
        return int(self.values[-1])

    def to_dict(self) -> dict[str, Any]:
        """``mean``, ``median``, ``max`` and ``counts`` ({value as text: how often})."""
        pairs = zip(self.values.tolist(), self.counts.tolist(), strict=True)
        return {
            "mean": self.mean,
            "median": self.median,
            "max": self.largest,
            "counts": {str(value): count for value, count in pairs},
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GraphStatistics:
    """Statistics of a bounded attribution graph; all of them public in this model.

    Args:
        k: the bound on the examples of a user.
        max_neighbors: the bound on |N(e)|, or ``None``.
        examples_before: examples of the graph that was bounded.
        users_before: its users.
        examples: examples kept, copies counted.
        examples_distinct: examples kept, each once.
        users: users that have an example left.
        users_at_bound: users with exactly k examples, copies counted.
        examples_per_user_before: over the users of the graph that was bounded.
        examples_per_user: over the users left, copies counted.
        users_per_example_before: over the examples of the graph that was bounded.
        users_per_example: over the examples kept, copies counted.
        neighbors: |N(e)| over the examples kept, copies counted.
    """

    k: int
    max_neighbors: int | None
    examples_before: int
    users_before: int
    examples: int
    examples_distinct: int
    users: int
    users_at_bound: int
    examples_per_user_before: Distribution
    examples_per_user: Distribution
    users_per_example_before: Distribution
    users_per_example: Distribution
    neighbors: Distribution

    def expected_batch_size(self, *, probability: float, min_sep: int) -> float:
        """Exact expected batch size of ``UserMinSep`` with exclusion by sampled examples.

        It holds from step b on; the batches before are larger
        (docs/theory/sampling.md#thm-user-burn-in).

        Raises:
            TypeError, ValueError: if p is not in (0, 1], or b no positive integer.
        """
        return expected_batch_size(
            self.neighbors.values,
            probability=probability,
            min_sep=min_sep,
            counts=self.neighbors.counts,
        )

    def to_dict(self, designs: Sequence[tuple[float, int]] = ()) -> dict[str, Any]:
        """All figures as JSON values; ``designs``: (p, b) to give the expected batch size of."""
        value = {
            field.name: item.to_dict() if isinstance(item, Distribution) else item
            for field in dataclasses.fields(self)
            for item in (getattr(self, field.name),)
        }
        value["expected_batch_sizes"] = [
            {
                "probability": float(p),
                "min_sep": int(b),
                "batch_size": self.expected_batch_size(probability=p, min_sep=b),
            }
            for p, b in designs
        ]
        return value

    def table(self, designs: Sequence[tuple[float, int]] = ()) -> str:
        """A text table; ``designs``: (p, b) to add the expected batch size of."""
        share = self.examples_distinct / self.examples_before
        lines = [
            f"{'':<22}{'before':>14}{'bounded':>14}",
            f"{'examples':<22}{self.examples_before:>14,}{self.examples_distinct:>14,}"
            f"  ({share:.1%} kept)",
            f"{'  with copies':<22}{self.examples_before:>14,}{self.examples:>14,}",
            f"{'users':<22}{self.users_before:>14,}{self.users:>14,}",
            f"{'  at the bound ' + str(self.k):<22}{'':>14}{self.users_at_bound:>14,}"
            f"  ({self.users_at_bound / self.users:.1%})",
            "",
            f"{'':<22}{'mean':>14}{'median':>14}{'max':>14}",
        ]
        for name, item in (
            ("examples per user", self.examples_per_user),
            ("  before", self.examples_per_user_before),
            ("users per example", self.users_per_example),
            ("  before", self.users_per_example_before),
            ("neighborhood |N(e)|", self.neighbors),
        ):
            lines.append(f"{name:<22}{item.mean:>14.4g}{item.median:>14.4g}{item.largest:>14,}")
        if designs:
            lines += [
                "",
                f"{'probability p':<22}{'min-sep b':>14}{'mean batch':>14}  (from step b)",
            ]
            for p, b in designs:
                size = self.expected_batch_size(probability=p, min_sep=b)
                lines.append(f"{p:<22.6g}{b:>14}{size:>14.6g}")
        return "\n".join(lines)
