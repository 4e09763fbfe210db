"""Small random mechanisms of every scheme, each with the pair of laws that it really releases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from dptrain import (
    BSR,
    AttributionGraph,
    BallsInBins,
    BandMF,
    CyclicPoisson,
    Dense,
    GraphPartition,
    Identity,
    MatrixMechanism,
    MinSep,
    Poisson,
    RandomAllocation,
    SquareRoot,
    Tree,
    UserCyclic,
    UserMinSep,
)
from dptrain.core.guarantee import Adjacency
from dptrain.sampling import Scheme
from dptrain.sampling.schemes.any_size import AnySizeScheme
from dptrain.sampling.users.exclusion import Exclusion
from dptrain.strategies import Strategy
from tests.oracles import batch_sequences as runs
from tests.oracles import enumeration, true_delta, user_level
from tests.oracles.enumeration import Law
from tests.oracles.small_graphs import step_law
from tests.oracles.true_delta import TruePair

Array = npt.NDArray[np.float64]
# Where nothing depends on the number of examples.
SIZE = 10


@dataclasses.dataclass(frozen=True)
class Subject:
    """A mechanism, the neighboring relation, and what an attacker of it sees."""

    family: str
    mechanism: MatrixMechanism
    pair: Callable[[], TruePair]
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __str__(self) -> str:
        scheme, strategy = self.mechanism.scheme, self.mechanism.strategy
        dense = isinstance(strategy, Dense)
        shown = f"Dense(bands={strategy.bands})" if dense else repr(strategy)
        sigma = self.mechanism.noise_multiplier
        return f"{self.family}, {self.adjacency.value}: {scheme!r}, {shown}, sigma={sigma!r}"


def matrix_of(strategy: Strategy, steps: int) -> Array:
    """C; trees have more rows than steps."""
    return np.asarray(strategy.columns(steps, np.arange(steps)))


def random_strategy(
    rng: np.random.Generator, steps: int, most_bands: int | None = None
) -> Strategy:
    """Any with at most ``most_bands`` bands; dense ones are random, some with zero entries."""
    limit = steps if most_bands is None else min(most_bands, steps)
    kinds = ["identity", "bsr", "band_mf", "dense"]
    if limit == steps:
        kinds += ["square_root", "tree"]
    kind = rng.choice(kinds)
    bands = int(rng.integers(1, limit + 1))
    if kind == "bsr":
        return BSR(bands=bands).bind(steps)
    if kind == "band_mf":
        return BandMF(bands=bands).bind(steps)
    if kind == "square_root":
        return SquareRoot().bind(steps)
    if kind == "tree":
        return Tree().bind(steps)
    if kind == "dense":
        entries = rng.random((steps, steps)) * (rng.random((steps, steps)) < 0.8)
        lower = np.tril(entries) - np.tril(entries, -bands)
        np.fill_diagonal(lower, rng.uniform(0.3, 1.2, steps))
        return Dense(matrix=lower).bind(steps)
    return Identity().bind(steps)


def _sigma(rng: np.random.Generator) -> float:
    return float(np.round(np.exp(rng.uniform(np.log(0.4), np.log(2.5))), 3))


def _probability(rng: np.random.Generator) -> float:
    return 1.0 if rng.random() < 0.08 else float(np.round(rng.beta(0.7, 1.5) * 0.98 + 0.01, 3))


def _of_law(
    family: str, scheme: Scheme, strategy: Strategy, sigma: float, law: Callable[[], Law]
) -> Subject:
    def pair() -> TruePair:
        return true_delta.of_patterns(law(), matrix_of(strategy, scheme.steps), sigma)

    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return Subject(family, mechanism, pair)


def poisson(rng: np.random.Generator) -> Subject:
    """Poisson sampling with any strategy."""
    n, p = int(rng.integers(1, 7)), _probability(rng)
    scheme = Poisson(probability=p, dataset_size=SIZE, steps=n)
    return _of_law(
        "Poisson", scheme, random_strategy(rng, n), _sigma(rng), lambda: enumeration.poisson(n, p)
    )


def cyclic(rng: np.random.Generator) -> Subject:
    """Cyclic Poisson sampling without truncation."""
    n, p, b = int(rng.integers(1, 7)), _probability(rng), int(rng.integers(1, 4))
    scheme = CyclicPoisson(
        probability=p, cycle=b, dataset_size=3 * SIZE, steps=n,
        assignment=str(rng.choice(["equal", "independent"])),
    )  # fmt: skip

    def law() -> Law:
        total: dict[tuple[int, ...], float] = {}
        for part in range(b):
            for x in itertools.product((0, 1), repeat=n):
                turns = [hit for t, hit in enumerate(x) if t % b == part]
                if sum(turns) == sum(x):
                    q = p ** sum(turns) * (1 - p) ** (len(turns) - sum(turns)) / b
                    total[x] = total.get(x, 0.0) + q
        return _law_of(total)

    most = b if rng.random() < 0.7 else None
    return _of_law("cyclic", scheme, random_strategy(rng, n, most), _sigma(rng), law)


def _law_of(probability_of: dict[tuple[int, ...], float]) -> Law:
    possible = {x: q for x, q in probability_of.items() if q > 0}
    return Law(np.array(list(possible), dtype=np.float64), np.array(list(possible.values())))


def balls_in_bins(rng: np.random.Generator) -> Subject:
    """Balls-in-bins sampling with any strategy."""
    bins, epochs = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (5, 1), (6, 1), (2, 3)][
        int(rng.integers(8))
    ]
    scheme = BallsInBins(bins=bins, epochs=epochs, dataset_size=SIZE)
    strategy = random_strategy(rng, bins * epochs)
    return _of_law(
        "balls-in-bins", scheme, strategy, _sigma(rng),
        lambda: enumeration.balls_in_bins(bins, epochs),
    )  # fmt: skip


def random_allocation(rng: np.random.Generator) -> Subject:
    """Random allocation with any strategy and number of participations."""
    t, epochs = [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (5, 1), (6, 1), (2, 3)][
        int(rng.integers(8))
    ]
    k = 1 if rng.random() < 0.8 else int(rng.integers(1, t + 1))
    scheme = RandomAllocation(steps_per_epoch=t, participations=k, epochs=epochs, dataset_size=SIZE)

    def law() -> Law:
        one = [
            tuple(int(s in pick) for s in range(t)) for pick in itertools.combinations(range(t), k)
        ]
        every = [sum(x, ()) for x in itertools.product(one, repeat=epochs)]
        return _law_of(dict.fromkeys(every, 1 / len(every)))

    strategy = Identity() if rng.random() < 0.6 else random_strategy(rng, t * epochs)
    return _of_law("random allocation", scheme, strategy.bind(t * epochs), _sigma(rng), law)


def min_sep(rng: np.random.Generator) -> Subject:
    """b-min-sep sampling, warm or cold, with any strategy."""
    n, p, b = int(rng.integers(1, 7)), _probability(rng), int(rng.integers(1, 5))
    warm = bool(rng.random() < 0.5)
    scheme = MinSep(probability=p, min_sep=b, dataset_size=SIZE, steps=n, warm_start=warm)
    law = enumeration.min_sep_warm if warm else enumeration.min_sep_cold
    most = b if rng.random() < 0.75 else None
    return _of_law(
        "b-min-sep", scheme, random_strategy(rng, n, most), _sigma(rng), lambda: law(n, p, b)
    )


def _of_runs(
    family: str,
    rng: np.random.Generator,
    scheme: Scheme,
    strategy: Strategy,
    adjacency: Adjacency,
    law: Callable[[int], runs.RunLaw],
    size: int,
) -> Subject:
    """Everybody else has random gradients, most of them on the line of the example's own."""
    sigma = _sigma(rng)
    planar = scheme.steps == 1 and rng.random() < 0.4
    others = size - 1
    if adjacency is Adjacency.ADD_REMOVE and rng.random() < 0.5:
        others = size  # the run is on N examples, the neighbor has one more
    if planar:
        vectors = rng.standard_normal((others, 2))
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1), 1e-9)[:, None]
        own = np.array([1.0, 0.0])
    else:
        vectors = rng.choice([-1.0, 1.0, -1.0, 0.4], size=(others, 1))
        own = np.array([1.0])
    replaced = -own if adjacency is Adjacency.REPLACE_ONE else 0 * own

    if adjacency is Adjacency.ADD_REMOVE:
        assert isinstance(scheme, AnySizeScheme)
        # As many as the most that the oracle can enumerate, less the one that may be added.
        scheme = dataclasses.replace(scheme, nominal_size=size)

    def pair() -> TruePair:
        with_own = law(others + 1)
        mine = np.vstack([own, vectors])
        if adjacency is Adjacency.ADD_REMOVE:
            worlds, gradients = (with_own, law(others)), (mine, vectors)
        else:
            worlds, gradients = (with_own, with_own), (mine, np.vstack([replaced, vectors]))
        matrix = matrix_of(strategy, scheme.steps)
        return true_delta.of_runs(worlds, gradients, matrix, sigma)

    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return Subject(family, mechanism, pair, adjacency)


