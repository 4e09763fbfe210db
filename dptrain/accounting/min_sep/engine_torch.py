"""Privacy losses of b-min-sep sampling on a torch device: many samples, row by row, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dptrain.accounting.min_sep.engine_compiled import (
    BREACH,
    LARGEST_HELD,
    held_error,
    held_rows,
    interval,
    log_gauge,
    rounding_bound,
)
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array

LANES = 1 << 17  # a row's kernel then takes longer than its launch
DEVICE_BYTES = 1 << 30
EDGE = 1 << 16


def lanes(law: MinSepLaw, copies: int = 1) -> int:
    """Samples a chunk: ``LANES``, or fewer so that a chunk stays within DEVICE_BYTES."""
    rows = 9 * law.block_rows + 4 * law.bands + 14 * law.min_sep  # windows of seven σ, twice
    words = 4 if copies == 1 else 10 * copies  # several copies at a step are counted by sorting
    events = words * ((law.steps - 1) // law.min_sep + 2)
    return max(1, min(LANES, DEVICE_BYTES // (8 * (rows + events))))


def check_device(device: str | torch.device) -> None:
    """Raise where draws are to be made on a GPU and torch finds none."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine='cuda': torch finds no CUDA device; use engine='auto'")


class _Words(NamedTuple):
    """Source of uniform 64-bit words on one device."""

    generator: torch.Generator
    device: torch.device

    @classmethod
    def seeded(cls, rng: np.random.Generator, device: str | torch.device) -> _Words:
        """Words of a device for a seed from ``rng``; see ``check_device``."""
        check_device(device)
        place = torch.device(device)
        return cls(torch.Generator(place).manual_seed(int(rng.integers(0, 1 << 63))), place)

    def draw(self, *shape: int) -> torch.Tensor:
        words = torch.empty(shape, dtype=torch.int64, device=self.device)
        return words.random_(-(1 << 63), None, generator=self.generator)

    def normals(self, out: torch.Tensor, spoiled: torch.Tensor) -> None:
        """Fill two rows a pair, shape (pairs, 2, lanes), up to what ``rounding_bound`` allows."""
        pairs, _, count = out.shape
        first, second = self.draw(pairs, count), self.draw(pairs, count)
        # -log U of 84 bits; near 0 or 1 the lane is spoiled.
        low, extra = first.double() * 2.0**-64, (second & ((1 << 20) - 1)).double()
        fine = torch.log(low + (extra + 0.5) * 2.0**-84)
        energy = -torch.where(first < 0, torch.log1p(low + 2.0**-65), fine)
        spoiled |= ((first >= -EDGE) & (first < EDGE)).any(0)
        radius = torch.sqrt(2.0 * energy) * (1.0 - 2.0 * (second < 0).double())
        turn = (second >> 20) & ((1 << 42) - 1)
        angle = (turn.double() + (0.5 - 2.0**41)) * (math.pi / 2 * 2.0**-42)
        sine, cosine = radius * torch.sin(angle), radius * torch.cos(angle)
        swap = ((second >> 62) & 1).bool()
        out[:, 0] = torch.where(swap, sine, cosine)
        out[:, 1] = torch.where(swap, cosine, sine)


class _Events(NamedTuple):
    """Participations of all lanes, times ascending, and how many copies take part in each."""

    times: torch.Tensor
    lanes: torch.Tensor
    copies: torch.Tensor

    def put(self, low: int, high: int, start: int, x: torch.Tensor) -> None:
        """Write events low..high-1 into zeros, the first row of which is step ``start``."""
        x[self.times[low:high] - start, self.lanes[low:high]] = self.copies[low:high]


