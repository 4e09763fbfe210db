"""What an attacker attains against user-level sampling, by summation over every coin.

Nothing here imports the library. A graph is one tuple of users for each example; a run is tiny.

The attacker of user u fixes the gradients of everybody else along directions of their own, in the
limit where the released sums reveal who else was in which batch, and lets all of u's examples
share one direction with norm 1. Given the revealed pattern the release is C x + σ z against σ z,
x_t being the number of u's examples in batch t, so that δ is the mean over revealed patterns of
the δ of a finite mixture of Gaussians. Under fixed-graph zero-out the sampler runs identically on
both data sets, hence the revealed pattern has one law.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr
from scipy.stats import binom, norm

Array = npt.NDArray[np.float64]
Graph = Sequence[tuple[int, ...]]
Batches = tuple[frozenset[int], ...]
Counts = tuple[int, ...]
Mixture = dict[Counts, float]

REACH = 9.0  # integrals stop this many σ beyond the outermost mean (tail below 1e-18)


def neighbors(graph: Graph) -> list[frozenset[int]]:
    """N(e): every example sharing a user with e, itself included."""
    owners = [set(users) for users in graph]
    return [
        frozenset(j for j, other in enumerate(owners) if j == i or mine & other)
        for i, mine in enumerate(owners)
    ]


def batch_law(
    graph: Graph, *, p: float, b: int, steps: int, sampled: bool = True, burn_in: int = 0
) -> dict[Batches, float]:
    """Law of B_1..B_n under Algorithm 3 (``sampled``) or 4, after unseen burn-in steps."""
    near = neighbors(graph)
    m = len(graph)
    draws = [
        (frozenset(i for i in range(m) if coins >> i & 1), p**hits * (1 - p) ** (m - hits))
        for coins in range(2**m)
        for hits in [coins.bit_count()]
    ]
    draws = [(s, q) for s, q in draws if q > 0]
    states: dict[tuple[Batches, Batches], float] = {((), ()): 1.0}
    for step in range(burn_in + steps):
        after: dict[tuple[Batches, Batches], float] = defaultdict(float)
        for (recent, history), weight in states.items():
            barred = frozenset().union(*(near[e] for past in recent for e in past))
            for s, q in draws:
                batch = s - barred
                kept = (*recent, s if sampled else batch)[-(b - 1) :] if b > 1 else ()
                seen = (*history, batch) if step >= burn_in else ()
                after[kept, seen] += weight * q
        states = after
    law: dict[Batches, float] = defaultdict(float)
    for (_, history), weight in states.items():
        law[history] += weight
    assert math.isclose(math.fsum(law.values()), 1.0, rel_tol=1e-12)
    return dict(law)


def revealed_mixtures(
    graph: Graph, law: dict[Batches, float], user: int
) -> list[tuple[float, Mixture]]:
    """(probability, law of x given it) for each pattern of everybody else's batches."""
    mine = {e for e, users in enumerate(graph) if user in users}
    groups: dict[Batches, dict[Counts, float]] = defaultdict(lambda: defaultdict(float))
    for batches, q in law.items():
        shown = tuple(batch - mine for batch in batches)
        groups[shown][tuple(len(batch & mine) for batch in batches)] += q
    merged: dict[tuple[tuple[Counts, float], ...], float] = defaultdict(float)
    for counts in groups.values():
        total = math.fsum(counts.values())
        given = ((x, round(q / total, 13)) for x, q in counts.items())
        merged[tuple(sorted((x, q) for x, q in given if q > 0))] += total
    return [(total, dict(given)) for given, total in merged.items()]


def star_mixtures(leaves: int, p: float) -> list[tuple[float, Mixture]]:
    """``revealed_mixtures`` of user 0 at n = b = 2, sampling-based, for an example of that user
    which shares one more user with each of ``leaves`` examples; for any number of these.

    A leaf in B_2 shows that the user's example was not in S_1, which excludes all leaves.
    """
    mixtures = []
    for first in range(leaves + 1):
        chance = binom.pmf(first, leaves, p)
        free = p if first == 0 else 0.0  # at step 2, for the example if it was not in S_1
        none = (1 - p) ** (leaves - first)  # no leaf in B_2, given that
        absent = {(0, 0): 1 - free, (0, 1): free} if free else {(0, 0): 1.0}
        mixtures.append((chance * (1 - p) * (1 - none), absent))
        total = p + (1 - p) * none
        hidden = {x: q * (1 - p) * none / total for x, q in absent.items()}
        mixtures.append((chance * total, {**hidden, (1, 0): p / total}))
    return mixtures


