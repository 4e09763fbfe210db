"""The pair of distributions of a user whose draws are public at exposed steps only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.accounting.users.squared_norm_grid import binomial
from dptrain.core import Array, checks
from dptrain.sampling.schemes import successes
from dptrain.sampling.users import Exclusion
from dptrain.strategies import Strategy

Counts = npt.NDArray[np.uint8]

# What a chunk may hold in (steps, lanes) tables of float64, and samples a chunk at most.
_CHUNK_BYTES = 64 << 20
_LANES = 1024
MOST_EXAMPLES = 64
_COLUMNS_AT_ONCE = 256


def band_columns(strategy: Strategy, steps: int) -> Array:
    """|C_{i+k,i}| at [i, k], shape (steps, bands); 0 beyond the last row."""
    bands = min(strategy.bands, steps)
    table = np.zeros((steps, bands))
    for first in range(0, steps, _COLUMNS_AT_ONCE):
        indices = np.arange(first, min(first + _COLUMNS_AT_ONCE, steps))
        columns = np.abs(strategy.columns(steps, indices))
        for k in range(bands):
            inside = indices + k < steps
            table[indices[inside], k] = columns[indices[inside] + k, np.flatnonzero(inside)]
    return table


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UserLaw:
    """P = C x + N(0, σ²I) against Q = N(0, σ²I), both beside the same public information; σ open.

    One coin a step for each of k' examples; r_t of them come up at step t. With the rule
    ``"sampling"`` x_t = r_t unless some r_j > 0, j in {t-b+1..t-1}, with ``"participation"``
    unless some x_j > 0. Public are the exposed steps, those t for which U_j = 1 for a j in
    {t+1..t+b-1}, with U_j i.i.d. of chance 1-(1-p)^d, and r_t at exposed steps.

    Args:
        columns: C by ``band_columns``, bands ≤ b.
        examples: the numbers k' of examples; a sample's loss is the largest over all of them.
        probability: p in (0, 1].
        min_sep: b ≥ 1.
        neighbors: d ≥ 0; 0 for no exposed steps.
        burn_in: steps of the same chain before the first, not released and not known.
    """

    columns: Array
    examples: tuple[int, ...]
    probability: float
    min_sep: int
    exclusion: Exclusion
    neighbors: int
    burn_in: int

    def __post_init__(self) -> None:
        if self.columns.shape[1] > self.min_sep:
            raise ValueError(
                f"columns: {self.columns.shape[1]} bands with min_sep={self.min_sep}; use at most "
                "min_sep bands"
            )
        if not np.isfinite(self.columns).all() or (self.columns < 0).any():
            raise ValueError("columns: must be finite values ≥ 0; take absolute values")
        checks.probability("probability", self.probability)
        if not self.examples or not all(1 <= k <= MOST_EXAMPLES for k in self.examples):
            raise ValueError(f"examples={self.examples}: numbers within 1..{MOST_EXAMPLES}")
        if self.neighbors < 0 or (self.neighbors and self.exclusion != "sampling"):
            raise ValueError(
                f"neighbors={self.neighbors}: must be ≥ 0, and 0 unless exclusion='sampling'"
            )
        if self.burn_in < 0 or (self.burn_in and self.neighbors):
            raise ValueError(f"burn_in={self.burn_in}: must be ≥ 0, and 0 with neighbors")

    @property
    def steps(self) -> int:
        """n."""
        return len(self.columns)

    @property
    def squared_norms(self) -> Array:
        """‖c_i‖² of every column, shape (steps,)."""
        return np.asarray((self.columns**2).sum(axis=1))

    @property
    def most(self) -> int:
        """The largest k'."""
        return max(self.examples)

    @property
    def sensitivity(self) -> float:
        """k·max ‖C x‖ over 0/1 patterns with gaps ≥ b ≥ bands (columns then share no row)."""
        norms = self.squared_norms
        best = np.zeros(self.steps + self.min_sep)
        for i in range(self.steps - 1, -1, -1):
            best[i] = max(best[i + 1], norms[i] + best[i + self.min_sep])
        return self.most * math.sqrt(float(best[0])) * (1.0 + 1e-12)

    @property
    def exposure(self) -> float:
        """Chance of U_j = 1: that one of d coins comes up."""
        if self.probability == 1.0:
            return float(self.neighbors > 0)
        return -math.expm1(self.neighbors * math.log1p(-self.probability))

    @property
    def exposed_share(self) -> float:
        """The share of exposed steps: of b-1 after them one has U_j = 1."""
        return -math.expm1((self.min_sep - 1) * math.log1p(-min(self.exposure, 1.0 - 2.0**-53)))

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        return int(max(1, min(_LANES, _CHUNK_BYTES // (8 * 6 * self.steps))))

    def mass(self, examples: int) -> Array:
        """P(Bin(k', p) = j), shape (k' + 1,)."""
        return binomial(examples, self.probability)

    def start(self, examples: int) -> Array:
        """Law of how many of the first steps are barred from before, shape (b,).

        From an empty past the chain goes through the burn-in: r > 0 sets the countdown to b - 1
        (under ``"participation"`` only from 0), r = 0 lowers it by one.
        """
        b, empty = self.min_sep, float(self.mass(examples)[0])
        law = np.zeros(b)
        law[0] = 1.0
        if b == 1:
            return law
        # Under "sampling" the last b - 1 steps are all that matters.
        steps = min(self.burn_in, b - 1) if self.exclusion == "sampling" else self.burn_in
        for _ in range(steps):
            after = np.zeros(b)
            if self.exclusion == "sampling":
                after[:-1] = empty * law[1:]
                after[0] += empty * law[0]
                after[-1] = (1.0 - empty) * law.sum()
            else:
                after[:-1] = law[1:]
                after[0] += empty * law[0]
                after[-1] += (1.0 - empty) * law[0]
            law = after
        return law

    def draw_counts(self, rng: np.random.Generator, lanes: int) -> list[Counts]:
        """r_t for every k' of ``examples`` from nested coins: shape (steps, lanes) each."""
        counts = np.zeros(self.steps * lanes, dtype=np.uint8)
        found = {}
        for example in range(1, self.most + 1):
            counts[successes(rng, counts.size, self.probability)] += 1
            if example in self.examples:
                found[example] = counts.reshape(self.steps, lanes).copy()
        return [found[k] for k in self.examples]

    def draw_exposed(self, rng: np.random.Generator, lanes: int) -> npt.NDArray[np.bool_]:
        """Mask of the exposed steps, shape (steps, lanes)."""
        if self.exposure == 0.0 or self.min_sep == 1:
            return np.zeros((self.steps, lanes), dtype=bool)
        seen = np.zeros((self.steps, lanes), dtype=bool)
        seen.reshape(-1)[successes(rng, seen.size, self.exposure)] = True
        shown = np.zeros_like(seen)
        shown[:-1] = seen[1:]
        # shown[t] is "any U_j, j in {t+1..t+width}": windows are put together from two shorter.
        width, whole = 1, min(self.min_sep - 1, self.steps)
        while width < whole:
            shift = min(width, whole - width)
            shown[:-shift] |= shown[shift:].copy()
            width += shift
        return shown

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of everything the losses depend on, except σ."""
        first = self.columns[0]
        rows_left = np.arange(self.steps, 0, -1)[:, None]
        toeplitz = np.where(np.arange(first.size) < rows_left, first, 0.0)
        same = np.array_equal(toeplitz, self.columns)
        return {
            "columns": first.tolist() if same else self.columns.tolist(),
            "steps": self.steps,
            "examples": list(self.examples),
            "probability": self.probability,
            "min_sep": self.min_sep,
            "exclusion": self.exclusion,
            "neighbours": self.neighbors,  # as certificates that exist spell it
            "burn_in": self.burn_in,
        }