class _BackwardRecursion:
    """f_i, …, f_{i+b-1}, linear or logarithmic as in ``engine_kernel``."""

    def __init__(
        self, law: MinSepLaw, sigma: float, count: int, device: torch.device, copies: int
    ) -> None:
        self._law, self._every = law, interval(law, sigma, copies)
        self._gauge = log_gauge(law.probability) if self._every else 0.0
        p, b = law.probability, law.min_sep
        self._rows = torch.zeros((b, count), dtype=torch.float64, device=device)
        self._shift = torch.zeros(count, dtype=torch.int64, device=device)
        log_weights = math.log(p) - law.squared_norms / (2.0 * sigma**2)
        if self._every:
            for j in range(b):
                self._rows[(law.steps + j) % b] = math.exp(j * self._gauge)
            self._weights = np.exp(log_weights - b * self._gauge).tolist()
            self._keep = 1.0 if self._gauge else 1.0 - p
        else:
            self._weights = log_weights.tolist()
            self._keep = math.log1p(-p) if p < 1.0 else -math.inf

    def consume(self, first_row: int, exponents: torch.Tensor) -> None:
        """Rows of exponents, the last first; they are overwritten."""
        b = self._law.min_sep
        if self._every:
            exponents.exp_()
        for position in range(len(exponents) - 1, -1, -1):
            row = first_row + position
            after, current = self._rows[(row + 1) % b], self._rows[row % b]
            if not self._every:
                taken = exponents[position] + self._weights[row] + current
                torch.logaddexp(after + self._keep, taken, out=current)
                continue
            kept = after if self._keep == 1.0 else after * self._keep
            torch.addcmul(kept, exponents[position], current, value=self._weights[row], out=current)
            if (self._law.steps - row) % self._every == 0:
                exponent = torch.frexp(self._rows.amax(0))[1].long()
                self._shift += exponent
                self._rows *= torch.ldexp(torch.ones_like(kept), -exponent)

    def log_ratio(self) -> torch.Tensor:
        """log P/Q once row 0 has been consumed."""
        law, p = self._law, self._law.probability
        bars = torch.arange(law.min_sep, dtype=torch.float64, device=self._rows.device)
        bars = bars[: law.min_sep if law.warm_start else 1, None]
        logs = self._rows[: len(bars)].log() if self._every else self._rows[: len(bars)]
        logs = logs - bars * self._gauge + bars.clamp(max=1.0) * math.log(p)
        total = (
            torch.logsumexp(logs, 0)
            + self._shift.double() * math.log(2.0)
            + law.steps * self._gauge
        )
        return total - (math.log1p((law.min_sep - 1) * p) if law.warm_start else 0.0)


class _Held:
    """A direction whose product with the normals is given: ``held_rows``, row by row."""

    def __init__(self, unit: Array, along: Array, device: torch.device) -> None:
        self._rows = held_rows(unit)[:, :-1].T.tolist()
        self._left = torch.from_numpy(along.copy()).to(device)  # it is overwritten

    def turn(self, first_row: int, normals: torch.Tensor, spoiled: torch.Tensor) -> None:
        """Turn rows of free normals, the last first; beyond LARGEST_HELD they spoil their lane."""
        for position in range(len(normals) - 1, -1, -1):
            unit, lean, spread = self._rows[first_row + position]
            row = normals[position]
            row.mul_(spread).add_(self._left, alpha=lean)
            self._left.sub_(row, alpha=unit)
        spoiled |= ~(normals.abs() <= LARGEST_HELD).all(0)


def _toeplitz(c: Array, rows: int, columns: int, shift: int) -> Array:
    """M[i, j] = c[j - i + shift], zero outside c."""
    index = np.arange(columns)[None, :] - np.arange(rows)[:, None] + shift
    inside = (index >= 0) & (index < len(c))
    return np.where(inside, c[np.clip(index, 0, len(c) - 1)], 0.0)


