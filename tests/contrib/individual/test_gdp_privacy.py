"""Whether filtered runs are B-GDP, by quadrature over all outputs of two or three adaptive steps.

The example's data are norms that the adversary chooses as functions of past outputs; without the
example, every output is standard normal (noise of deviation 1, so that a step with norm ratio r
has mean r/σ). The decisions are the record's own: every point of the grid of past outputs is one
example of a record.
"""

import itertools

import numpy as np
import pytest
from scipy.special import ndtr

from dptrain.contrib.individual.gdp import GDPRecord
from dptrain.contrib.individual.odometer import OdometerRecord

BUDGET, SIGMA = 1.0, 0.9
EPSILONS = np.array([-3.0, -1.5, -0.7, -0.2, 0.0, 0.2, 0.7, 1.5, 3.0, 4.5])
ERROR = 2e-5  # of the quadrature


def cells(count, reach=8.0):
    """Midpoints, and their probabilities under the standard normal."""
    edges = np.linspace(-reach, reach, count + 1)
    middle = 0.5 * (edges[1:] + edges[:-1])
    density = np.exp(-0.5 * middle**2) / np.sqrt(2 * np.pi)
    return middle, density * (edges[1] - edges[0])


def gdp_delta(epsilon, mu):
    """H_{e^ε}(N(μ, 1) || N(0, 1)) for real ε."""
    return ndtr(-epsilon / mu + mu / 2) - np.exp(epsilon) * ndtr(-epsilon / mu - mu / 2)


def last_step(evidence, mean, epsilon):
    """E (e^{L + cZ - c²/2} - e^ε)_+ for a last step of mean c, in closed form."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        k = (evidence - epsilon) / np.abs(mean)
        value = np.exp(evidence) * ndtr(k + np.abs(mean) / 2)
        value -= np.exp(epsilon) * ndtr(k - np.abs(mean) / 2)
    nothing = np.maximum(np.exp(evidence) - np.exp(epsilon), 0.0)
    return np.where(mean == 0, nothing, value)


class Late(GDPRecord):
    """Decides from what was spent before: the step itself may exceed the budget."""

    def _shares(self, indices, ratios):
        return (self._spent[indices] < self.budget**2).astype(float)


class Half(GDPRecord):
    """Charges μ/2."""

    def admit(self, *, ratios, **where):
        return super().admit(ratios=ratios / 2, **where)


def record(size, kind=GDPRecord, full_consumption=False, budget=BUDGET):
    return kind(
        size=size,
        noise_multiplier=SIGMA,
        budget=budget,
        max_steps=10,
        full_consumption=full_consumption,
    )


def means(book, ratios):
    """One step of all of the record's examples: what each really adds to the mean of the output."""
    ratios = np.ascontiguousarray(np.broadcast_to(ratios, (book.size,)))
    where = {"step": book.steps, "part": 0, "indices": np.arange(book.size)}
    shares = book.admit(ratios=ratios, **where)
    book.commit(book.steps, 1)
    return shares * ratios / SIGMA


def seen_through(rng, *outputs):
    """A norm ratio for each of 6 ranges of every past output, at random."""
    bins = [np.digitize(y, np.linspace(-2, 2.5, 5)) for y in outputs]
    table = np.minimum(rng.uniform(0, 1.3, [6] * len(outputs)), 1.0)
    return table[tuple(bins)]


def lucky(_rng, *outputs):
    """Goes on boldly while the outputs look like the example, timidly otherwise."""
    return np.where(sum(outputs) > 0.5 * len(outputs), 0.8, 0.3)


def flickering(_rng, *outputs):
    """Too large for what is left on one side, small on the other."""
    return np.where(outputs[-1] > 0.3, 1.0, 0.25)


ADVERSARIES = {
    "lucky": (0.6, lucky),
    "flickering": (0.5, flickering),
    **{f"random {seed}": (0.2 + 0.12 * seed, seen_through) for seed in range(5)},
}


