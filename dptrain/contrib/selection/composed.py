"""δ(ε) of several runs together: on the same data, or on data sets that share no unit."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dptrain.accounting.base import TradeOff, check_same_subject
from dptrain.accounting.losses import HeterogeneousComposition
from dptrain.contrib.selection.pair import delta_at, epsilon_at, least_spacing, losses
from dptrain.core import Array, checks


class ComposedRuns:
    """The curves of all runs together, each direction by itself, rounded up.

    On the same data the runs' pairs compose (docs/theory/selection.md#thm-several-runs;
    ``test_runs_of_small_mechanisms_compose_as_their_products_do``). Where no unit is in two of the
    data sets, all but one run have one law in both worlds, and the larger δ counts
    (docs/theory/selection.md#thm-disjoint-runs; ``test_disjoint_runs_cost_what_the_dearest_does``).

    Args:
        runs: what is known of each that was planned, whether or not it was made; their noise has
            to be independent.
        disjoint: whether each unit is in at most one of the data sets.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there are no runs, or they are about different adjacencies or units.
    """

    def __init__(self, runs: Sequence[TradeOff], *, disjoint: bool = False) -> None:
        self.runs = [checks.instance("runs", run, TradeOff) for run in runs]
        if not self.runs:
            raise ValueError("runs: must contain at least one")
        check_same_subject(self.runs)
        self.disjoint = checks.flag("disjoint", disjoint)

    @functools.cached_property
    def _compositions(self) -> tuple[HeterogeneousComposition, HeterogeneousComposition]:
        counts, spacing = collections.Counter(self.runs), least_spacing(self.runs)
        remove, add = (
            HeterogeneousComposition(
                [(losses(run, spacing=spacing, remove=way), count) for run, count in counts.items()]
            )
            for way in (True, False)
        )
        return remove, add

    @property
    def _apart(self) -> bool:
        return self.disjoint or len(self.runs) == 1

    def delta(self, epsilon: npt.ArrayLike) -> tuple[Array, Array]:
        """δ (remove, add) at every ε ≥ 0; its shape."""
        at = np.asarray(epsilon, dtype=np.float64)
        if self._apart:
            remove, add = (
                np.max([delta_at(run, at, remove=way) for run in self.runs], axis=0)
                for way in (True, False)
            )
            return remove, add
        remove, add = (np.minimum(curve.delta(at), 1.0) for curve in self._compositions)
        return remove, add

    def epsilon(self, delta: float) -> float:
        """Least ε ≥ 0 for both directions at δ in (0, 1); ∞ where nothing is shown.

        Raises:
            ValueError: if δ is not in (0, 1).
        """
        delta = checks.number("delta", delta, above=0, below=1)
        if self._apart:
            return max(epsilon_at(run, delta) for run in self.runs)
        composed = max(curve.epsilon(delta) for curve in self._compositions)
        # Adding up is a bound as well, and holds without rounding to a grid.
        return min(composed, self.added_up(delta))

    def added_up(self, delta: float) -> float:
        """Basic composition: Σ ε of the runs at equal shares of δ."""
        share = delta / len(self.runs)
        return sum(epsilon_at(run, share) for run in self.runs)