def _adjacency(rng: np.random.Generator) -> Adjacency:
    return list(Adjacency)[int(rng.integers(len(Adjacency)))]


def truncated_poisson(rng: np.random.Generator) -> Subject:
    """Truncated Poisson sampling of a few examples, under any adjacency."""
    n, size, p = int(rng.integers(1, 4)), int(rng.integers(2, 5)), _probability(rng)
    largest = int(rng.integers(1, size + 1))
    scheme = Poisson(probability=p, dataset_size=size, steps=n, max_batch_size=largest)
    strategy = Identity() if rng.random() < 0.8 else random_strategy(rng, n)
    return _of_runs(
        "truncated Poisson", rng, scheme, strategy.bind(n), _adjacency(rng),
        lambda m: runs.poisson(m, n, p, largest), size,
    )  # fmt: skip


def plain_poisson(rng: np.random.Generator) -> Subject:
    """Poisson sampling of a few examples, under any adjacency."""
    n, size, p = int(rng.integers(1, 4)), int(rng.integers(1, 4)), _probability(rng)
    scheme = Poisson(probability=p, dataset_size=size, steps=n)
    return _of_runs(
        "Poisson runs", rng, scheme, Identity().bind(n), _adjacency(rng),
        lambda m: runs.poisson(m, n, p), size,
    )  # fmt: skip


