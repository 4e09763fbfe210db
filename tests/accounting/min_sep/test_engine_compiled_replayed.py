"""The compiled and the tensor engine of b-min-sep losses: same draws replayed, laws, bad input."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dptrain.accounting.min_sep import engine_compiled, engine_torch
from dptrain.accounting.min_sep.moments.tilted import TiltedPatterns
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio

compiled = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
ENGINES = [pytest.param("numba", marks=compiled), "cuda"]
LANES = 128


def make_law(c: Any, p: float, b: int, n: int, warm: bool = True) -> MinSepLaw:
    return MinSepLaw(coefficients=np.asarray(c), probability=p, min_sep=b, steps=n, warm_start=warm)


def source(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def dense(law: MinSepLaw) -> np.ndarray:
    return sum(v * np.eye(law.steps, k=-k) for k, v in enumerate(law.coefficients))


def compiled_normals(law: MinSepLaw, state: np.ndarray) -> np.ndarray:
    """z, shape (n, LANES), that the compiled engine draws: blocks of rows from the last one."""
    from dptrain.accounting.min_sep import engine_kernel as kernel

    assert kernel.LANES == LANES
    n, rows = law.steps, max(kernel.ROWS, -(-law.bands // kernel.TILE) * kernel.TILE)
    z, pair, spoiled = np.zeros((n, LANES)), np.zeros(2 * LANES), np.zeros(LANES, np.int64)
    for start in range(n - rows, -rows, -rows):
        first = max(0, -start)
        for i in range(first - first % 2, rows, 2):
            kernel.normals(state, pair, spoiled)
            for j in (0, 1):
                if start + i + j >= 0:
                    z[start + i + j] = pair.reshape(2, -1)[j]
    assert not spoiled.any()
    return z


def replayed(drawing: TiltedPatterns, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(Σ x^k, z), each (n, LANES), of one block of ``drawing.losses``."""
    law, rng = drawing.law, source(seed)
    noise, events = engine_compiled.generators(rng, 1, LANES)
    times, counts = drawing._times(drawing._first(rng, LANES), events[0])
    x = np.zeros((law.steps, LANES))
    for lane in range(LANES):
        np.add.at(x[:, lane], times[: counts[lane], lane], 1.0)
    return x, compiled_normals(law, noise[0])


