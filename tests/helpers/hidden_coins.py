"""Brute force: Rényi divergences of a filtered run, every hidden coin and all outputs summed up."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

from dptrain.accounting.renyi.sampled_step import step_divergence
from dptrain.contrib.individual.norm_grid import NormGrid
from dptrain.individual import RenyiRecord

GRID = NormGrid()
NOBODY = np.empty(0, dtype=np.int64)


@functools.cache
def costs_of(order, probability, sigma):
    return step_divergence(GRID.values, order=order, probability=probability, sigma=sigma)


def record_of(
    full_steps, *, size=1, order=2.0, q=0.5, sigma=1.0, personal=None, kind=RenyiRecord, scale=1.0
):
    """A record whose budget is so many charges of the full norm."""
    costs = costs_of(order, q, sigma)
    return kind(
        size=size,
        grid=GRID,
        costs=scale * costs,
        order=order,
        budget=full_steps * costs[-1],
        max_steps=100,
        personal_clipping=personal,
    )


def cost(ratio, *, order=2.0, q=0.5, sigma=1.0):
    return costs_of(order, q, sigma)[GRID.bucket(ratio)]


@dataclasses.dataclass(frozen=True)
class HiddenRun:
    """One example in a few Poisson-sampled steps with one-dimensional outputs.

    Attributes:
        probability: q.
        sigma: σ, in units of R.
        steps: n.
        ratios: the example's norm ratios, one for each equally likely augmentation, as a function
            of which bins the outputs so far fell into: the adaptivity.
        edges: inner edges of these bins, in units of σ.
        nodes: Gauss-Legendre nodes per bin.
    """

    probability: float
    sigma: float
    steps: int
    ratios: Callable[[tuple[int, ...]], tuple[float, ...]]
    edges: tuple[float, ...] = (0.5,)
    nodes: int = 24

    def moments(self, record, order):
        """E_Q[(P/Q)^α] and E_P[(Q/P)^α], P with the example and Q without, and P's total mass.

        Args:
            record: fresh, of one example; it is driven through every path.
            order: α.
        """
        bins = self._bins(order)
        totals = np.zeros(3)
        for last in itertools.product(range(len(bins)), repeat=self.steps):
            mass = sum(self._paths(record, (), last, bins))
            weights = np.ones(())
            for k in last:
                weights = np.multiply.outer(weights, bins[k][1])
            for i, power in enumerate((order, 1.0 - order, 1.0)):
                totals[i] += float((weights * mass**power).sum())
        return totals

    def hockey_sticks(self, record, epsilon):
        """δ(ε) of P against Q and of Q against P; the kink costs some 1e-3 of them."""
        bins = self._bins(1.0)
        totals = np.zeros(2)
        for last in itertools.product(range(len(bins)), repeat=self.steps):
            mass = sum(self._paths(record, (), last, bins))
            weights = np.ones(())
            for k in last:
                weights = np.multiply.outer(weights, bins[k][1])
            excess = (mass - np.exp(epsilon), 1.0 - np.exp(epsilon) * mass)
            totals += [float((weights * np.maximum(each, 0.0)).sum()) for each in excess]
        return totals

    def _bins(self, order):
        """Nodes (in units of R) and their Q-weights, per bin."""
        reach = 9.0 * self.sigma
        ends = [-reach, *(self.sigma * e for e in self.edges), reach + order]
        at, weight = np.polynomial.legendre.leggauss(self.nodes)
        bins = []
        for low, high in itertools.pairwise(ends):
            y = 0.5 * (high - low) * at + 0.5 * (high + low)
            density = np.exp(-0.5 * (y / self.sigma) ** 2) / (self.sigma * np.sqrt(2 * np.pi))
            bins.append((y, 0.5 * (high - low) * weight * density))
        return bins

    def _paths(self, record, history, last, bins):
        """The likelihood ratios of all continuations of a path, each over the nodes of its bins."""
        step = len(history)
        if step == self.steps:
            yield np.ones(())
            return
        y = bins[last[step]][0]
        drawn = self.ratios(history)
        coins = [(1.0 - self.probability, None)]
        coins += [(self.probability / len(drawn), ratio) for ratio in drawn]
        for probability, ratio in coins:
            if probability == 0:
                continue
            after = copy.deepcopy(record)
            indices = NOBODY if ratio is None else np.array([0])
            ratios = np.full(len(indices), ratio, dtype=float)
            shares = after.admit(step=step, part=0, indices=indices, ratios=ratios)
            after.commit(step, 1)
            norm = float((shares * ratios).sum())
            likelihood = probability * np.exp((y - 0.5 * norm) * norm / self.sigma**2)
            for rest in self._paths(after, (*history, last[step]), last, bins):
                yield np.multiply.outer(likelihood, rest)