def truncated_cyclic(rng: np.random.Generator) -> Subject:
    """Cyclic Poisson sampling of a few examples, truncated or not, under any adjacency."""
    n, b, p = int(rng.integers(1, 5)), int(rng.integers(1, 4)), _probability(rng)
    size, equal, adjacency = (
        int(rng.integers(max(2, b), 5)),
        bool(rng.random() < 0.5),
        _adjacency(rng),
    )
    if adjacency is Adjacency.ADD_REMOVE:
        equal = False
    if n == 4:
        size = max(b, 2)
    largest = None if rng.random() < 0.2 else int(rng.integers(1, size))
    scheme = CyclicPoisson(
        probability=p, cycle=b, dataset_size=size, steps=n, max_batch_size=largest,
        assignment="equal" if equal else "independent",
    )  # fmt: skip
    return _of_runs(
        "truncated cyclic", rng, scheme, random_strategy(rng, n, b), adjacency,
        lambda m: runs.cyclic(m, n, p, b, equal=equal, largest=largest), size,
    )  # fmt: skip


def truncated_min_sep(rng: np.random.Generator) -> Subject:
    """Truncated b-min-sep sampling of a few examples."""
    n, b, p = int(rng.integers(1, 4)), int(rng.integers(1, 4)), _probability(rng)
    size, warm = int(rng.integers(2, 4)), bool(rng.random() < 0.5)
    largest = int(rng.integers(1, size + 1))
    scheme = MinSep(
        probability=p, min_sep=b, dataset_size=size, steps=n, max_batch_size=largest,
        warm_start=warm,
    )  # fmt: skip
    return _of_runs(
        "truncated b-min-sep", rng, scheme, random_strategy(rng, n, b), Adjacency.ZERO_OUT,
        lambda m: true_delta.truncated_min_sep(m, n, p, b, largest, warm=warm), size,
    )  # fmt: skip


GRAPHS: dict[str, list[tuple[int, ...]]] = {
    "one user": [(0,), (0,)],
    "disjoint": [(0,), (0,), (1,)],
    "star": [(0, 1, 2), (1,), (2,)],
    "chain": [(0,), (0, 1), (1,)],
    "clique": [(0, 1), (1, 2), (0, 2)],
    "shared neighbor": [(0,), (0,), (0, 1), (1,)],
    "neighbors of neighbors": [(0,), (0, 1), (1, 2), (2,)],
    "pair": [(0, 1), (0, 1)],
}


