"""The pieces of MMCC against enumeration: events, products of columns, laws of rows."""

import itertools

import numpy as np
import pytest
from scipy.stats import binom, norm

from dptrain.accounting.losses.coin_sums import row_law
from dptrain.accounting.mmcc.blocks import rows_of
from dptrain.accounting.mmcc.mmcc import row_mixtures
from dptrain.accounting.mmcc.posterior import Entries, participation_bounds, projection_bounds
from dptrain.strategies import BSR, Dense, SquareRoot, Tree, TreeRestart
from tests.oracles.enumeration import poisson


def matrix_of(strategy, steps):
    return strategy.bind(steps).columns(steps, np.arange(steps))


def brute_entries(matrix, i):
    """(size, ‖a‖², Σ, Σ of squares, max) of the products of column parts, row i, by definition."""
    past = matrix[:i]
    gram = past.T @ past
    return [
        (matrix[i, j], gram[j, j], gram[j].sum(), (gram[j] ** 2).sum(), gram[j].max())
        for j in range(matrix.shape[1])
        if matrix[i, j] > 0
    ]


def dense(seed, steps):
    rng = np.random.default_rng(seed)
    return np.tril(rng.random((steps, steps)) * (rng.random((steps, steps)) < 0.7), -1) + np.eye(
        steps
    )


@pytest.mark.parametrize("matrix", [dense(1, 7), dense(2, 5), matrix_of(SquareRoot(), 6)])
def test_entries_by_definition(matrix):
    steps = len(matrix)
    (rows,) = rows_of(Dense(matrix=matrix).bind(steps), steps=steps, cycle=1)
    expected = np.array([e for i in range(steps) for e in sorted(brute_entries(matrix, i))])
    assert rows.counts.sum() == steps
    found = np.stack([getattr(rows.entries, f) for f in ("size", "square", "linear", "quadratic")])
    found = np.repeat(found, np.repeat(rows.counts, np.diff(rows.starts)), axis=1)
    largest = np.repeat(rows.entries.largest, np.repeat(rows.counts, np.diff(rows.starts)))
    order, wanted = np.lexsort(found), np.lexsort(expected[:, :4].T)
    np.testing.assert_allclose(found[:, order], expected[:, :4].T[:, wanted], atol=1e-12)
    assert (largest[order] >= expected[wanted, 4] * (1 - 1e-12)).all()
    past = np.vstack([np.zeros(steps), np.cumsum(matrix**2, axis=0)[:-1]])
    assert rows.pairs == np.count_nonzero((matrix > 0) & (past > 0))


@pytest.mark.parametrize("cycle", [2, 3])
def test_blocks_by_definition(cycle):
    matrix = dense(4, 7)
    parts = rows_of(Dense(matrix=matrix).bind(7), steps=7, cycle=cycle)
    assert len(parts) == cycle
    for part, rows in enumerate(parts):
        kept = matrix[:, part::cycle]
        starts = list(range(part, 7, cycle))
        starts[0] = 0 if part == 0 else starts[0]
        expected = []
        for start in starts:
            gram = kept[:start].T @ kept[:start]
            for j in range(kept.shape[1]):
                size = np.linalg.norm(kept[start : start + cycle, j])
                if size > 0:
                    expected.append((size, gram[j, j], gram[j].sum(), (gram[j] ** 2).sum()))
        expected = np.array(expected)
        names = ("size", "square", "linear", "quadratic")
        found = np.stack([getattr(rows.entries, f) for f in names])
        np.testing.assert_allclose(
            found[:, np.lexsort(found)], expected[np.lexsort(expected.T)].T, atol=1e-12
        )


