"""Cyclic Poisson sampling: the dataset is split once, and the parts are drawn from in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import Indices, SampledRun, Scheme
from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.schemes.drawing import (
    inclusion_probability,
    mean_truncated_binomial,
    successes,
    truncate,
)
from dptrain.sampling.stream import SeededStream, index_dtype

ASSIGNMENTS = ("equal", "independent")


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class CyclicPoisson(AnySizeScheme):
    """The dataset is split once into b parts; step t draws part t mod b with probability p.

    This is the sampling of BandMF (Choquette-Choo et al. 2023, arXiv 2306.08153). An example of
    part s may take part at steps s, s+b, s+2b, … only. p is b times the rate of plain Poisson
    sampling of the same batch size. With ``cycle=1`` this is (truncated) Poisson sampling.

    ``assignment`` says how the split is drawn, from the stream's seed and never from the data:

    - ``"equal"``: uniformly among the splits that use every example and have sizes that differ by
      at most one. The sizes depend on N, so leave-one-out statements are about zeroing out or
      replacing an example.
    - ``"independent"``: every example picks its part uniformly, whatever the others do, as
      add-remove adjacency wants it. The sizes are random.

    >>> scheme = CyclicPoisson.for_batch_size(batch_size=50, dataset_size=1000, cycle=4, steps=10)
    >>> scheme.probability, scheme.part_sizes, scheme.max_participations
    (0.2, range(250, 251), 3)

    Args:
        probability: p in (0, 1], the chance of an example of the part whose turn it is.
        cycle: b ≥ 1, the number of parts; it may exceed ``steps``.
        dataset_size: N ≥ 1; at least b if the parts are equal.
        steps: n ≥ 1.
        assignment: ``"equal"`` or ``"independent"``.
        max_batch_size: B ≥ 1: of more than B drawn examples, B are kept, each subset being as
            likely, and every batch is padded to B rows of weight 0. ``None``: neither.
        nominal_size: a public number in place of a private N (``AnySizeScheme``); with
            ``max_batch_size`` at least N.

    Raises:
        TypeError, ValueError: if a field is of another type or out of range.
    """

    probability: float
    cycle: int
    dataset_size: int
    steps: int
    assignment: str = "equal"
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        fields.settle(
            self,
            integers=("cycle", "dataset_size", "steps", "max_batch_size"),
            probabilities=("probability",),
        )
        if self.assignment not in ASSIGNMENTS:
            raise ValueError(
                f"CyclicPoisson: assignment={self.assignment!r} is unknown; use 'equal' (parts "
                "whose sizes differ by at most one) or 'independent' (every example picks its part)"
            )
        if self.assignment == "equal" and self.cycle > self.dataset_size:
            raise ValueError(
                f"CyclicPoisson: cycle={self.cycle} equal parts of dataset_size="
                f"{self.dataset_size} examples leave parts empty; lower cycle to at most "
                f"{self.dataset_size}"
            )
        self._settle_size()

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        cycle: int,
        steps: int,
        assignment: str = "equal",
        max_batch_size: int | None = None,
        nominal_size: int | None = None,
    ) -> Self:
        """The scheme with N·p/b = ``batch_size``: the expected size, *before* any truncation.

        Raises:
            ValueError: if batch_size > N/b (for N ``nominal_size``, if given); the message gives
                the largest batch size.
        """
        public = fields.public_size("CyclicPoisson", dataset_size, nominal_size)
        b = checks.integer("cycle", cycle, owner="CyclicPoisson")
        size = fields.expected_batch_size(
            "CyclicPoisson",
            batch_size,
            largest=public / b,
            why=f"a part of {public} examples over cycle={b}; lower batch_size or cycle",
        )
        return cls(
            probability=min(1.0, size * b / public),  # at most 1 after rounding too
            cycle=b,
            dataset_size=dataset_size,
            steps=steps,
            assignment=assignment,
            max_batch_size=max_batch_size,
            nominal_size=nominal_size,
        )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Whole batches and cut ones, and parts that everybody picks."""
        plain = cls.for_batch_size(
            batch_size=run.batch_size,
            dataset_size=run.dataset_size,
            cycle=run.separation,
            steps=run.steps,
        )
        return {
            "": plain,
            "max_batch_size": dataclasses.replace(plain, max_batch_size=run.largest_batch(1)),
            "assignment='independent'": dataclasses.replace(plain, assignment="independent"),
        }

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """For bands, as many parts, with whole batches and, if a part fills one, cut ones."""
        parts = run.separation
        if parts <= 1:
            return []
        found: list[dict[str, Any]] = [{"cycle": parts}]
        if parts <= run.epoch_length:
            found.append({"cycle": parts, "max_batch_size": run.largest_batch(parts)})
        return found

    @property
    def part_sizes(self) -> range:
        """Every size that the part of an example can have, in that example's own view (≥ 1).

        ``"equal"``: floor(N/b) and, if b does not divide N, ceil(N/b), which N mod b of the parts
        have. ``"independent"``: 1..N; given the example, 1 + Bin(N-1, 1/b).
        """
        if self.assignment == "independent":
            return range(1, self.dataset_size + 1)
        least, larger = divmod(self.dataset_size, self.cycle)
        return range(least, least + 1 + bool(larger))

    @property
    def rate(self) -> float:
        """p0: p/b; with truncation the expected number of kept examples over N, at every step."""
        n_examples, b, p = self.dataset_size, self.cycle, self.probability
        largest = self.max_batch_size
        if largest is None:
            return p / b
        if self.assignment == "independent":
            # Being in the part and drawn from it is a coin of p/b, independent of the others'.
            return mean_truncated_binomial(n_examples, p / b, largest) / n_examples
        least, larger = divmod(n_examples, b)
        kept = (b - larger) * mean_truncated_binomial(least, p, largest)
        if larger:
            kept += larger * mean_truncated_binomial(least + 1, p, largest)
        return kept / (b * n_examples)

    @property
    def min_sep(self) -> int:
        """b: an example's part has its turn every b steps."""
        return self.cycle

    def prefix(self, steps: int) -> Self:
        """The scheme of so many steps. The split knows no n, and every step tosses new coins."""
        return dataclasses.replace(self, steps=checks.integer("steps", steps, maximum=self.steps))

    def stream(self, seed: int) -> CyclicPoissonStream:
        """The split is drawn at once; a step then takes O(B̄) work. At most 8 bytes an example."""
        return CyclicPoissonStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
        b, rounds = self.cycle, self.max_participations
        part = rng.integers(b, size=size)
        coins = rng.random((size, rounds)) < self._sample_chance(rng, size)[:, None]
        taken = np.zeros((size, rounds, b), dtype=bool)
        taken[np.arange(size), :, part] = coins
        return taken.reshape(size, rounds * b)[:, : self.steps]

    def _sample_chance(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.float64]:
        """Draws of an example's chance to be drawn and kept when its part has its turn.

        The size of the part is drawn once and stays for the run; given it, the steps are
        independent of each other, as everyone's coins are tossed anew.
        """
        n_examples, b, p = self.dataset_size, self.cycle, self.probability
        if self.max_batch_size is None:
            return np.full(size, p)
        if self.assignment == "independent":
            sizes = 1 + rng.binomial(n_examples - 1, 1.0 / b, size=size)
        else:
            least, larger = divmod(n_examples, b)
            in_larger = rng.random(size) < larger * (least + 1) / n_examples
            sizes = least + in_larger
        return inclusion_probability(sizes, p, self.max_batch_size)