def hockey_sticks(name, kind=GDPRecord, full_consumption=False, count=320):
    """H_{e^ε}(with || without) of three steps; and the most that was really contributed, Σ μ²."""
    first, adversary = ADVERSARIES[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    y, weight = cells(count)
    size = count * count
    book = record(size, kind, full_consumption)
    y1, y2 = np.repeat(y, count), np.tile(y, count)
    evidence, squares = np.zeros(size), np.zeros(size)
    for ratios, output in ((first, y1), (adversary(rng, y1), y2)):
        mean = means(book, ratios)
        evidence += mean * output - mean**2 / 2
        squares += mean**2
    mean = means(book, adversary(rng, y1, y2))
    weights = np.repeat(weight, count) * np.tile(weight, count)
    sticks = [float(weights @ last_step(evidence, mean, epsilon)) for epsilon in EPSILONS]
    return np.array(sticks), float((squares + mean**2).max())


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("full_consumption", [False, True])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_adaptive_norms_never_exceed_the_budget(name, full_consumption):
    """Real ε cover both directions: H_{e^ε}(Q || P) = 1 - e^ε + e^ε H_{e^-ε}(P || Q)."""
    sticks, most = hockey_sticks(name, full_consumption=full_consumption)
    assert (sticks <= gdp_delta(EPSILONS, BUDGET) + ERROR).all()
    assert most <= BUDGET**2
    assert most > 0.4 * BUDGET**2


def test_full_consumption_is_exactly_the_budget():
    """Full norms of 0.55 R until the budget is gone, 3 · (0.55/0.9)² > 1 (Koskela, Remark C.3)."""
    ADVERSARIES["constant"] = (0.55, lambda _rng, *_outputs: 0.55)
    try:
        sticks, most = hockey_sticks("constant", full_consumption=True)
    finally:
        del ADVERSARIES["constant"]
    assert most == pytest.approx(BUDGET**2, rel=3e-6)
    np.testing.assert_allclose(sticks, gdp_delta(EPSILONS, BUDGET), atol=ERROR)


@pytest.mark.parametrize(("kind", "name"), [(Late, "lucky"), (Half, "lucky"), (Late, "random 4")])
def test_wrong_filters_are_found_out(kind, name):
    sticks, most = hockey_sticks(name, kind)
    assert most > BUDGET**2
    assert (sticks > gdp_delta(EPSILONS, BUDGET) + 100 * ERROR).any()


# Hidden coins: each step's norm also depends on a fair coin that only the trainer sees (an
# augmentation), and so do the decisions. The likelihood ratio is a mixture over paths of coins.
HIDDEN = {
    "one of two norms": lambda y, coins: 0.25 + 0.55 * coins[-1] + 0.0 * y[-1],
    "opposite signs": lambda y, coins: (0.7 - 0.3 * (y[-1] > 0.5)) * (1 - 2 * coins[-1]),
    "agreeing": lambda y, coins: 0.3 + 0.4 * (sum(coins) / len(coins)) * (1 + (y[-1] > 0.2)) / 2,
    "nearly always large": lambda y, coins: np.where(y[-1] > -1, 0.85, 0.1) + 0.1 * coins[0],
}


def mixture(name, kind=GDPRecord, full_consumption=False, steps=2, count=320):
    """H_{e^ε}(with || without) for hidden coins, and the largest Σ μ² of all paths."""
    y, weight = cells(count)
    paths = list(itertools.product((0, 1), repeat=steps))
    grids = [axis.reshape(-1) for axis in np.meshgrid(*[y] * steps, indexing="ij")]
    weights = np.prod(np.stack([a.reshape(-1) for a in np.meshgrid(*[weight] * steps)]), axis=0)
    ratio = np.zeros(len(grids[0]))
    most = 0.0
    for coins in paths:
        book = record(len(grids[0]), kind, full_consumption)
        evidence, squares = np.zeros_like(ratio), np.zeros_like(ratio)
        for t in range(steps):
            past = [np.zeros_like(ratio), *grids[:t]]
            signed = np.broadcast_to(HIDDEN[name](past, coins[: t + 1]), ratio.shape)
            mean = means(book, np.minimum(np.abs(signed), 1.0)) * np.sign(signed)
            evidence += mean * grids[t] - mean**2 / 2
            squares += mean**2
        most = max(most, float(squares.max()))
        ratio += np.exp(evidence) / len(paths)
    assert float(weights @ ratio) == pytest.approx(1.0, abs=1e-4)  # P is a distribution
    excess = [float(weights @ np.maximum(ratio - np.exp(e), 0.0)) for e in EPSILONS]
    return np.array(excess), most


@pytest.mark.sample(every=5)
@pytest.mark.parametrize(("steps", "count", "error"), [(2, 320, 1e-4), (3, 72, 2e-3)])
@pytest.mark.parametrize("full_consumption", [False, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_coins_never_exceed_the_budget(name, full_consumption, steps, count, error):
    """Kahane's inequality: a mixture of Gaussian exponentials of variance ≤ B²."""
    excess, most = mixture(name, full_consumption=full_consumption, steps=steps, count=count)
    assert most <= BUDGET**2
    assert (excess <= gdp_delta(EPSILONS, BUDGET) + error).all()


@pytest.mark.parametrize("kind", [Late, Half])
def test_wrong_filters_are_found_out_under_hidden_coins(kind):
    excess, most = mixture("nearly always large", kind)
    assert most > BUDGET**2
    assert (excess > gdp_delta(EPSILONS, BUDGET) + 5e-3).any()


def odometer(opens, count=320):
    """Three steps; the second round is opened after the first step where ``opens(y1)``.

    Returns, for events in which one round was opened and for all events, H_{e^ε} of both.
    """
    budgets = (0.5, BUDGET)
    y, weight = cells(count)
    size = count * count
    y1, y2 = np.repeat(y, count), np.tile(y, count)
    books = [
        OdometerRecord(
            size=size, noise_multiplier=SIGMA, budgets=budgets, max_steps=9, full_consumption=True
        )
        for _ in range(2)
    ]
    evidence, mean = np.zeros(size), np.zeros(size)
    opened = opens(y1)
    for t, (ratios, output) in enumerate(((0.4, y1), (flickering(None, y1), y2), (0.9, None))):
        if t == 1:
            books[1].open_round()
        mean = np.where(opened, means(books[1], ratios), means(books[0], ratios))
        if output is not None:
            evidence += mean * output - mean**2 / 2
    weights = np.repeat(weight, count) * np.tile(weight, count)
    one = [float((weights * ~opened) @ last_step(evidence, mean, e)) for e in EPSILONS]
    both = [float(weights @ last_step(evidence, mean, e)) for e in EPSILONS]
    return np.array(one), np.array(both)


def test_an_odometer_holds_for_every_number_of_rounds():
    """Also when the second round is opened depending on the first output."""
    for opens in (lambda y: y > 0.4, lambda y: y < 0.4, lambda y: np.abs(y) > 1):
        one, both = odometer(opens)
        # An event in which one round was open: P(E) ≤ e^ε Q(E) + δ of the first budget.
        assert (one <= gdp_delta(EPSILONS, 0.5) + ERROR).all()
        assert (both <= gdp_delta(EPSILONS, BUDGET) + ERROR).all()
        assert (both > gdp_delta(EPSILONS, 0.5) + 100 * ERROR).any()
    one, both = odometer(lambda y: np.zeros(y.shape, bool))
    np.testing.assert_allclose(one, gdp_delta(EPSILONS, 0.5), atol=ERROR)
    one, both = odometer(lambda y: np.ones(y.shape, bool))
    np.testing.assert_allclose(both, gdp_delta(EPSILONS, BUDGET), atol=ERROR)
