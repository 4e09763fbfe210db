"""b-min-sep sampling: a coin at every step, except for b-1 steps after taking part."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.scheme import ExchangeableScheme, Indices, Scheme
from dptrain.sampling.schemes.drawing import Pool, successes
from dptrain.sampling.stream import SeededStream, index_dtype, to_array, to_tensor

# A warm start draws the first states in so many blocks, or fewer of at least so many examples: that
# bounds its memory.
_BLOCKS, _SMALLEST_BLOCK = 16, 1 << 14


def probability_for(owner: str, *, batch_size: float, dataset_size: int, min_sep: int) -> float:
    """p of an available example at which B̄ = ``batch_size``: p0 / (1 - p0(b-1)), p0 = B̄/N.

    Raises:
        ValueError: naming ``owner``, if p0 > 1/b; the message gives the largest batch size.
    """
    n_examples = checks.integer("dataset_size", dataset_size, owner=owner)
    b = checks.integer("min_sep", min_sep, owner=owner)
    size = fields.expected_batch_size(
        owner,
        batch_size,
        largest=n_examples / b,
        why=f"dataset_size={n_examples} over min_sep={b}, as p0 ≤ 1/b; lower batch_size or min_sep",
    )
    # p0 / (1 - p0(b-1)) in the form that is at most 1 after rounding too.
    return min(1.0, size / (n_examples - size * (b - 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinSep(ExchangeableScheme):
    """An example that took no part in the last b-1 steps takes part with probability p.

    Dong & Ganesh 2026, Algorithm 1 (cold start) and Algorithm 2 (warm start). The gaps are
    b-1 + Geometric(p), so in the stationary regime 1/p0 = 1/p + (b-1). A warm start draws each
    example's state from that regime: available with probability 1/(1 + (b-1)p), else barred for
    the next s steps with s uniform on 1..b-1. b = 1 is Poisson sampling; p = 1 with a warm start
    is balls-in-bins.

    Args:
        probability: p in (0, 1], the chance of an *available* example.
        min_sep: b ≥ 1; it may exceed ``steps``.
        dataset_size: N ≥ 1.
        steps: n ≥ 1.
        warm_start: whether to start in the stationary regime.

    Raises:
        ValueError: if a field is of another type or out of range.
    """

    probability: float
    min_sep: int
    dataset_size: int
    steps: int
    warm_start: bool = True

    def __post_init__(self) -> None:
        fields.settle(
            self, integers=("min_sep", "dataset_size", "steps"), probabilities=("probability",)
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
    ) -> Self:
        """The scheme with B̄ = ``batch_size`` in the stationary regime: p = p0 / (1 - p0(b-1)).

        Raises:
            ValueError: if p0 = batch_size/N > 1/b; the message gives the largest batch size.
        """
        p = probability_for(
            "MinSep", batch_size=batch_size, dataset_size=dataset_size, min_sep=min_sep
        )
        return cls(
            probability=p,
            min_sep=min_sep,
            dataset_size=dataset_size,
            steps=steps,
            warm_start=warm_start,
        )

    @property
    def rate(self) -> float:
        """p0 = p / (1 + (b-1)p)."""
        return self.probability / (1.0 + (self.min_sep - 1) * self.probability)

    def stream(self, seed: int) -> MinSepStream:
        """Batches in O(B̄) work a step; at most 8 bytes an example."""
        return MinSepStream(self, seed)

    def sample_participation(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.bool_]:
        """``size`` independent participation vectors, shape (size, steps)."""
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


class MinSepStream(SeededStream):
    """Batches of ``MinSep``.

    ``_pool`` holds the examples that may be drawn; ``_releases[t]`` are those that become
    available at step t.

    Args:
        law: how the examples are sampled.
        seed: any non-negative integer.
        scheme: the scheme that the stream belongs to, where that is not ``law`` itself.
    """

    def __init__(self, law: MinSep, seed: int, scheme: Scheme | None = None) -> None:
        super().__init__(scheme or law, seed)
        self._law = law
        self._dtype = index_dtype(law.dataset_size)
        self._pool = Pool(np.arange(law.dataset_size, dtype=self._dtype))
        self._releases: dict[int, npt.NDArray[Any]] = {}
        if law.warm_start and law.min_sep > 1:
            self._start_warm(law.min_sep, law.probability)

    def _start_warm(self, b: int, p: float) -> None:
        """Bar (b-1)p / (1 + (b-1)p) of the examples for a uniform number of steps in 1..b-1."""
        share = (b - 1) * p / (1.0 + (b - 1) * p)
        n_examples = self._law.dataset_size
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
        batch = self._pool.take(successes(self._rng, len(self._pool), self._law.probability))
        release = self.step + self._law.min_sep
        if release < self.steps and len(batch):
            self._releases[release] = batch
        return np.sort(batch).astype(np.int64)

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
        self._pool = Pool(to_array(state["available"], self._dtype), self._law.dataset_size)
