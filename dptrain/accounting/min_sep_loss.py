"""Privacy losses of b-min-sep sampling with a banded Toeplitz strategy (bands ≤ b)."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from dptrain.accounting.min_sep_recursion import Recursion, make_recursion

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Direction = Literal["remove", "add"]
DIRECTIONS: tuple[Direction, Direction] = ("remove", "add")

# Samples advanced together: long enough to hide the cost of a call, short enough for the caches,
# and below the size at which torch would split one operation over its own threads.
LANES = 8192
CHUNK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MinSepLaw:
    """The pair P = C x + N(0, σ²I), Q = N(0, σ²I) of b-min-sep sampling, σ left open.

    Args:
        coefficients: first column of the Toeplitz strategy C, shape (bands,), non-negative.
        probability: p in (0, 1], chance to take part when not barred.
        min_sep: b ≥ bands; after a participation the next b-1 steps are barred.
        steps: n ≥ 1.
        warm_start: whether the bar is stationary at the start (Dong & Ganesh 2026, Algorithm 2)
            rather than absent (Algorithm 1).

    Raises:
        ValueError: if a value is out of range, or bands exceed min_sep (the recursion needs
            participations that touch disjoint rows).
    """

    coefficients: Array
    probability: float
    min_sep: int
    steps: int
    warm_start: bool

    def __post_init__(self) -> None:
        c = np.array(self.coefficients, dtype=np.float64)
        if c.ndim != 1 or c.size == 0 or not np.isfinite(c).all() or (c < 0).any() or not c.any():
            raise ValueError("coefficients: expected a non-zero vector of finite values ≥ 0")
        if not 0.0 < self.probability <= 1.0:
            raise ValueError(f"probability={self.probability}: must lie in (0, 1]")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")
        if c.size > self.min_sep:
            raise ValueError(
                f"{c.size} bands with min_sep={self.min_sep}: bands must not exceed min_sep; "
                "use fewer bands or a larger min_sep"
            )
        c = c[: self.steps]
        c.setflags(write=False)
        object.__setattr__(self, "coefficients", c)

    @property
    def bands(self) -> int:
        """Number of coefficients that fit into n rows."""
        return int(self.coefficients.size)

    @property
    def squared_norms(self) -> Array:
        """‖c_i‖² of every column, shape (steps,); the last bands-1 columns are cut at row n."""
        cut = np.cumsum(self.coefficients**2)
        rows_left = np.arange(self.steps, 0, -1)
        return cut[np.minimum(rows_left, self.bands) - 1]

    @property
    def sensitivity(self) -> float:
        """max ‖Cx‖ over patterns: columns b apart are orthogonal and norms never grow with i."""
        return math.sqrt(float(self.squared_norms[:: self.min_sep].sum()))

    @property
    def block_rows(self) -> int:
        """Rows of the sliding products computed by one matrix product."""
        return max(32, self.bands)

    @property
    def lanes(self) -> int:
        """Samples a chunk: :data:`LANES`, or fewer so that a chunk stays within CHUNK_BYTES."""
        rows = 4 * self.block_rows + 4 * self.bands + 2 * self.min_sep
        events = 3 * (self.steps // self.min_sep + 1)
        return max(1, min(LANES, CHUNK_BYTES // (8 * (rows + events))))


def participations(law: MinSepLaw, rng: np.random.Generator, size: int) -> tuple[Indices, Indices]:
    """Participation times of ``size`` examples, drawn by their gaps.

    Returns:
        (times, lanes): one entry per participation, times ascending.
    """
    start: npt.NDArray[np.float64] = np.zeros(size)
    if law.warm_start and law.min_sep > 1:
        # Barred for the next s steps: s = 0 has weight 1 and each of 1..b-1 has weight p.
        u = rng.random(size) * (1.0 + (law.min_sep - 1) * law.probability)
        start = np.where(u < 1.0, 0.0, np.minimum(1.0 + (u - 1.0) // law.probability, law.min_sep - 1))
    rate = -math.log1p(-law.probability) if law.probability < 1.0 else math.inf
    lane = np.arange(size)
    times, lanes = [], []
    at = start
    while lane.size:
        # floor(Exp/rate) is geometric on 0, 1, …: Pr[> k] = e^{-rate (k+1)} = (1-p)^{k+1}.
        at = at + np.floor(rng.standard_exponential(lane.size) / rate)
        alive = at < law.steps
        lane, at = lane[alive], at[alive]
        times.append(at.astype(np.int64))
        lanes.append(lane)
        at = at + law.min_sep
    all_times, all_lanes = np.concatenate(times), np.concatenate(lanes)
    order = np.argsort(all_times, kind="stable")
    return all_times[order], all_lanes[order]


class _Products:
    """Matrices that turn a block of noise z and participations x into exponents <c_i, y>/σ².

    y = C x + σ z, so the exponents are (C^T z)/σ + (C^T C x)/σ²; block rows i = s, …, s+B-1 need z up
    to row s+B+bands-2 and x from s-bands+1 to the same row. σ = 1 here: callers scale.
    """

    def __init__(self, law: MinSepLaw, *, last: bool) -> None:
        rows, halo = law.block_rows, law.bands - 1
        near = np.zeros((rows + halo, rows + 2 * halo))  # C[s:s+B+halo, s-halo:s+B+halo]
        for k, value in enumerate(law.coefficients):
            row = np.arange(rows + halo)
            near[row, row + halo - k] = value
        if last:
            near[rows:] = 0.0  # the matrix ends at row n
        own = near[:, halo : halo + rows].T
        self.noise = np.ascontiguousarray(own)
        self.signal = own @ near


def _run(
    law: MinSepLaw,
    recursions: Sequence[Recursion],
    sigmas: Sequence[float],
    lanes: int,
    fill: Callable[[int, Array], None],
    events: tuple[Indices, Indices] | None,
) -> None:
    """Feed every recursion with its exponents, from the last row to the first.

    ``fill(first_row, block)`` writes the standard normals of the rows of ``block``.
    """
    rows, halo, n = law.block_rows, law.bands - 1, law.steps
    noise_rows = rows + halo
    signal_rows = 0 if events is None else rows + 2 * halo
    operand = np.zeros((noise_rows + signal_rows, lanes))
    noise, signal = operand[:noise_rows], operand[noise_rows:]
    flat = signal.reshape(-1)
    noise_part = np.empty((rows, lanes))
    signal_part = np.empty((rows, lanes)) if events is not None and len(sigmas) > 1 else None
    scratch = torch.empty(lanes, dtype=torch.float64)
    half_norms = law.squared_norms / 2.0
    products, matrix = _Products(law, last=True), None
    end = n
    while end > 0:
        start = end - rows
        first = max(0, -start)  # position of row 0 in the last, shorter block
        noise[rows:] = noise[:halo]
        if end == n:
            noise[rows:] = 0.0
        fill(start + first, noise[first:rows])
        touched = None
        if events is not None:
            times, lane = events
            low, high = np.searchsorted(times, (start - halo, start + rows + halo))
            touched = (times[low:high] - (start - halo)) * lanes + lane[low:high]
            flat[touched] = 1.0
        if len(sigmas) == 1:
            if matrix is None:
                parts = [products.noise / sigmas[0]]
                if events is not None:
                    parts.append(products.signal / sigmas[0] ** 2)
                matrix = np.concatenate(parts, axis=1)
            np.matmul(matrix, operand, out=noise_part)
        else:
            np.matmul(products.noise, noise, out=noise_part)
            if signal_part is not None:
                np.matmul(products.signal, signal, out=signal_part)
        if touched is not None:
            flat[touched] = 0.0
        noise_rows_t = list(torch.from_numpy(noise_part))
        signal_rows_t = None if signal_part is None else list(torch.from_numpy(signal_part))
        for position in range(rows - 1, first - 1, -1):
            row = start + position
            for sigma, recursion in zip(sigmas, recursions, strict=True):
                exponent = noise_rows_t[position]
                if len(sigmas) > 1:
                    if signal_rows_t is not None:
                        torch.add(exponent, signal_rows_t[position], alpha=1 / sigma, out=scratch)
                        exponent = scratch.mul_(1 / sigma)
                    else:
                        exponent = torch.mul(exponent, 1 / sigma, out=scratch)
                recursion.step(row, exponent, float(half_norms[row]) / sigma**2)
        if end == n:
            products, matrix = _Products(law, last=False), None
        end = start


def _recursions(
    law: MinSepLaw, sigmas: Sequence[float], lanes: int, log_space: bool | None
) -> list[Recursion]:
    norm = math.sqrt(float(law.squared_norms[0]))
    return [
        make_recursion(
            probability=law.probability,
            min_sep=law.min_sep,
            warm_start=law.warm_start,
            lanes=lanes,
            norm=norm,
            sigma=sigma,
            log_space=log_space,
        )
        for sigma in sigmas
    ]


def log_ratio(
    law: MinSepLaw, sigma: float, outputs: npt.ArrayLike, *, log_space: bool = True
) -> Array:
    """log P(y)/Q(y) of given outputs y, shape (steps, k): shape (k,)."""
    y = np.asarray(outputs, dtype=np.float64)
    if y.ndim != 2 or y.shape[0] != law.steps:
        raise ValueError(f"outputs of shape {y.shape}: expected ({law.steps}, k)")

    def fill(row: int, block: Array) -> None:
        block[:] = y[row : row + len(block)] / sigma

    recursions = _recursions(law, [sigma], y.shape[1], log_space)
    _run(law, recursions, [sigma], y.shape[1], fill, None)
    return recursions[0].log_ratio(law.warm_start)


def sample_losses(
    law: MinSepLaw,
    sigmas: Sequence[float],
    direction: Direction,
    rng: np.random.Generator,
    size: int,
    *,
    log_space: bool | None = None,
) -> Array:
    """Independent privacy losses: shape (len(sigmas), size).

    ``"remove"`` draws y ~ P and returns log P/Q; ``"add"`` draws y ~ Q and returns log Q/P. The
    entries of one row are independent; rows share their noise and participations, so a column
    shows one draw at several σ. Time runs backwards in blocks, so memory does not grow with n
    beyond the participations. Everything is float64; the error of a loss is below 1e-10.
    """
    events = participations(law, rng, size) if direction == "remove" else None

    def fill(row: int, block: Array) -> None:
        del row
        rng.standard_normal(out=block)

    recursions = _recursions(law, sigmas, size, log_space)
    _run(law, recursions, sigmas, size, fill, events)
    sign = 1.0 if direction == "remove" else -1.0
    return np.stack([sign * recursion.log_ratio(law.warm_start) for recursion in recursions])


def loss_chunks(
    law: MinSepLaw,
    sigmas: Sequence[float],
    direction: Direction,
    *,
    seed: Sequence[int],
    samples: int,
    threads: int,
) -> Iterator[Array]:
    """Losses in chunks of shape (len(sigmas), ≤ law.lanes), in a fixed order.

    Chunk i draws from its own stream, ``SeedSequence(seed, spawn_key=(i,))``, so the losses depend on
    neither the number of threads nor on how far earlier chunks have been read.
    """
    lanes = law.lanes
    count = -(-samples // lanes)

    def work(index: int) -> Array:
        sequence = np.random.SeedSequence(list(seed), spawn_key=(index,))
        rng = np.random.Generator(np.random.SFC64(sequence))
        return sample_losses(law, sigmas, direction, rng, min(lanes, samples - index * lanes))

    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[Array]] = deque()
    try:
        for index in range(count):
            pending.append(pool.submit(work, index))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
