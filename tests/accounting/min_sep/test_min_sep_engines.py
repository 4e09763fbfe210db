"""The compiled and the tensor engine of b-min-sep losses: same draws replayed, laws, bad input."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dptrain.accounting.min_sep import engine_compiled as min_sep_compiled
from dptrain.accounting.min_sep import engine_torch as min_sep_device
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.min_sep_losses import MinSepLosses, log_ratio
from dptrain.accounting.simulation.simulation import DIRECTIONS, loss_chunks

compiled = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
ENGINES = [pytest.param("numba", marks=compiled), "cuda"]
LANES = 128


def make_law(c: Any, p: float, b: int, n: int, warm: bool = True) -> MinSepLaw:
    return MinSepLaw(coefficients=np.asarray(c), probability=p, min_sep=b, steps=n, warm_start=warm)


def source(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def draw(engine: str, law: MinSepLaw, sigmas: list[float], seed: int, size: int) -> np.ndarray:
    if engine == "numba":
        return min_sep_compiled.sample(law, sigmas, DIRECTIONS, source(seed), size)
    return min_sep_device.sample(law, sigmas, DIRECTIONS, source(seed), size, device="cpu")


def dense(law: MinSepLaw) -> np.ndarray:
    return sum(v * np.eye(law.steps, k=-k) for k, v in enumerate(law.coefficients))


def replayed_numba(law: MinSepLaw, seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(x, z), each (n, size), that the compiled engine draws: blocks of rows from the last one."""
    from dptrain.accounting.min_sep import engine_kernel as kernel

    assert kernel.LANES == LANES
    blocks, n = -(-size // LANES), law.steps
    rows = max(kernel.ROWS, -(-law.bands // kernel.TILE) * kernel.TILE)
    noise, events = min_sep_compiled.generators(source(seed), blocks, LANES)
    x, z = np.zeros((n, blocks * LANES)), np.zeros((n, blocks * LANES))
    for block in range(blocks):
        spoiled, counts = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)
        times = np.zeros(((n - 1) // law.min_sep + 1, LANES), np.int32)
        kernel.participations(
            n, law.min_sep, law.probability, law.warm_start, events[block], times, counts, spoiled
        )
        for lane in range(LANES):
            x[times[: counts[lane], lane], block * LANES + lane] = 1.0
        pair = np.zeros(2 * LANES)
        for start in range(n - rows, -rows, -rows):
            first = max(0, -start)
            for i in range(first - first % 2, rows, 2):
                kernel.normals(noise[block], pair, spoiled)
                for j in (0, 1):
                    if start + i + j >= 0:
                        z[start + i + j, block * LANES : (block + 1) * LANES] = pair.reshape(2, -1)[
                            j
                        ]
        assert not spoiled.any()
    return x[:, :size], z[:, :size]


def replayed_tensors(
    law: MinSepLaw, seed: int, size: int, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    generator = torch.Generator(device).manual_seed(int(source(seed).integers(0, 1 << 63)))
    words = min_sep_device._Words(generator, torch.device(device))
    spoiled = torch.zeros(size, dtype=torch.bool, device=device)
    x = np.zeros((law.steps, size))
    times, lane = min_sep_device._participations(law, words, size, spoiled)
    x[times.cpu().numpy(), lane.cpu().numpy()] = 1.0
    return x, tensor_normals(law, words, spoiled)


def tensor_normals(
    law: MinSepLaw, words: min_sep_device._Words, spoiled: torch.Tensor
) -> np.ndarray:
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


REPLAY: dict[str, Callable[[MinSepLaw, int, int], tuple[np.ndarray, np.ndarray]]] = {
    "numba": replayed_numba,
    "cuda": replayed_tensors,
}
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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", sorted(LAWS))
def test_losses_are_those_of_the_draws(engine: str, name: str) -> None:
    # σ from where only the logarithmic recursion is safe; the float64 engine is the reference, and
    # y = C x + σ z is formed with a dense matrix. Losses are raised by the bound, so lie within
    # [exact, exact + 2 bound]; the reference's own rounding grows with the exponents.
    law, size, sigmas = LAWS[name], 70, [0.02, 0.3, 1.0, 3.0]
    x, z = REPLAY[engine](law, 5, size)
    losses = draw(engine, law, sigmas, 5, size)
    for index, sigma in enumerate(sigmas):
        remove = log_ratio(law, sigma, dense(law) @ x + sigma * z)
        add = -log_ratio(law, sigma, sigma * z)
        bound = min_sep_compiled.rounding_bound(law, sigma)
        for got, exact in ((losses[0, index], remove), (losses[1, index], add)):
            reference = 1e-15 * law.steps * (1.0 + abs(exact))
            assert (got >= exact - reference).all()
            assert (got <= exact + 2.0 * bound + reference).all()
    assert min_sep_compiled.rounding_bound(law, 1.0) < 5e-8


@compiled
@pytest.mark.slow
def test_long_runs_stay_within_the_bound() -> None:
    law = make_law(LONG[:16], 0.01, 16, 4000)
    x, z = replayed_numba(law, 6, 64)
    losses = draw("numba", law, [0.5, 2.0], 6, 64)
    for index, sigma in enumerate([0.5, 2.0]):
        bound = min_sep_compiled.rounding_bound(law, sigma)
        exact = log_ratio(law, sigma, dense(law) @ x + sigma * z)
        assert bound < 5e-8
        assert (abs(losses[0, index] - bound - exact) <= bound + 1e-11).all()


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
        assert abs(got - exact).max() < min_sep_compiled.PAIR_ERROR / 4
    else:
        words = Scripted([first, second])
        out, flags = torch.empty((1, 2, LANES), dtype=torch.float64), torch.zeros(LANES).bool()
        min_sep_device._Words.normals(words, out, flags)  # type: ignore[arg-type]
        assert not flags.any()
        assert abs(out[0].numpy() - exact).max() < min_sep_compiled.PAIR_ERROR / 4


class Scripted(min_sep_device._Words):
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
    law, out = make_law([1.0], 0.5, 3, 1), np.empty((2, 1, LANES))
    times, counts = np.zeros((1, LANES), np.int32), np.zeros(LANES, np.int64)
    arguments = min_sep_compiled.kernel_arguments(law, [1.0], DIRECTIONS)
    nothing = min_sep_compiled.NOTHING_HELD
    kernel.log_ratios(state, times, counts, np.zeros(LANES, np.int64), *nothing, *arguments, out)
    # One step: row 0 of a block of 16 is drawn first but for rows before it, which are not drawn.
    losses = min_sep_compiled.upper_losses(law, [1.0], DIRECTIONS, out)
    assert np.isfinite(np.delete(losses, 5, axis=2)).all()
    assert (losses[..., 5] == np.inf).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_normals_are_standard_and_independent(engine: str) -> None:
    law = make_law([1.0], 1e-9, 1, 2000, False)
    z = REPLAY[engine](law, 8, 64)[1]
    # Kolmogorov-Smirnov of 128,000 values: 2 exp(-2 m D²) = 1e-8. Products: 6 sigma.
    assert stats.kstest(z.ravel(), "norm").statistic < math.sqrt(math.log(2e8) / (2 * z.size))
    for lag in (1, 2, 3, 16):
        assert abs((z[lag:] * z[:-lag]).mean()) < 6 / math.sqrt(z.size - lag * 64)
        assert abs((z[lag:] ** 2 * z[:-lag] ** 2).mean() - 1) < 6 * math.sqrt(
            8 / (z.size - lag * 64)
        )
    assert abs((z[:, 1:] * z[:, :-1]).mean()) < 6 / math.sqrt(z.size - 2000)
    assert abs((z**4).mean() - 3) < 6 * math.sqrt(96 / z.size)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("b", "n", "p", "warm"), [(3, 8, 0.4, True), (2, 6, 0.3, False)])
def test_participations_have_the_law_of_the_sampler(
    engine: str, b: int, n: int, p: float, warm: bool
) -> None:
    size = 19_968
    x = REPLAY[engine](make_law([1.0], p, b, n, warm), 9, size)[0].astype(int)
    codes, counts = np.unique(x.T @ (1 << np.arange(n)), return_counts=True)
    expected = pattern_codes(p, b, n, warm)
    assert set(codes.tolist()) <= set(expected)
    found = dict(zip(codes.tolist(), counts.tolist(), strict=True))
    for code, q in expected.items():
        # 6 sigma and 3 counts for the Poisson tail of rare patterns.
        assert abs(found.get(code, 0) - size * q) <= 6 * math.sqrt(size * q * (1 - q)) + 3


def pattern_codes(p: float, b: int, n: int, warm: bool) -> dict[int, float]:
    """Probability of every pattern, as bits, by walking the sampler's tree."""
    total = 1 + (b - 1) * p if warm else 1.0
    states = {(0, s): (p if s else 1.0) / total for s in range(b if warm else 1)}
    for t in range(n):
        following: dict[tuple[int, int], float] = {}
        for (code, barred), q in states.items():
            moves = [(code, barred - 1, 1.0)]
            if not barred:
                moves = [(code | 1 << t, b - 1, p), (code, 0, 1 - p)]
            for new_code, new_barred, weight in moves:
                key = (new_code, new_barred)
                following[key] = following.get(key, 0.0) + q * weight
        states = following
    result: dict[int, float] = {}
    for (code, _), q in states.items():
        result[code] = result.get(code, 0.0) + q
    return result


@compiled
def test_losses_do_not_depend_on_threads_or_on_other_noise_levels() -> None:
    simulation = MinSepLosses(make_law([1.0, 0.5], 0.2, 3, 20), engine="numba")
    samples = 2 * simulation.lanes + 17
    runs = [
        np.concatenate(
            list(loss_chunks(simulation, [1.0, 2.0], seed=[7, 1], samples=samples, threads=k)),
            axis=2,
        )
        for k in (1, 3)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert runs[0].shape == (2, 2, samples)
    assert np.isfinite(runs[0]).all()  # spoiled samples have a chance of 1e-8 here
    assert np.unique(runs[0][0, 0]).size == samples  # no stream is used twice
    both = simulation.draw([1.0, 2.0], "both", source(6), 99)
    for index, direction in enumerate(DIRECTIONS):
        one = simulation.draw([2.0], direction, source(6), 99)
        np.testing.assert_array_equal(one[0], both[index, 1])


def test_the_engine_is_part_of_what_a_seed_means() -> None:
    short, long = make_law([1.0], 0.2, 3, 20), make_law([1.0], 0.2, 3, 2000)
    assert MinSepLosses(short).engine == "numpy"
    best = "numba" if min_sep_compiled.available() else "numpy"
    assert MinSepLosses(long).engine == best
    assert MinSepLosses(long).to_dict() == {**long.to_dict(), "engine": best}
    assert MinSepLosses(long, engine="numpy").to_dict()["engine"] == "numpy"
    # Without numba: the float64 engine, or an error that says so.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(min_sep_compiled, "available", lambda: False)
        assert MinSepLosses(long).engine == "numpy"
        with pytest.raises(ValueError, match=r"engine='numba'.*install"):
            MinSepLosses(long, engine="numba")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"engine='cuda'.*CUDA"):
            MinSepLosses(long, engine="cuda").draw([1.0], "add", np.random.default_rng(1), 8)
    with pytest.raises(ValueError, match="engine='fast'"):
        MinSepLosses(long, engine="fast")  # type: ignore[arg-type]
