"""b-min-sep sampling: a coin at every step, except for b-1 steps after being drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.registry import register_scheme
from dptrain.sampling.scheme import ExchangeableScheme, Indices, SampledRun, Scheme
from dptrain.sampling.schemes.drawing import Pool, inclusion_probability, successes, truncate
from dptrain.sampling.stream import SeededStream, index_dtype, to_array, to_tensor

# A warm start draws the first states in so many blocks, or fewer of at least so many examples: that
# bounds its memory.
_BLOCKS, _SMALLEST_BLOCK = 16, 1 << 14


@register_scheme
@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSep(ExchangeableScheme):
    """An example that was not drawn in the last b-1 steps is drawn with probability p.

    Dong & Ganesh 2026 (arXiv 2602.09338), Algorithm 1 (cold start) and Algorithm 2 (warm start).
    The gaps are b-1 + Geometric(p), so in the stationary regime 1/p0 = 1/p + (b-1). A warm start
    draws each example's state from that regime: available with probability 1/(1 + (b-1)p), else
    barred for the next s steps with s uniform on 1..b-1
    (docs/theory/sampling.md#thm-min-sep-stationary; ``test_stationary_from_the_first_step``). b = 1
    is Poisson sampling; p = 1 with a warm start is balls-in-bins
    (docs/theory/sampling.md#thm-min-sep-identities).

    With ``max_batch_size`` = B every batch has room for B examples (Appendix D there): of more than
    B that are drawn, a uniformly random B-subset is kept, and smaller batches are padded with rows
    of weight 0. An example that was drawn and then cut stays barred like one that was kept, so that
    before the cut the examples are independent of each other. After it they are *not*, and the run
    is accounted for as truncated b-min-sep sampling.

    Args:
        probability: p in (0, 1], the chance of an *available* example, before truncation.
        min_sep: b ≥ 1; it may exceed ``steps``.
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
        warm_start: whether to start in the stationary regime.
        max_batch_size: B ≥ 1; with B ≥ N nothing is ever cut and only the padding remains.
            ``None``: batches are neither cut nor padded.

    Raises:
        TypeError, ValueError: if a field is of another type or out of range.
    """

    probability: float
    min_sep: int
    dataset_size: int
    steps: int
    warm_start: bool = True
    max_batch_size: int | None = None

    _later_fields = ("max_batch_size",)

    def __post_init__(self) -> None:
        fields.settle(
            self,
            integers=("min_sep", "dataset_size", "steps", "max_batch_size"),
            probabilities=("probability",),
        )
        checks.flag("warm_start", self.warm_start, owner="MinSep")

    @classmethod
    def for_batch_size(
        cls,
        *,
        batch_size: float,
        dataset_size: int,
        min_sep: int,
        steps: int,
        warm_start: bool = True,
        max_batch_size: int | None = None,
    ) -> Self:
        """The scheme that draws ``batch_size`` in the stationary regime: p = p0 / (1 - p0(b-1)).

        That is the expected size *before* truncation, with p0 = B̄/N: with ``max_batch_size`` the
        ``expected_batch_size`` is smaller, by the examples that are cut.

        Raises:
            ValueError: if p0 = batch_size/N > 1/b; the message gives the largest batch size.
        """
        n_examples = checks.integer("dataset_size", dataset_size, owner="MinSep")
        b = checks.integer("min_sep", min_sep, owner="MinSep")
        size = fields.expected_batch_size(
            "MinSep",
            batch_size,
            largest=n_examples / b,
            why=(
                f"dataset_size={n_examples} over min_sep={b}, as p0 ≤ 1/b; lower batch_size or "
                "min_sep"
            ),
        )
        return cls(
            # p0 / (1 - p0(b-1)) in the form that is at most 1 after rounding too.
            probability=min(1.0, size / (n_examples - size * (b - 1))),
            min_sep=b,
            dataset_size=n_examples,
            steps=steps,
            warm_start=warm_start,
            max_batch_size=max_batch_size,
        )

    @classmethod
    def representatives(cls, run: SampledRun) -> Mapping[str, Scheme]:
        """Whole batches and cut ones."""
        plain = cls.for_batch_size(
            batch_size=run.batch_size,
            dataset_size=run.dataset_size,
            min_sep=run.separation,
            steps=run.steps,
        )
        cut = dataclasses.replace(plain, max_batch_size=run.largest_batch(1))
        return {"": plain, "max_batch_size": cut}

    @classmethod
    def proposals(cls, run: SampledRun) -> Iterable[Mapping[str, Any]]:
        """For bands, as many steps of separation; wider ones are tried for the best of these."""
        return [{"min_sep": run.separation}] if run.separation > 1 else []

    @property
    def rate(self) -> float:
        """p0 = p / (1 + (b-1)p); with truncation E[min(X, B)]/N with X ~ Bin(N, p0).

        In the stationary regime X, the number drawn in a step, has exactly that law: examples are
        independent before the cut.
        """
        drawn = self.probability / (1.0 + (self.min_sep - 1) * self.probability)
        if self.max_batch_size is None:
            return drawn
        return float(inclusion_probability(self.dataset_size, drawn, self.max_batch_size))

    def prefix(self, steps: int) -> Self:
        """The scheme of so many steps. Who is available follows from earlier steps alone."""
        return dataclasses.replace(self, steps=checks.integer("steps", steps, maximum=self.steps))

    def stream(self, seed: int) -> MinSepStream:
        """Batches in O(B̄) work a step; at most 8 bytes an example."""
        return MinSepStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps), true where kept."""
        if self.max_batch_size is None:
            return self._sample_one(rng, size)
        drawn, others = self.sample_draws(rng, size)
        # Among others + 1 drawn examples every B-subset is as likely; below B nothing is cut.
        return drawn & (rng.random(drawn.shape) * (others + 1) < self.max_batch_size)

    def sample_draws(
        self, rng: np.random.Generator, size: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Draws of one example in every step, and the numbers r_t of the N-1 others that are drawn.

        The two are independent before the cut. Given them, the example is kept in a step in which
        it is drawn with probability min(1, B/(r_t + 1)), steps being independent of each other.

        Returns:
            Two arrays of shape (size, steps), one row for each of ``size`` independent runs.
        """
        drawn = self._sample_one(rng, size)
        return drawn, self._sample_counts(rng, size)

    def _sample_one(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """The steps in which one example is drawn, before the cut; shape (size, steps)."""
        b, p = self.min_sep, self.probability
        # An equilibrium renewal process: the first participation is at s + Geometric(p) - 1 with
        # s the residual bar, later gaps are b-1 + Geometric(p).
        at = rng.geometric(p, size=size) - 1
        if self.warm_start and b > 1:
            barred = rng.random(size) >= 1.0 / (1.0 + (b - 1) * p)
            at = at + barred * rng.integers(1, b, size=size)
        taken = np.zeros((size, self.steps), dtype=bool)
        while (alive := at < self.steps).any():
            taken[alive, at[alive]] = True
            at = np.where(alive, at + b - 1 + rng.geometric(p, size=size), self.steps)
        return taken

    def _sample_counts(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """r_t of N-1 independent examples: a Markov chain of available and barred ones."""
        b, p = self.min_sep, self.probability
        counts = np.zeros((size, self.steps), dtype=np.int64)
        available = np.full(size, self.dataset_size - 1, dtype=np.int64)
        waiting = np.zeros(size, dtype=np.int64)  # barred at the start and not released yet
        if self.warm_start:
            available = rng.binomial(available, 1.0 / (1.0 + (b - 1) * p))
            waiting += self.dataset_size - 1 - available
        for step in range(self.steps):
            if 1 <= step < b:
                # A first bar is uniform on 1..b-1: given that it is at least `step`, it is `step`
                # with probability 1/(b - step).
                released = rng.binomial(waiting, 1.0 / (b - step))
                waiting -= released
                available += released
            elif step >= b:
                available += counts[:, step - b]
            counts[:, step] = rng.binomial(available, p)
            available -= counts[:, step]
        return counts


class MinSepStream(SeededStream):
    """Batches of ``MinSep``.

    ``_pool`` holds the examples that may be drawn; ``_releases[t]`` are those that become
    available at step t.
    """

    def __init__(self, scheme: MinSep, seed: int) -> None:
        super().__init__(scheme, seed)
        self._scheme = scheme
        self._dtype = index_dtype(scheme.dataset_size)
        self._pool = Pool(np.arange(scheme.dataset_size, dtype=self._dtype))
        self._releases: dict[int, npt.NDArray[Any]] = {}
        if scheme.warm_start and scheme.min_sep > 1:
            self._start_warm(scheme.min_sep, scheme.probability)

    def _start_warm(self, b: int, p: float) -> None:
        """Bar (b-1)p / (1 + (b-1)p) of the examples for a uniform number of steps in 1..b-1."""
        share = (b - 1) * p / (1.0 + (b - 1) * p)
        n_examples = self._scheme.dataset_size
        block = max(_SMALLEST_BLOCK, -(-n_examples // _BLOCKS))
        pieces: dict[int, list[npt.NDArray[Any]]] = {}
        # The last block first: taking from it leaves the positions before it as they are.
        for start in reversed(range(0, n_examples, block)):
            positions = successes(self._rng, min(block, n_examples - start), share)
            barred = self._pool.take(start + positions)
            release = self._rng.integers(1, b, size=len(barred), dtype=np.int64)
            order = np.argsort(release, kind="stable")
            times, starts = np.unique(release[order], return_index=True)
            groups = np.split(barred[order], starts[1:])
            for time, group in zip(times.tolist(), groups, strict=False):
                if time < self.steps:
                    pieces.setdefault(time, []).append(group)
        self._releases = {time: np.concatenate(groups) for time, groups in pieces.items()}

    def _draw(self) -> Indices:
        released = self._releases.pop(self.step, None)
        if released is not None:
            self._pool.put(released)
        batch = self._pool.take(successes(self._rng, len(self._pool), self._scheme.probability))
        release = self.step + self._scheme.min_sep
        if release < self.steps and len(batch):
            self._releases[release] = batch
        # All that were drawn are barred, whatever is cut.
        drawn = np.sort(batch).astype(np.int64)
        return truncate(self._rng, drawn, self._scheme.max_batch_size)

    def _own_state(self) -> dict[str, Any]:
        times = sorted(self._releases)
        groups = [self._releases[time] for time in times]
        barred = np.concatenate(groups) if groups else np.empty(0, dtype=self._dtype)
        return {
            "available": to_tensor(self._pool.members),
            "release_times": to_tensor(np.array(times, dtype=np.int64)),
            "release_sizes": to_tensor(np.array([len(g) for g in groups], dtype=np.int64)),
            "barred": to_tensor(barred),
        }

    def _load_own_state(self, state: dict[str, Any]) -> None:
        times = to_array(state["release_times"], np.int64)
        ends = np.cumsum(to_array(state["release_sizes"], np.int64))
        groups = np.split(to_array(state["barred"], self._dtype), ends[:-1]) if len(ends) else []
        self._releases = dict(zip(times.tolist(), [g.copy() for g in groups], strict=True))
        self._pool = Pool(to_array(state["available"], self._dtype), self._scheme.dataset_size)
