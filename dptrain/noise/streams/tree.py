"""Noise for tree strategies: the online estimator over a binary counter of pending estimates."""

from __future__ import annotations

from typing import Any

import torch

from dptrain.noise.streams.flat import FlatStream
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.registry import register_noise_stream
from dptrain.strategies import Strategy
from dptrain.strategies.trees import BinaryTrees, node_count, node_variance, top_level


@register_noise_stream(BinaryTrees)
class TreeStream(FlatStream):
    """Row t of W Z with the online estimator W of a tree, Z a row per node.

    W is that of docs/theory/strategies.md#thm-tree-estimator.

    Step t draws the rows of the nodes that it completes, two a step on average, from the leaf
    (level 0) to the largest (level k). A block of the D flattened parameters has one buffer of
    shape (h - 1, entries), (h - 1)·D numbers in all for trees of height h. Its row l holds the
    estimate of the maximal node of level l in the prefix, if there is one (a root's is needed no
    more). With these pending estimates p the largest new node's is

        e_0 = z_0,    e_l = (1 - v_l) (p_{l-1} + e_{l-1}) + v_l z_l,

    and the noise, by which the estimate of the prefix sum grows, is e_k - (p_0 + … + p_{k-1}): what
    is new less what it takes over (docs/theory/noise.md#thm-tree-stream). What a step adds as e_k a
    later one takes away again as p_k, the same stored float32 value, so that roundings do not add
    up (``test_ten_thousand_float32_steps_do_not_drift``). A step takes O(k) operations on rows,
    O(1) on average.

    With bfloat16 buffers the error in the noise of a node grows with its level, and may reach half
    of its standard deviation at 2^14 leaves (docs/theory/noise.md#thm-bfloat16); ``notes`` says so.
    """

    def __init__(self, strategy: Strategy, **options: Any) -> None:
        bound = strategy.bind(options["steps"])
        assert isinstance(bound, BinaryTrees)
        self._height = bound.levels(options["steps"])
        super().__init__(bound, **options)

    def _allocate(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [row.new_zeros(self._height - 1, len(row), dtype=self._dtype)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What bfloat16 buffers do to the noise; empty for float32, or where nothing is kept."""
        if self._dtype is torch.float32 or not self._keeps:
            return ()
        deviation = 2.0 ** ((self._height - 1) / 2 - 8)
        return (
            "the noise buffers are bfloat16: the noise of a tree's nodes is only approximately "
            "Gaussian, with an error of mean 0 (rounding at random, by secret bits) that "
            f"adds up within a node, in standard deviation at most {deviation:.2g} of the noise of "
            "the largest node, which the analysis leaves out",
        )

    def _correlate(self, block: Block, row: torch.Tensor, buffers: list[torch.Tensor]) -> None:
        (pending,) = buffers
        leaf = node_count(self.step, self._height)  # this step's first row of C
        top = top_level(self.step, self._height)
        self._draw(block, row, leaf)
        if top > 0:
            z = torch.empty_like(row)
            for level in range(1, top + 1):
                self._draw(block, z, leaf + level)
                row.add_(pending[level - 1])
                row.lerp_(z, node_variance(level))
            # Those taken over are needed no more: float32 ones add up where the first one was.
            taken = pending[0].float()
            for level in range(1, top):
                taken.add_(pending[level])
        if top < self._height - 1:
            self._store(block, row, pending[top])
        if top > 0:
            row.sub_(taken)