@pytest.mark.parametrize(("strategy", "steps"), [(BSR(bands=3), 30), (SquareRoot(), 9)])
@pytest.mark.parametrize("cycle", [1, 2, 4])
def test_toeplitz_rows_count_all_steps_and_pairs(strategy, steps, cycle):
    matrix = matrix_of(strategy, steps)
    (rows,) = rows_of(strategy.bind(steps), steps=steps, cycle=cycle)
    assert rows.counts.sum() == -(-steps // cycle)
    kept = matrix[:, ::cycle]
    pairs = 0
    for start in range(0, steps, cycle):
        block, past = kept[start : start + cycle], kept[:start]
        pairs += np.count_nonzero((block**2).sum(axis=0) * (past**2).sum(axis=0) > 0)
    assert pairs <= rows.pairs <= pairs + cycle * kept.shape[1]


def test_equal_rows_of_trees_are_one():
    (rows,) = rows_of(TreeRestart(height=4).bind(64), steps=64, cycle=1)
    assert len(rows.counts) <= 6
    assert rows.counts.sum() == TreeRestart(height=4).bind(64).rows(64)
    (rows,) = rows_of(Tree().bind(64), steps=64, cycle=1)
    assert len(rows.counts) <= 12


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("failure", [1e-1, 1e-3, 1e-8])
def test_events_fail_as_rarely_as_claimed(sigma, p, failure):
    # Pr[<y, a> > τ], y = Cx + σz, exactly: a sum over all patterns of normal tails.
    for matrix in (matrix_of(SquareRoot(), 8), dense(7, 7), matrix_of(BSR(bands=3), 8)):
        steps = len(matrix)
        law = poisson(steps, p)
        for i in range(1, steps):
            past = matrix[:i]
            gram = past.T @ past
            present = np.flatnonzero((matrix[i] > 0) & (np.diag(gram) > 0))
            if present.size == 0:
                continue
            kept = gram[present]
            entries = Entries(
                matrix[i, present],
                np.diag(gram)[present],
                kept.sum(axis=1),
                (kept**2).sum(axis=1),
                kept.max(axis=1),
            )
            for remove in (True, False):
                tau = projection_bounds(
                    entries, probability=p, sigma=sigma, failure=failure, remove=remove
                )
                for j, at in zip(present, tau, strict=True):
                    means = law.patterns @ gram[j] if remove else np.zeros(1)
                    weights = law.probabilities if remove else np.ones(1)
                    tail = norm.sf((at - means) / (sigma * np.sqrt(gram[j, j]))) @ weights
                    assert tail <= failure * (1 + 1e-6)
                    if not remove:
                        assert tail >= failure * (1 - 1e-6)


@pytest.mark.parametrize(("n", "p"), [(64, 1 / 64), (200, 0.05)])
@pytest.mark.parametrize("sigma", [2.0, 10.0])
def test_events_are_no_looser_than_the_papers(n, p, sigma):
    # Choquette-Choo et al. 2024, Algorithm 2: binomial tail t, then the t largest products.
    matrix = matrix_of(SquareRoot(), n)
    failure = 1e-6 / (n * n)
    (rows,) = rows_of(Dense(matrix=matrix).bind(n), steps=n, cycle=1)
    last = slice(rows.starts[-2], rows.starts[-1])
    names = ("size", "square", "linear", "quadratic", "largest")
    entries = Entries(*(getattr(rows.entries, name)[last] for name in names))
    found = projection_bounds(entries, probability=p, sigma=sigma, failure=failure, remove=True)
    past = matrix[:-1]
    gram = past.T @ past
    t = int(binom.isf(failure / 2, n - 1, p)) + 1
    z = norm.isf(failure / 2)
    paper = {
        gram[j, j]: np.sort(gram[j])[::-1][:t].sum() + z * sigma * np.sqrt(gram[j, j])
        for j in range(n - 1)
    }
    squares = entries.square[entries.square > 0]
    theirs = [paper[min(paper, key=lambda s: abs(s - square))] for square in squares]
    assert (found[entries.square > 0] <= theirs).all()


def test_probabilities_reduce_to_p():
    entries = Entries(*np.array([[1.0, 0.0, 0.0, 0.0, 0.0], [0.5, 0.9, 2.0, 1.5, 0.9]]).T)
    common = {"probability": 0.1, "failure": 1e-6}
    for remove in (True, False):
        found = participation_bounds(entries, sigma=1e6, remove=remove, **common)
        assert found[0] == 0.1
        assert found[1] == pytest.approx(0.1, rel=1e-4)
        louder = participation_bounds(entries, sigma=2.0, remove=remove, **common)
        assert louder[1] > found[1]
    remove = participation_bounds(entries, sigma=2.0, remove=True, **common)
    add = participation_bounds(entries, sigma=2.0, remove=False, **common)
    assert add[1] < remove[1] <= 1.0


def test_posteriors_stay_below_the_bounds_in_simulation():
    # Pr[x_j = 1 | first rows, all other coins] is at most p̃ but for the failing events.
    n, p, sigma, failure = 6, 0.2, 2.0, 0.02
    matrix = matrix_of(SquareRoot(), n)
    rng = np.random.default_rng(9)
    size = 200_000
    x = rng.random((size, n)) < p
    y = x @ matrix.T + sigma * rng.standard_normal((size, n))
    past = matrix[: n - 1]
    gram = past.T @ past
    for j in range(n - 1):
        products = gram[j]
        numbers = (gram[j, j], products.sum(), (products**2).sum(), products.max())
        table = np.array([[matrix[-1, j], *numbers]])
        bound = participation_bounds(
            Entries(*table.T), probability=p, sigma=sigma, failure=failure, remove=True
        )[0]
        others = x.astype(float)
        others[:, j] = 0.0
        projected = (y[:, :-1] - others @ past.T) @ past[:, j]
        odds = p / (1 - p) * np.exp((2 * projected - gram[j, j]) / (2 * sigma**2))
        above = np.mean(odds / (1 + odds) > bound)
        assert above - 6 * np.sqrt(failure / size) <= failure


@pytest.mark.parametrize("seed", range(20))
def test_row_laws_by_enumeration(seed):
    rng = np.random.default_rng(seed)
    m = int(rng.integers(1, 11))
    sizes = rng.random(m) ** 3 + 1e-3
    chances = rng.choice([1e-9, 0.01, 0.3, 0.99, 1.0], size=m)
    unit = float(sizes.max()) / 256
    law, beyond = row_law(sizes, chances, unit=unit)
    assert law.sum() + beyond == pytest.approx(1.0, abs=1e-14)
    coins = np.array(list(itertools.product((0, 1), repeat=m)), dtype=float)
    mass = np.prod(np.where(coins > 0, chances, 1 - chances), axis=1)
    sums = coins @ sizes
    grid = unit * np.arange(law.size) * (1.0 + 1e-13)
    tails = np.cumsum(law[::-1])[::-1] + beyond
    for k, at in enumerate(grid):
        # Mass above any point is at least the true one, also where it is tiny.
        below = grid[k - 1] if k else -1.0
        assert tails[k] >= mass[sums > below].sum() * (1 - 1e-13) or k == 0
        assert tails[k] <= 1.0 + 1e-14 or at == 0.0
    mean = chances @ sizes
    assert mean * (1 - 1e-12) <= law @ grid <= mean * 1.02 + 3 * unit


def test_rows_of_independent_noise_are_exact():
    law, beyond = row_law(np.array([2.0]), np.array([0.25]), unit=2.0 / 256)
    assert beyond == 0.0
    np.testing.assert_allclose(law[[0, 256]], [0.75, 0.25], rtol=1e-13)
    assert np.count_nonzero(law) == 2


def test_mixtures_gain_what_the_cut_takes():
    # 400 coins: the law's far tail is cut, and put on a mean above all.
    strategy = Dense(matrix=np.tril(np.ones((40, 40))))
    (rows,) = rows_of(strategy.bind(40), steps=40, cycle=1)
    mixtures = row_mixtures(rows, probability=0.01, sigma=50.0, failure=1e-6, remove=True)
    assert mixtures.means[-1] >= 40.0
    np.testing.assert_allclose(mixtures.weights.sum(axis=1), 1.0, atol=1e-12)
