"""The batch size when users share examples, and the p that makes it as large as asked.

Where sampled examples exclude others, the expected size is a formula in p; where only used ones do,
it is simulated on the public graph.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, minimize_scalar
from tqdm import tqdm

from dptrain.core import checks
from dptrain.sampling import fields
from dptrain.sampling.users.batch_simulation import BatchSizeSimulation, arrival_before
from dptrain.sampling.users.exclusion import Exclusion, checked
from dptrain.sampling.users.graph import AttributionGraph
from dptrain.sampling.users.neighbors import expected_batch_size, neighborhood_sizes

# Relative distance of the points that are looked at. Each term varies over a factor of about e in
# p, so between two points the curve exceeds the higher one by 1e-5 of itself at most; peaks are
# sought out besides.
_SPACING = 0.01


class BatchSizeCurve:
    """f(p) = p·Σ_e (1-p)^((b-1)|N(e)|), the mean of |B_t| from step b-1 on.

    An example e is used if it is sampled and none of the |N(e)| examples that share a user with it
    (itself included) was, in b-1 steps of independent coins. The curve rises from 0, falls to 0 at
    p = 1, and may have several peaks where the neighborhoods differ much.

    Args:
        neighbors: |N(e)| ≥ 1 of every example, integers of shape (N,).
        min_sep: b ≥ 2 (for b = 1 it is N·p).
    """

    def __init__(self, neighbors: npt.NDArray[np.integer], min_sep: int) -> None:
        self._sizes, self._counts = np.unique(neighbors, return_counts=True)
        self._min_sep = min_sep

    def __call__(self, probability: float) -> float:
        """f(p) for p in (0, 1]."""
        return expected_batch_size(
            self._sizes, probability=probability, min_sep=self._min_sep, counts=self._counts
        )

    def _points(self) -> list[float]:
        """Ascending p's with every peak among them: f rises before the first, falls after the last.

        A term p(1-p)^m peaks at 1/(m+1).
        """
        first, last = 1.0 / ((self._min_sep - 1) * self._sizes[[-1, 0]] + 1.0)
        count = 2 + math.ceil(math.log(last / first) / _SPACING)
        grid = np.geomspace(first, last, count)
        values = np.array([self(p) for p in grid])
        peaks = []
        for i in range(1, count - 1):
            if values[i] >= max(values[i - 1], values[i + 1]):
                bounds = (grid[i - 1], grid[i + 1])
                best = minimize_scalar(
                    lambda p: -self(p), bounds=bounds, method="bounded", options={"xatol": 1e-15}
                )
                peaks.append(float(best.x))
        return sorted({*grid.tolist(), *peaks})

    def largest(self) -> tuple[float, float]:
        """(p, f(p)) where f is largest."""
        best = max(self._points(), key=self)
        return best, self(best)

    def smallest_probability(self, batch_size: float) -> float | None:
        """The smallest p with f(p) = ``batch_size``, or ``None`` if f stays below."""
        below = 0.0
        for point in self._points():
            if self(point) >= batch_size:
                root = brentq(
                    lambda p: self(p) - batch_size if p > 0 else -batch_size,
                    below,
                    point,
                    xtol=1e-18,
                    rtol=1e-14,
                )
                return float(root)
            below = point
        return None


Method = Literal["exact", "simulation"]

_OWNER = "UserMinSep"
_PRECISE, _LONG = 1e-3, 10_000  # default relative error, and the steps that are worth it
_REMEDY = "lower batch_size or min_sep, or bound the graph: fewer examples a user, or max_neighbors"


def probability_for_batch_size(
    graph: AttributionGraph,
    *,
    batch_size: float,
    min_sep: int,
    exclusion: Exclusion = "sampling",
    method: Method | None = None,
    steps: int = 1,
    relative_error: float | None = None,
    seed: int = 0,
) -> float:
    """The smallest p at which user-level b-min-sep has ``batch_size`` examples a step on average.

    Reads only the public graph. More sampling excludes more, so the mean batch size rises and
    falls with p, and a size that is reached at all is reached at several p.

    ``method="exact"`` solves p·Σ_e (1-p)^((b-1)|N(e)|) = B̄, of which the left is the mean batch
    size under ``"sampling"``. ``method="simulation"`` raises p by a fifth at a time until the mean
    of a simulated run reaches ``batch_size``, then bisects with the same coins. Its statistical
    error is stated by ``relative_error``: the run is lengthened until the standard error of its
    mean at the p that is returned is at most ``relative_error·batch_size``.

    Args:
        graph: with its edges.
        batch_size: B̄ > 0; need not be an integer.
        min_sep: b ≥ 1.
        exclusion: as in ``UserMinSep``.
        method: exact where that is possible if left out.
        steps: fewest steps that a simulation averages over.
        relative_error: of the simulated mean, in (0, 1]; if left out 1e-3, or what a run of 10,000
            steps gives where batches are so small that 1e-3 would take longer.
        seed: of the simulation, which shares no coin with a run of an equal seed.

    Raises:
        ValueError: if an argument is out of range, the graph holds no edges, or exclusion allows no
            such batches; the message gives the largest possible size, rounded down.
    """
    checks.instance("graph", graph, AttributionGraph, owner=_OWNER)
    exclusion = checked(_OWNER, exclusion)
    b = checks.integer("min_sep", min_sep, owner=_OWNER)
    steps = checks.steps(steps, owner=_OWNER)
    seed = checks.integer("seed", seed, minimum=0, owner=_OWNER)
    if relative_error is not None:
        relative_error = checks.probability("relative_error", relative_error, owner=_OWNER)
    method = _method(method, exclusion)
    n_examples = graph.examples
    size = fields.expected_batch_size(
        _OWNER,
        batch_size,
        # Where sampled examples exclude, the curve below knows the largest.
        largest=math.inf if exclusion == "sampling" and b > 1 else n_examples / b,
        why=f"the graph has {n_examples} examples, each used once in {b} steps at most",
    )
    if b == 1:  # nothing is excluded
        return size / n_examples
    last = 1.0
    if exclusion == "sampling":
        curve = BatchSizeCurve(neighborhood_sizes(graph.offsets, graph.members, graph.users), b)
        last, largest = curve.largest()
        if size > largest:
            raise ValueError(
                f"{_OWNER}: batch_size={size:.10g} is not reachable at any probability: with "
                f"min_sep={b} the largest possible batch size is {_rounded_down(largest)} (at p = "
                f"{last:.3g}), as a sampled example excludes all that share a user with it; "
                f"{_REMEDY}"
            )
        if method == "exact":
            root = curve.smallest_probability(size)
            return last if root is None else root
    tolerance = max(_PRECISE, (_LONG * size) ** -0.5) if relative_error is None else relative_error
    # Were batches Poisson numbers, their mean would be as precise as asked after so many steps.
    steps = max(steps, math.ceil(1.0 / (tolerance**2 * size)))
    with tqdm(
        desc="simulating batch sizes", unit="step", delay=2, mininterval=1, leave=False
    ) as bar:
        while True:
            simulation = BatchSizeSimulation(
                graph,
                min_sep=b,
                exclusion=exclusion,
                steps=steps,
                burn_in=None,
                seed=seed,
                first=size / n_examples,
                bar=bar,
            )
            time = simulation.smallest(size, arrival_before(last), tolerance / 10)
            if simulation.batch_size(time).standard_error <= tolerance * size:
                return -math.expm1(-time)
            steps = 2 * simulation.steps


def _method(method: Any, exclusion: Exclusion) -> Method:
    if method is None:
        return "exact" if exclusion == "sampling" else "simulation"
    checks.choice("method", method, ("exact", "simulation"), owner=_OWNER)
    if method == "exact" and exclusion == "participation":
        raise ValueError(
            f"{_OWNER}: method='exact' is not available for exclusion='participation'; use "
            "method='simulation'"
        )
    found: Method = method
    return found


def _rounded_down(value: float) -> str:
    """Four significant digits, never more than the value."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    rounded = math.floor(value / unit) * unit
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:.4g}"