def user_min_sep(rng: np.random.Generator) -> Subject:
    """User-level b-min-sep sampling on a small graph; others' batches are seen by the attacker."""
    name = str(rng.choice(list(GRAPHS)))
    graph = GRAPHS[name]
    n, b, p = int(rng.integers(1, 4)), int(rng.integers(1, 4)), _probability(rng)
    exclusion: Exclusion = "sampling" if rng.random() < 0.7 else "participation"
    burn_in = int(rng.integers(0, 2))
    if len(graph) == 4:
        n, burn_in = min(n, 2), 0
    scheme = UserMinSep(
        graph=AttributionGraph.from_lists([list(users) for users in graph]),
        probability=p, min_sep=b, steps=n, batch_size=0.5, exclusion=exclusion, burn_in=burn_in,
    )  # fmt: skip
    most = b if rng.random() < 0.75 else None
    strategy, sigma = random_strategy(rng, n, most), _sigma(rng)
    user = int(rng.integers(1 + max(u for users in graph for u in users)))

    def pair() -> TruePair:
        law = user_level.batch_law(
            graph, p=p, b=b, steps=n, sampled=exclusion == "sampling", burn_in=burn_in
        )
        mixtures = user_level.revealed_mixtures(graph, law, user)
        return true_delta.of_mixtures(mixtures, matrix_of(strategy, n), sigma)

    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return Subject(f"user b-min-sep, {name}, user {user}", mechanism, pair)


def user_cyclic(rng: np.random.Generator) -> Subject:
    """Random slots for the examples of a small graph; others' batches are seen by the attacker."""
    name = str(rng.choice(list(GRAPHS)))
    graph = GRAPHS[name]
    n, cycle = int(rng.integers(1, 4)), int(rng.integers(1, min(3, len(graph)) + 1))
    slots = rng.permutation([*range(cycle), *rng.integers(cycle, size=len(graph) - cycle)])
    largest = None if rng.random() < 0.6 else int(rng.integers(1, 3))
    partition = GraphPartition.from_slots(
        AttributionGraph.from_lists([list(users) for users in graph]), slots, cycle=cycle
    )
    size = _probability(rng) * min(partition.sizes)
    scheme = UserCyclic(partition=partition, batch_size=size, steps=n, max_batch_size=largest)
    most = partition.separation if rng.random() < 0.75 else None
    strategy, sigma = random_strategy(rng, n, most), _sigma(rng)
    user = int(rng.integers(1 + max(u for users in graph for u in users)))

    def pair() -> TruePair:
        law: dict[tuple[frozenset[int], ...], float] = {(): 1.0}
        for t in range(n):
            members = tuple(np.flatnonzero(slots == t % cycle).tolist())
            step = step_law(members, size / len(members), largest)
            law = {(*b, s): p * q for b, p in law.items() for s, q in step.items() if q > 0}
        mixtures = user_level.revealed_mixtures(graph, law, user)
        return true_delta.of_mixtures(mixtures, matrix_of(strategy, n), sigma)

    mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)
    return Subject(f"user cyclic, {name}, user {user}", mechanism, pair)


FAMILIES: dict[str, tuple[Callable[[np.random.Generator], Subject], int]] = {
    "poisson": (poisson, 20),
    "plain_poisson": (plain_poisson, 10),
    "cyclic": (cyclic, 16),
    "balls_in_bins": (balls_in_bins, 24),
    "random_allocation": (random_allocation, 16),
    "min_sep": (min_sep, 32),
    "truncated_poisson": (truncated_poisson, 30),
    "truncated_cyclic": (truncated_cyclic, 20),
    "truncated_min_sep": (truncated_min_sep, 16),
    "user_min_sep": (user_min_sep, 24),
    "user_cyclic": (user_cyclic, 32),
}


def subjects(family: str, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Subject]]:
    """The numbered mechanisms of a family, each from a seed of its own."""
    make, count = FAMILIES[family]
    for index in range(first, count if last is None else last):
        yield index, make(np.random.default_rng([20_261_120, list(FAMILIES).index(family), index]))