def tensor_normals(law: MinSepLaw, words: engine_torch._Words, spoiled: torch.Tensor) -> np.ndarray:
    """z, shape (n, size), from the words that the tensor engine draws next."""
    n, rows, size = law.steps, law.block_rows, len(spoiled)
    z, even = np.zeros((n, size)), rows + rows % 2
    for start in range(n - rows, -rows, -rows):
        pairs = torch.empty((even // 2, 2, size), dtype=torch.float64, device=words.device)
        words.normals(pairs, spoiled)
        block, first = pairs.view(even, size)[:rows].cpu().numpy(), max(0, -start)
        z[start + first : start + rows] = block[first:]
    assert not spoiled.any()
    return z


LONG = 1 / np.sqrt(np.arange(1, 41))
LAWS = {
    "cold": make_law([0.5, 1.1, 0.2], 0.3, 4, 45, False),
    "warm": make_law([0.5, 1.1, 0.2], 0.3, 4, 45),
    "odd block": make_law(LONG[:17], 0.1, 23, 70),
    "many bands": make_law(LONG, 0.02, 40, 301),
    "shorter than its bands": make_law(LONG[:16], 0.5, 16, 7),
    "one step": make_law([1.3], 0.5, 3, 1),
    "Poisson": make_law([1.3], 0.01, 1, 150),
    "balls in bins": make_law([0.5, 1.1, 0.2], 1.0, 3, 50),
    "certain, cold": make_law([0.5, 1.1, 0.2], 1.0, 3, 50, False),
    "likely": make_law([0.7, 0.0, 0.9], 0.8, 5, 64),
    "rare": make_law([1.0, 0.5], 1e-9, 2, 40),
}


@compiled
@pytest.mark.parametrize(("order", "sigmas"), [(1, [0.02, 0.3, 1.0, 3.0]), (3, [0.8, 3.0])])
@pytest.mark.parametrize("name", sorted(LAWS))
def test_losses_are_those_of_the_draws(name: str, order: int, sigmas: list[float]) -> None:
    # σ from where only the logarithmic recursion is safe; y = C x + σ z by a dense matrix. The
    # reference's own rounding grows with the exponents.
    law = LAWS[name]
    for sigma in sigmas:
        drawing = TiltedPatterns(law, sigma, order)
        losses, _ = drawing.losses(source(5), LANES)
        x, z = replayed(drawing, 5)
        exact = log_ratio(law, sigma, dense(law) @ x + sigma * z)
        reference = 1e-15 * law.steps * (1.0 + np.abs(exact))
        assert (np.abs(losses - exact) <= drawing.rounding + reference).all()
    assert engine_compiled.rounding_bound(law, 1.0) < 5e-8


@compiled
@pytest.mark.slow
def test_long_runs_stay_within_the_bound() -> None:
    law = make_law(LONG[:16], 0.01, 16, 4000)
    for sigma in (0.5, 2.0):
        drawing = TiltedPatterns(law, sigma, 1)
        x, z = replayed(drawing, 6)
        exact = log_ratio(law, sigma, dense(law) @ x + sigma * z)
        assert drawing.rounding < 5e-8
        assert (abs(drawing.losses(source(6), LANES)[0] - exact) <= drawing.rounding + 1e-11).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_normals_are_those_of_exact_arithmetic_on_the_words(engine: str) -> None:
    # Box-Muller in long double on the same words, at the ends of U too. Half a cell is the rest of
    # PAIR_ERROR: here the middles of the cells are compared.
    edge = [(1 << 16), (1 << 16) + 1, (1 << 20) + 7, (1 << 63) - 1, 1 << 63, (1 << 64) - (1 << 17)]
    other = source(1).integers(0, 1 << 64, LANES - 6, dtype=np.uint64).tolist()
    first = np.array(edge + other, dtype=np.uint64)
    second = source(2).integers(0, 1 << 64, LANES, dtype=np.uint64)
    exact = exact_pairs(first, second)
    got = np.empty((2, LANES))
    if engine == "numba":
        from dptrain.accounting.min_sep import engine_kernel as kernel

        flat, spoiled = np.empty(2 * LANES), np.zeros(LANES, np.int64)
        kernel.normals(states_that_give(first, second), flat, spoiled)
        got[:] = flat.reshape(2, LANES)
        assert not spoiled.any()
        assert abs(got - exact).max() < engine_compiled.PAIR_ERROR / 4
    else:
        words = Scripted([first, second])
        out, flags = torch.empty((1, 2, LANES), dtype=torch.float64), torch.zeros(LANES).bool()
        engine_torch._Words.normals(words, out, flags)  # type: ignore[arg-type]
        assert not flags.any()
        assert abs(out[0].numpy() - exact).max() < engine_compiled.PAIR_ERROR / 4


class Scripted(engine_torch._Words):
    """Words from a list."""

    def __new__(cls, rows: list[np.ndarray]) -> Scripted:
        self = super().__new__(cls, torch.Generator(), torch.device("cpu"))
        self.rows = rows  # type: ignore[attr-defined]
        return self

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rows.pop(0).view(np.int64)).view(shape)  # type: ignore[attr-defined]


def exact_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The middle of the cell that two words name, in long double precision."""
    wide = np.longdouble
    result = np.empty((2, len(first)))
    for i, (a, b) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        cell = (a << 21) + 2 * (b & ((1 << 20) - 1)) + 1  # U = cell / 2^85
        rest = (1 << 85) - cell
        # long double keeps 64 bits of either; take the smaller one for precision.
        energy = -np.log(wide(cell) / wide(2) ** 85)
        if rest < cell:
            energy = -np.log1p(-(wide(rest) / wide(2) ** 85))
        turn = ((b >> 20) & ((1 << 42) - 1)) * 2 + 1 - (1 << 42)
        angle = wide(turn) / wide(2) ** 43 * wide(np.pi) / 2
        radius = np.sqrt(2 * energy) * (-1 if b >> 63 else 1)
        sine, cosine = radius * np.sin(angle), radius * np.cos(angle)
        result[:, i] = (sine, cosine) if b >> 62 & 1 else (cosine, sine)
    return result


def states_that_give(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """States of xoshiro256++ whose next two words are given.

    A word is rotl(s0 + s3, 23) + s0, and with m = s1 ^ s3 the next state has s0' = s0 ^ m and s3' =
    rotl(m, 45). So choose s0', solve the second word for s3', hence m and s0; the first gives s3.
    """
    mask = (1 << 64) - 1

    def rotl(v: int, k: int) -> int:
        return ((v << k) | (v >> (64 - k))) & mask

    states = np.zeros((4, len(first)), dtype=np.uint64)
    for i, (w1, w2) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        next_s0 = (i * 0x9E3779B97F4A7C15 + 12345) & mask
        m = rotl((rotl((w2 - next_s0) & mask, 41) - next_s0) & mask, 19)
        s0 = next_s0 ^ m
        s3 = (rotl((w1 - s0) & mask, 41) - s0) & mask
        states[:, i] = [s0, m ^ s3, 7, s3]
    return states.reshape(-1)


@compiled
@pytest.mark.parametrize("word", [0, 1, (1 << 16) - 1, (1 << 64) - 1, (1 << 64) - (1 << 16)])
def test_words_at_the_ends_spoil_their_sample(word: int) -> None:
    from dptrain.accounting.min_sep import engine_kernel as kernel

    first = source(3).integers(0, 1 << 64, LANES, dtype=np.uint64)
    first[5] = word
    state = states_that_give(first, source(4).integers(0, 1 << 64, LANES, dtype=np.uint64))
    law, out = make_law([1.0], 0.5, 3, 1), np.empty(LANES)
    times, counts = np.zeros((1, LANES), np.int32), np.zeros(LANES, np.int64)
    pair = engine_compiled.kernel_pair(law, 1.0)
    nothing = engine_compiled.NOTHING_HELD
    kernel.log_ratios(state, times, counts, np.zeros(LANES, np.int64), *nothing, pair, out)
    # One step: row 0 of a block of 16 is drawn first but for rows before it, which are not drawn.
    assert np.isfinite(np.delete(out, 5)).all()
    assert math.isnan(out[5])


@pytest.mark.parametrize("engine", ENGINES)
def test_normals_are_standard_and_independent(engine: str) -> None:
    law = make_law([1.0], 1e-9, 1, 1000, False)
    if engine == "numba":
        z = compiled_normals(law, engine_compiled.generators(source(8), 1, LANES)[0, 0])
    else:
        words = engine_torch._Words.seeded(source(8), "cpu")
        z = tensor_normals(law, words, torch.zeros(LANES, dtype=torch.bool))
    # Kolmogorov-Smirnov of 128,000 values: 2 exp(-2 m D²) = 1e-8. Products: 6 sigma.
    assert stats.kstest(z.ravel(), "norm").statistic < math.sqrt(math.log(2e8) / (2 * z.size))
    for lag in (1, 2, 3, 16):
        assert abs((z[lag:] * z[:-lag]).mean()) < 6 / math.sqrt(z.size - lag * LANES)
        assert abs((z[lag:] ** 2 * z[:-lag] ** 2).mean() - 1) < 6 * math.sqrt(
            8 / (z.size - lag * LANES)
        )
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < 6 / math.sqrt(z.size - 1000)
    assert abs((z**4).mean() - 3) < 6 * math.sqrt(96 / z.size)