def _log_ratios(
    law: MinSepLaw,
    sigma: float,
    words: _Words,
    spoiled: torch.Tensor,
    *,
    events: _Events | None = None,
    copies: int = 1,
    held: _Held | None = None,
) -> Array:
    """log P/Q of outputs with drawn noise, NaN where spoiled: shape (lanes,).

    Args:
        spoiled: lanes that are spoiled already; overwritten.
        events: what the outputs have taken part in; by default in nothing.
        copies: how often a lane may take part at a step.
        held: turns the normals of every row, if a direction is held.
    """
    place, size = words.device, len(spoiled)
    n, rows, halo = law.steps, law.block_rows, law.bands - 1
    # C^T over a block: row i reads z_i, …, z_{i+halo}. C^T C: the same over C x, which reads x.
    forward = _toeplitz(law.coefficients, rows, rows + halo, 0)
    columns = _toeplitz(law.coefficients[::-1], rows + halo, rows + 2 * halo, 0)
    matrix = torch.from_numpy(forward).to(place)
    gram = torch.from_numpy(forward @ columns).to(place)
    last_gram = torch.from_numpy(forward[:, :rows] @ columns[:rows]).to(place)
    limit = BREACH * math.sqrt(float(law.squared_norms[0]))
    starts = list(range(n - rows, -rows, -rows))
    signal = None
    if events is not None:
        edges = np.array([(s - halo, s + rows + halo) for s in starts], dtype=np.int64)
        bounds = torch.searchsorted(events.times, torch.from_numpy(edges).to(place)).tolist()
        x = torch.zeros((rows + 2 * halo, size), dtype=torch.float64, device=place)
        signal = torch.empty((rows, size), dtype=torch.float64, device=place)
    even = rows + rows % 2
    noise = torch.zeros((even + halo, size), dtype=torch.float64, device=place)
    product = torch.empty((rows, size), dtype=torch.float64, device=place)
    pairs = torch.empty((even // 2, 2, size), dtype=torch.float64, device=place)
    window = _BackwardRecursion(law, sigma, size, place, copies)
    for block, start in enumerate(starts):
        first = max(0, -start)
        noise[rows : rows + halo] = noise[:halo].clone()
        words.normals(pairs, spoiled)
        noise[:rows] = pairs.view(even, size)[:rows]
        if held is not None:
            held.turn(start + first, noise[first:rows], spoiled)
        torch.mm(matrix, noise[: rows + halo], out=product)
        spoiled |= ~(product[first:].abs() <= limit).all(0)
        exponents = product[first:] / sigma
        if events is not None and signal is not None:
            x.zero_()
            low, high = bounds[block]
            events.put(low, high, start - halo, x)
            torch.mm(last_gram if block == 0 else gram, x, out=signal)
            exponents.add_(signal[first:], alpha=1.0 / sigma**2)
        window.consume(start + first, exponents)
    found: Array = window.log_ratio().masked_fill_(spoiled, math.nan).cpu().numpy()
    return found


def tilted_losses(
    law: MinSepLaw,
    sigma: float,
    times: npt.NDArray[np.int64],
    lanes: npt.NDArray[np.int64],
    rng: np.random.Generator,
    size: int,
    *,
    copies: int,
    device: str | torch.device = "cuda",
) -> Array:
    """log P/Q of y = C Σ_k x^k + σz with given participations of all copies, shape (size,).

    Each is within ``engine_compiled.rounding_bound(law, sigma, copies=copies)``; NaN where spoiled.

    Args:
        times: of every participation, in any order; ``lanes``: which sample's. A pair that stands
            twice counts twice.
        copies: at most so many copies take part in a step.
    """
    words = _Words.seeded(rng, device)
    keys, taking = torch.unique(
        torch.from_numpy(times * size + lanes).to(words.device), return_counts=True
    )
    events = _Events(keys // size, keys % size, taking.double())
    spoiled = torch.zeros(size, dtype=torch.bool, device=words.device)
    return _log_ratios(law, sigma, words, spoiled, events=events, copies=copies)


def losses_along(
    law: MinSepLaw,
    sigma: float,
    unit: Array,
    rng: np.random.Generator,
    along: Array,
    *,
    device: str | torch.device = "cuda",
) -> Array:
    """Add-direction losses where a direction is held, as ``engine_compiled.losses_along`` has them.

    The direction's rows and their rounding (``held_error``) are those of the compiled engine.
    """
    words = _Words.seeded(rng, device)
    spoiled = torch.zeros(along.size, dtype=torch.bool, device=words.device)
    held = _Held(unit, along, words.device)
    ratios = _log_ratios(law, sigma, words, spoiled, held=held)
    bound = rounding_bound(law, sigma, held=held_error(unit))
    return np.where(np.isnan(ratios), np.inf, bound - ratios)
