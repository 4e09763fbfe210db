"""The mean batch size of user-level b-min-sep by simulation on the public graph."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy.optimize import brentq
from tqdm import tqdm

from dptrain.sampling.scheme import Indices
from dptrain.sampling.schemes.drawing import successes
from dptrain.sampling.users.exclusion import Exclusion, RecentUsers, default_burn_in
from dptrain.sampling.users.graph import AttributionGraph

# Keeps the coins apart from those of the runs that are drawn with an equal seed.
_DOMAIN = 0x706F7075
_LAYER = 2**0.25  # factor between the probabilities at which a rising curve is looked at
_BLOCKS = 16  # blocks of whole periods whose means give the standard error
_CERTAIN = 37.0  # -log(1-p) at which p is 1 in float64


@dataclasses.dataclass(frozen=True)
class BatchSizeEstimate:
    """Mean batch size over a simulated run.

    Attributes:
        mean: of |B_t|.
        standard_error: of the mean, from the means of blocks of whole periods of b steps.
        steps: steps that were averaged over.
    """

    mean: float
    standard_error: float
    steps: int


class BatchSizeSimulation:
    """Mean batch sizes under one set of coins for all p.

    Example e gets at step t the time of arrival of a process of rate 1 and is sampled with
    probability p exactly if it arrives before -log(1-p). So the samples of a smaller p are
    contained in those of a larger one, and differences between two p's are not drowned in noise.
    Times are drawn layer after layer, only as far as a p needs them, and anew for each p.

    Args:
        graph: with its edges.
        min_sep: b.
        exclusion: who leaves others out.
        steps: steps to average over, at least; rounded up to whole periods in equal blocks.
        burn_in: steps before them.
        seed: of the coins.
        first: the p at which layers begin; those below are one layer.
        bar: counts simulated steps.
    """

    def __init__(
        self,
        graph: AttributionGraph,
        *,
        min_sep: int,
        exclusion: Exclusion,
        steps: int,
        burn_in: int | None,
        seed: int,
        first: float,
        bar: tqdm,
    ) -> None:
        self._graph = graph
        self._min_sep = min_sep
        self._exclusion = exclusion
        self.steps = _BLOCKS * min_sep * -(-steps // (_BLOCKS * min_sep))
        self._burn_in = default_burn_in(min_sep, exclusion) if burn_in is None else burn_in
        self._seed = seed
        self._first = arrival_before(first)
        self._bar = bar

    def _sample(self, step: int, until: float) -> Indices:
        """The examples that arrive at this step before time ``until``, ascending."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(_DOMAIN, step))
        rng = np.random.Generator(np.random.PCG64DXSM(sequence))
        found = []
        begin, end = 0.0, self._first
        while begin < until:
            # An example hits a layer with the chance that it arrives there at all, first or again:
            # arriving again changes nothing.
            chance = -math.expm1(begin - end)
            hits = successes(rng, self._graph.examples, chance)
            times = begin - np.log1p(-chance * rng.random(len(hits)))
            found.append(hits if until >= end else hits[times < until])
            begin, end = end, end * _LAYER
        return found[0] if len(found) == 1 else np.unique(np.concatenate(found))

    def batch_size(self, until: float) -> BatchSizeEstimate:
        """The mean batch size at p = 1 - exp(-``until``)."""
        recent = RecentUsers(self._graph, self._min_sep, self._exclusion)
        total = self._burn_in + self.steps
        sizes = np.empty(total)
        for step in range(total):
            sizes[step] = len(recent.admit(step, self._sample(step, until)))
            self._bar.update()
        means = sizes[self._burn_in :].reshape(_BLOCKS, -1).mean(axis=1)
        error = float(means.std(ddof=1)) / math.sqrt(_BLOCKS)
        return BatchSizeEstimate(float(means.mean()), error, self.steps)

    def smallest(self, batch_size: float, last: float, precision: float) -> float:
        """The first time at which the mean reaches ``batch_size``, looking in steps of a layer.

        It is ``last`` if the mean has not reached B̄ there. ``precision`` is relative, of the time.
        """

        @functools.cache  # the bisection asks again for the ends of its bracket
        def excess(log_time: float) -> float:
            return self.batch_size(math.exp(log_time)).mean - batch_size

        below, at = math.log(self._first), math.log(last)
        before = excess(below)
        if before >= 0:  # by chance: the mean is below N·p, which is B̄ here
            return self._first
        while below < at:
            point = min(below + math.log(_LAYER), at)
            if excess(point) >= 0:
                return math.exp(brentq(excess, below, point, xtol=precision, rtol=1e-12))
            below = point
        return last


def arrival_before(probability: float) -> float:
    """-log(1-p), at most ``_CERTAIN``."""
    return min(_CERTAIN, -math.log1p(-probability)) if probability < 1 else _CERTAIN