class CyclicPoissonStream(SeededStream):
    """Batches of ``CyclicPoisson``; part s is ``members[offsets[s]:offsets[s + 1]]``."""

    _kept = ("members", "offsets")

    def __init__(self, scheme: CyclicPoisson, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        self._dtype = index_dtype(scheme.dataset_size)
        sizes = self._draw_sizes(scheme.assignment, scheme.dataset_size, scheme.cycle)
        self._offsets = np.concatenate(([0], np.cumsum(sizes))).astype(self._dtype)
        # Given the sizes, all splits are as likely under either assignment: a random order, cut.
        self._members = self._rng.permutation(np.arange(scheme.dataset_size, dtype=self._dtype))

    def _draw_sizes(self, assignment: str, n_examples: int, b: int) -> npt.NDArray[np.int64]:
        if assignment == "independent":
            picks = self._rng.integers(b, size=n_examples, dtype=index_dtype(b))
            return np.bincount(picks, minlength=b)
        least, larger = divmod(n_examples, b)
        return self._rng.permutation(least + (np.arange(b) < larger))

    def _draw(self) -> Indices:
        part = self.step % self._scheme.cycle
        members = self._members[self._offsets[part] : self._offsets[part + 1]]
        rows = successes(self._rng, len(members), self._scheme.probability)
        rows = truncate(self._rng, rows, self._scheme.max_batch_size)
        return np.sort(members[rows].astype(np.int64))