def disjoint_claim(k: int, *, p: float, b: int, steps: int) -> Mixture:
    """The law of x in Theorem 6.1, which holds for disjoint graphs and fails for shared examples:
    a Bin(k, p) draw a step, none within b-1 steps of a non-zero x."""
    law: dict[Counts, float] = {(): 1.0}
    for _ in range(steps):
        after: dict[Counts, float] = defaultdict(float)
        for x, q in law.items():
            if b > 1 and any(x[-(b - 1) :]):
                after[*x, 0] += q
            else:
                for j in range(k + 1):
                    after[*x, j] += q * math.comb(k, j) * p**j * (1 - p) ** (k - j)
        law = {x: q for x, q in after.items() if q > 0}
    return law


def any_blocking_delta(
    k: int, *, p: float, b: int, matrix: Array, sigma: float, epsilon: float
) -> float:
    """max E[δ_Gauss(ε; ‖C x‖/σ)] over controllers who see all draws so far and allow a ≤ k of the
    examples to be drawn, none within b-1 steps of a participation; bands ≤ b is not assumed."""
    n = len(matrix)

    def value(x: Counts) -> float:
        if len(x) >= n:
            return gaussian_delta(epsilon, float(np.linalg.norm(matrix @ x[:n])) / sigma)
        rests = [value((*x, 0))] + [value((*x, j, *[0] * (b - 1))) for j in range(1, k + 1)]
        return max(
            math.fsum(math.comb(a, j) * p**j * (1 - p) ** (a - j) * rests[j] for j in range(a + 1))
            for a in range(k + 1)
        )

    return value(())


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Φ(-ε/μ + μ/2) - e^ε Φ(-ε/μ - μ/2)."""
    if mu == 0:
        return 0.0
    tail = math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))
    return max(0.0, float(norm.cdf(-epsilon / mu + mu / 2) - tail))


def mixture_delta(
    mixture: Mixture,
    matrix: Array,
    sigma: float,
    epsilon: float,
    *,
    remove: bool,
    fine: int | None = None,
) -> float:
    """δ(ε) of Σ_x q_x N(Cx, σ²I) against N(0, σ²I), or the reverse, for C x ≥ 0.

    Along the last coordinate in use the ratio increases, so the integral there is a difference of
    normal tails beyond the crossing: exact where all means are multiples of one vector. The other
    coordinates take the trapezoidal rule in steps of σ/fine. The integrand is smooth, but steep
    where the crossing runs off to -∞: relative errors reach 1e-6 in the plane (fine = 64) and 1e-3
    in space (fine = 12).
    """
    weights = np.array(list(mixture.values()))
    means = np.array(list(mixture), dtype=np.float64) @ matrix.T / sigma
    assert (means >= 0).all()
    means = means[:, means.any(axis=0)]
    if means.shape[1] == 0:
        return 0.0
    if np.linalg.matrix_rank(means) == 1:
        means = np.linalg.norm(means, axis=1)[:, None]
    if fine is None:
        fine = 64 if means.shape[1] <= 2 else 12
    grids = [
        np.arange(-REACH * fine, (top + REACH) * fine + 1) / fine
        for top in means[:, :-1].max(axis=0, initial=0.0)[: means.shape[1] - 1]
    ]
    size = math.prod(len(grid) for grid in grids)
    points = np.array(list(itertools.product(*grids))).reshape(size, len(grids))
    cell = float(fine) ** -len(grids)
    level = epsilon if remove else -epsilon
    last = means[:, -1]
    total = 0.0
    for y in np.array_split(points, 1 + len(points) * len(weights) // 400_000):
        head = y @ means[:, :-1].T - (means**2).sum(axis=1) / 2 + np.log(weights)
        low = np.full(len(y), -REACH - 30.0)
        high = np.full(len(y), last.max() + REACH + 30.0)
        for _ in range(48):
            middle = (low + high) / 2
            exponents = head + middle[:, None] * last
            peak = exponents.max(axis=1)
            value = peak + np.log(np.exp(exponents - peak[:, None]).sum(axis=1))
            low, high = np.where(value < level, middle, low), np.where(value < level, high, middle)
        at = (low + high) / 2
        side = -1.0 if remove else 1.0  # tail above the crossing, or below it
        density = np.exp(-((y[:, None, :] - means[:, :-1]) ** 2).sum(axis=-1) / 2)
        p_mass = (weights * density * ndtr(side * (at[:, None] - last))).sum(axis=1)
        q_mass = np.exp(-(y**2).sum(axis=-1) / 2) * ndtr(side * at)
        first, second = (p_mass, q_mass) if remove else (q_mass, p_mass)
        total += float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())
    return total * cell / (2 * math.pi) ** (len(grids) / 2)


def attained(
    mixtures: list[tuple[float, Mixture]], matrix: Array, sigma: float, epsilon: float
) -> tuple[float, float]:
    """δ(ε) for (P, Q) and for (Q, P), averaged over what is revealed."""
    sums = (0.0, 0.0)
    for q, mixture in mixtures:
        if len(mixture) == 1:
            (x,) = mixture
            value = gaussian_delta(epsilon, float(np.linalg.norm(matrix @ x)) / sigma)
            both = (value, value)
        else:
            both = (
                mixture_delta(mixture, matrix, sigma, epsilon, remove=True),
                mixture_delta(mixture, matrix, sigma, epsilon, remove=False),
            )
        sums = (sums[0] + q * both[0], sums[1] + q * both[1])
    return sums


def worst_user(
    graph: Graph,
    matrix: Array,
    sigma: float,
    epsilon: float,
    *,
    p: float,
    b: int,
    sampled: bool = True,
    burn_in: int = 0,
) -> float:
    """The largest δ(ε) over users and directions that the attacker attains."""
    law = batch_law(graph, p=p, b=b, steps=len(matrix), sampled=sampled, burn_in=burn_in)
    users = sorted({u for own in graph for u in own})
    return max(
        max(attained(revealed_mixtures(graph, law, u), matrix, sigma, epsilon)) for u in users
    )


def own_chain(k: int, *, p: float, b: int, steps: int, burn_in: int = 0) -> Mixture:
    """Law of x for a user of k examples and no neighbors: a Bin(k, p) draw a step, void if one of
    the b-1 draws before it was not empty."""
    binomial = [math.comb(k, j) * p**j * (1 - p) ** (k - j) for j in range(k + 1)]
    law: dict[Counts, float] = defaultdict(float)
    for draws in itertools.product(range(k + 1), repeat=burn_in + steps):
        weight = math.prod(binomial[j] for j in draws)
        if weight > 0:
            x = tuple(0 if any(draws[max(0, t - b + 1) : t]) else j for t, j in enumerate(draws))
            law[x[burn_in:]] += weight
    return dict(law)


def own_chain_delta(mixture: Mixture, matrix: Array, sigma: float, epsilon: float) -> float:
    """E_x[δ_Gauss(ε; ‖Cx‖/σ)]: what is lost when x itself is revealed."""
    return math.fsum(
        q * gaussian_delta(epsilon, float(np.linalg.norm(matrix @ x)) / sigma)
        for x, q in mixture.items()
    )


def cyclic_mixtures(
    *, rate: float, cycle: int, steps: int, hidden_part: bool
) -> list[list[tuple[float, Mixture]]]:
    """Cyclic Poisson: the attack on an example of each known part, or of a part picked unseen."""
    parts = []
    for part in range(cycle):
        law: dict[Counts, float] = {}
        for x in itertools.product((0, 1), repeat=steps):
            if all(not hit or t % cycle == part for t, hit in enumerate(x)):
                turns = [hit for t, hit in enumerate(x) if t % cycle == part]
                law[x] = math.prod(rate if hit else 1 - rate for hit in turns)
        parts.append({x: q for x, q in law.items() if q > 0})
    if not hidden_part:
        return [[(1.0, law)] for law in parts]
    together: dict[Counts, float] = defaultdict(float)
    for law in parts:
        for x, q in law.items():
            together[x] += q / cycle
    return [[(1.0, dict(together))]]


def sensitivity(matrix: Array, *, min_sep: int, most: int, per_batch: int = 1) -> float:
    """max ‖Σ_t s_t x_t C_{:,t}‖ over patterns (gaps ≥ min_sep, at most ``most`` of them), signs s_t
    and x_t ≤ per_batch, by trying all. Signs matter where C has entries of both signs: gradients
    may turn around from one step to the next."""
    best = 0.0
    for x in itertools.product((0, 1, -1), repeat=len(matrix)):
        hits = [t for t, hit in enumerate(x) if hit]
        if len(hits) <= most and all(j - i >= min_sep for i, j in itertools.pairwise(hits)):
            best = max(best, float(np.linalg.norm(matrix @ np.array(x))))
    return per_batch * best
