"""Noise for tree strategies: the online estimator over a binary counter of pending estimates."""

from __future__ import annotations

import math
from typing import Any

import torch

from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.grid import error_of_sums
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.registry import register_noise_stream
from dptrain.strategies import Strategy
from dptrain.strategies.trees import BinaryTrees, node_variance, top_level


@register_noise_stream(BinaryTrees)
class TreeStream(FlatStream):
    """Row t of W Z with the online estimator W of a tree, in law: one normal a row.

    W is that of docs/theory/strategies.md#thm-tree-estimator.

    Step t completes the nodes of levels 0, …, k that end there. A block of the D flattened
    parameters has one buffer of shape (h - 1, entries), (h - 1)·D numbers in all for trees of
    height h. Its row l holds the estimate of the maximal node of level l in the prefix, if there is
    one (a root's is needed no more). With these pending estimates p and the normals z_l of the new
    nodes the largest one's estimate is

        e_0 = z_0,    e_l = (1 - v_l) (p_{l-1} + e_{l-1}) + v_l z_l.

    The z_l take part in nothing else, so one normal stands for them all:
    e_k = Σ_{l<k} a_l p_l + s z with a_l = Π_{m=l+1}^k (1 - v_m) and s² the variance of what they
    contribute. The noise, by which the estimate of the prefix sum grows, is
    e_k - (p_0 + … + p_{k-1}): what is new less what it takes over
    (docs/theory/noise.md#thm-tree-stream). What a step adds as e_k a later one takes away again as
    p_k, the same stored number, so that roundings do not add up
    (``test_ten_thousand_steps_do_not_drift``). A step takes O(k) operations on rows, O(1) on
    average.

    With bfloat16 buffers the error in the noise of a node grows with its level, and may reach half
    of its standard deviation at 2^14 leaves (docs/theory/noise.md#thm-bfloat16); ``notes`` says so.
    """

    _exact = torch.int32

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        bound = strategy.bind(options["steps"])
        assert isinstance(bound, BinaryTrees)
        self._height = bound.levels(options["steps"])
        super().__init__(bound, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(self._height - 1, len(row), dtype=self._kept)]

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on bfloat16 buffers; empty for exact ones, or where nothing is kept."""
        if self._dtype is torch.float32 or not self._keeps:
            return ()
        deviation = 2.0 ** ((self._height - 1) / 2 - 8)
        return (
            "the noise buffers are bfloat16: the noise of a tree's nodes is only approximately "
            "Gaussian, with an error of mean 0 (rounding at random, by secret bits) that "
            f"adds up within a node, in standard deviation at most {deviation:.2g} of the noise of "
            "the largest node, which the analysis leaves out",
        )

    def _largest_deviation(self) -> float:
        return float(self.strategy.noise_growth(self.steps).max())

    def _kept_deviation(self, deviation: float) -> float:
        return 1.0  # of a leaf; larger nodes are known better

    def _start_step(self) -> None:
        self._top = top_level(self.step, self._height)
        self._weights, self._scale = _new_node(self._top)

    @property
    def rounding_error(self) -> float:
        """Half a unit of the finer grid, and what adding up in float64 is off by."""
        error = 0.0
        for top in range(1, self._height):
            weights, scale = _new_node(top)
            off = 0.5 * 2.0**-self._bits + error_of_sums(2 * top, sum(weights), 1.0)
            error = max(error, off / scale)
        return error

    def _correlate(self, block: Block, noise: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (pending,) = buffers
        top = self._top
        self._draw(block, noise, self.step, scale=self._scale)
        self._settle(noise, pending, self._weights)
        taken = None if not top else pending[:top].to(torch.float64).sum(0)
        if top < self._height - 1:
            self._store(block, noise, pending[top])
        if taken is not None:  # in units of 1 where they are bfloat16
            unit = 1.0 if self._kept is torch.int32 else 2.0**self.grid_bits
            noise.sub_(taken.mul_(unit).round_())


def _new_node(top: int) -> tuple[list[float], float]:
    """The factors in the estimate of a new node of level ``top``: of the pending estimates, and s.

    Returns:
        a_0, …, a_{top-1}, and s.
    """
    shares = [node_variance(level) for level in range(top + 1)]
    # By level, what is left of an estimate of that level in one of the largest.
    left = [math.prod(1.0 - share for share in shares[level + 1 :]) for level in range(top + 1)]
    variance = sum((a * share) ** 2 for a, share in zip(left, shares, strict=True))
    return left[:-1], math.sqrt(variance)
