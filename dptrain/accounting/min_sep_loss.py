"""Privacy losses of b-min-sep sampling with a banded Toeplitz strategy (bands ≤ b)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from dptrain.accounting.min_sep_law import Direction, MinSepLaw, participations
from dptrain.accounting.min_sep_recursion import Recursion, make_recursion

Array = npt.NDArray[np.float64]


def _toeplitz_block(law: MinSepLaw) -> Array:
    """Columns s, …, s+B-1 of C, transposed: shape (B, B+bands-1), the same for every s.

    Columns that the end of C cuts need no block of their own: there, the outputs are zero.
    """
    rows = law.block_rows
    block = np.zeros((rows, rows + law.bands - 1))
    for k, value in enumerate(law.coefficients):
        block[np.arange(rows), np.arange(rows) + k] = value
    return block


class _Signal:
    """Adds the rows of C x for sampled participations x (``lanes`` examples side by side)."""

    def __init__(self, law: MinSepLaw, rng: np.random.Generator, lanes: int) -> None:
        self._times, lane = participations(law, rng, lanes)
        self._cells = torch.from_numpy(self._times * lanes + lane)
        self._coefficients = law.coefficients
        self._lanes = lanes

    def add(self, first_row: int, rows: int, flat: torch.Tensor, scale: float) -> None:
        """Add ``scale`` times rows first_row, …, first_row+rows-1 of C x to ``flat``.

        ``flat`` holds whole rows, the first of which is row first_row-bands+1; only the rows named
        are written. The margin makes one set of addresses serve every diagonal of C.
        """
        margin = self._coefficients.size - 1
        lags = np.arange(margin + 1)
        low = np.searchsorted(self._times, first_row - lags)
        high = np.searchsorted(self._times, first_row + rows - lags)
        cells = self._cells[low[-1] : high[0]] - (first_row - margin) * self._lanes
        values = torch.empty(len(cells), dtype=flat.dtype)
        for lag, value in enumerate(self._coefficients.tolist()):
            here = cells[low[lag] - low[-1] : high[lag] - low[-1]]
            # Addresses are distinct: no lane takes part twice at one time.
            source = values[: len(here)].fill_(value * scale)
            flat[lag * self._lanes :].scatter_add_(0, here, source)


def _run(
    law: MinSepLaw,
    recursions: Sequence[Recursion],
    sigmas: Sequence[float],
    lanes: int,
    fill: Callable[[int, Array], None],
    signal: _Signal | None = None,
    several: bool = False,
) -> None:
    """Feed every recursion with its exponents <c_i, y>/σ², from the last row to the first.

    ``fill(first_row, block)`` writes z into the rows of ``block``; y = C x + σ z, so the exponents
    are (C^T z)/σ + (C^T C x)/σ². One σ needs one product; ``several`` share two, and then the
    result for one σ does not depend, bit for bit, on the others.
    """
    rows, halo, n = law.block_rows, law.bands - 1, law.steps
    assert several or len(sigmas) == 1
    matrix = torch.from_numpy(_toeplitz_block(law) / (1.0 if several else sigmas[0]))
    # Row s+j of the block that starts at s is at position j; the rows after it are the halo, the
    # rows before it a margin for the signal's addresses.
    noise_memory = np.zeros((halo + rows + halo, lanes))
    noise = noise_memory[halo:]
    clean_memory = np.zeros((halo + rows + halo, lanes)) if several and signal else None
    clean = None if clean_memory is None else clean_memory[halo:]
    from_noise = torch.empty((rows, lanes), dtype=torch.float64)
    from_clean = torch.empty((rows, lanes), dtype=torch.float64)
    noise_rows, clean_rows = list(from_noise), list(from_clean)
    scratch = torch.empty(lanes, dtype=torch.float64)
    half_norms = (law.squared_norms / 2.0).tolist()
    for start in range(n - rows, -rows, -rows):
        first = max(0, -start)  # position of row 0 in the last, shorter block
        if start < n - rows:
            noise[rows:] = noise[:halo]
        fill(start + first, noise[first:rows])
        if clean is not None:
            if start < n - rows:
                clean[rows:] = clean[:halo]
            clean[:rows] = 0.0
        if signal is not None:
            memory, scale = noise_memory, 1.0 / sigmas[0]
            if clean_memory is not None:
                memory, scale = clean_memory, 1.0
            flat = torch.from_numpy(memory[first:].reshape(-1))
            signal.add(start + first, rows - first, flat, scale)
        if clean is not None:
            torch.mm(matrix, torch.from_numpy(clean), out=from_clean)
        torch.mm(matrix, torch.from_numpy(noise), out=from_noise)
        for position in range(rows - 1, first - 1, -1):
            exponent = noise_rows[position]
            for sigma, recursion in zip(sigmas, recursions, strict=True):
                if clean is not None:
                    torch.add(exponent, clean_rows[position], alpha=1 / sigma, out=scratch)
                    scratch.mul_(1 / sigma)
                elif several:
                    torch.mul(exponent, 1 / sigma, out=scratch)
                recursion.step(
                    start + position,
                    scratch if several else exponent,
                    half_norms[start + position] / sigma**2,
                )


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
    _run(law, recursions, [sigma], y.shape[1], fill)
    return recursions[0].log_ratio(law.warm_start)


def sample_losses(
    law: MinSepLaw,
    sigmas: Sequence[float],
    direction: Direction,
    rng: np.random.Generator,
    size: int,
    *,
    log_space: bool | None = None,
    several: bool | None = None,
) -> Array:
    """Independent privacy losses: shape (len(sigmas), size).

    ``"remove"`` draws y ~ P and returns log P/Q; ``"add"`` draws y ~ Q and returns log Q/P. The
    entries of one row are independent; rows share their noise and participations, so a column
    shows one draw at several σ. ``several`` makes the values for one σ bit for bit the same however
    many others there are (by default only if there are others). Time runs backwards in blocks, so
    memory does not grow with n beyond the participations. Everything is float64; the error of a
    loss is below 1e-10.
    """
    signal = _Signal(law, rng, size) if direction == "remove" else None

    def fill(row: int, block: Array) -> None:
        del row
        rng.standard_normal(out=block)

    recursions = _recursions(law, sigmas, size, log_space)
    several = len(sigmas) > 1 if several is None else several
    _run(law, recursions, sigmas, size, fill, signal, several)
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
    shrinking: bool = False,
) -> Iterator[Array]:
    """Losses in chunks of shape (len(sigmas), ≤ law.lanes), in a fixed order.

    Chunk i draws from a stream of its own, ``SeedSequence(seed, spawn_key=(i,))``, so the losses do
    not depend on the number of threads. With ``shrinking`` the caller may delete the first entries
    of ``sigmas`` while reading; chunks already under way may still carry their rows, so rows are
    to be counted from the last. At most 2·threads + 1 chunks exist at a time.
    """
    lanes = law.lanes

    def work(index: int) -> Array:
        sequence = np.random.SeedSequence(list(seed), spawn_key=(index,))
        rng = np.random.Generator(np.random.SFC64(sequence))
        size = min(lanes, samples - index * lanes)
        several = True if shrinking else None
        return sample_losses(law, tuple(sigmas), direction, rng, size, several=several)

    # One chunk, one thread: torch's own threads would only get in each other's way. The setting is
    # per thread, except that new threads take the latest; so the caller's is put back.
    own_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    pending: deque[Future[Array]] = deque()
    try:
        for index in range(-(-samples // lanes)):
            pending.append(pool.submit(work, index))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(own_threads)
