"""Tree aggregation: one binary tree over the run, or one small tree after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Self

from dptrain.core import checks
from dptrain.strategies.binding import Bindable
from dptrain.strategies.registry import register_strategy
from dptrain.strategies.strategy import RunShape
from dptrain.strategies.trees.binary_trees import BinaryTrees
from dptrain.strategies.trees.nodes import steps_with


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(Bindable, BinaryTrees):
    """One binary tree over all steps (Dwork et al. 2010; Honaker 2015; Kairouz et al. 2021).

    Rows of C are the complete dyadic intervals within n steps, so that n need not be a power of
    two. With L the largest power of two up to n it is the matrix of trees of L leaves.

    Args:
        steps: the n that the value is bound to; set by ``bind``.

    Raises:
        ValueError: if ``steps`` is not a positive integer.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            self._settle(steps=checks.steps(self.steps))

    @property
    def bands(self) -> int:  # type: ignore[override]
        """The largest complete node: steps that many apart have no node in common.

        Raises:
            ValueError: if the value is not bound.
        """
        return 1 << (self.bound_steps.bit_length() - 1)

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """One tree over the whole run."""
        return (cls(),)

    def levels(self, steps: int) -> int:
        """floor(log2 n) + 1."""
        return self.check_bound(steps).bit_length()

    def _steps_of(self, rows: int) -> int:
        steps = self.bound_steps
        if self.rows(steps) != rows:
            raise ValueError(
                f"z has {rows} rows: must have {self.rows(steps)}, one for each node of a Tree of "
                f"{steps} steps"
            )
        return steps


@register_strategy
@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeRestart(BinaryTrees):
    """Trees of 2^(height-1) leaves, one after another (DP-FTRL-TreeRestart, Kairouz et al. 2021).

    The last tree is cut where the steps end. Participations at least ``bands`` = 2^(height-1) apart
    never meet in a tree, so they are orthogonal (Choquette-Choo et al. 2024, §6.3).

    Args:
        height: levels of a tree, leaves included; 1 is independent noise.

    Raises:
        ValueError: if ``height`` is not a positive integer.
    """

    height: int

    def __post_init__(self) -> None:
        self._settle(height=checks.integer("height", self.height))

    @property
    def bands(self) -> int:  # type: ignore[override]
        """2^(height-1): the leaves of a tree."""
        return 1 << (self.height - 1)

    @classmethod
    def proposals(cls, run: RunShape) -> Iterable[Self]:
        """Trees with as many leaves as there are bands, where that is a power of two."""
        return [cls(height=b.bit_length()) for b in run.bands if b & (b - 1) == 0]

    def bind(self, steps: int) -> Self:
        """Itself: the nodes do not depend on n.

        Raises:
            ValueError: if not even one tree fits into the steps.
        """
        self.levels(steps)
        return self

    def levels(self, steps: int) -> int:
        """``height``."""
        fits = checks.steps(steps).bit_length()
        if self.height > fits:
            raise ValueError(
                f"height={self.height} means trees of 2^{self.height - 1} leaves, more than the "
                f"{steps} steps of the run: use at most height={fits}, or Tree()"
            )
        return self.height

    def _steps_of(self, rows: int) -> int:
        return steps_with(rows, self.height)
