"""Privacy losses of balls-in-bins sampling with any strategy, drawn in one dimension a bin."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import logsumexp

from dptrain.accounting.renyi.gram import gram_matrix
from dptrain.accounting.simulation.simulation import DIRECTIONS, Direction, Simulation
from dptrain.core import Array
from dptrain.strategies import Strategy

Evaluate = Callable[[Array, npt.NDArray[np.int64]], Array]

UNIT = 2.0**-53  # unit roundoff
LARGEST_NORMAL = 13.75
"""A true normal exceeds it with probability 1e-42, numpy's never."""
_EASY = 16.0  # ratio max ‖m_i‖/σ up to which the slack surely covers the rounding
_LARGEST_EXPONENT = 600.0  # of terms that may be summed without a common factor taken out
_LARGEST_TABLE = 1024  # bins up to which the shifts of all components are tabulated
_BLOCK_ROWS = 64
_BLOCK_BYTES = 1 << 19  # of one array of a block: a few of them fit the second-level cache


class _Rows(NamedTuple):
    """Rows first..end-1 of a lower-triangular factor; they are zero before column ``start``."""

    start: int
    first: int
    end: int
    transposed: torch.Tensor


def dominating_factor(gram: Array, steps: int) -> Array:
    """A lower-triangular R with R R^T ⪰ G, for a computed Gram matrix of means in R^n.

    R is the Cholesky factor of G + ηI. Let u be the unit roundoff. The computed G is off by at most
    κ√(G_ii G_jj) entrywise with κ ≤ 1e-12 + 6nu (each mean is accurate to 1e-13 + 2nu of its norm,
    the products add n terms, and zeroing what is below 1e-13 adds as much), so by at most κ tr(G)
    in spectral norm, and the computed R R^T by at most 2(b+1)u tr(G + ηI) (Higham 2002, Theorem
    10.3). η is above twice the sum of the two.
    """
    bins, trace = gram.shape[0], float(np.trace(gram))
    # Entries this small are an FFT's rounding; without them a banded G keeps its zeros.
    clean = np.where(np.abs(gram) > 1e-13 * gram.diagonal().min(), gram, 0.0)
    eta = 2.0 * trace * (1e-12 + (6.0 * steps + 4.0 * (bins + 1)) * UNIT)
    return np.asarray(np.linalg.cholesky(clean + eta * np.eye(bins)))


@dataclasses.dataclass(frozen=True, eq=False)
class BallsInBinsLosses(Simulation):
    """P = (1/b) Σ_i N(m_i, σ²I) against Q = N(0, σ²I), m_i the sum of |C|'s columns of bin i.

    *Dimension.* log P/Q = log (1/b) Σ_j exp((<m_j, y> - ‖m_j‖²/2)/σ²) depends on y only through the
    b products <m_j, y>, which are Gaussian with covariance σ²G, G_ij = <m_i, m_j>, and mean 0 under
    Q, row i of G under component i of P. So b normals replace n.

    *Whatever G is.* The rows m̃_j of R (``dominating_factor``) are means in R^b with Gram matrix
    R R^T ⪰ G. What is drawn is their pair, which is at most as private as the true one, at every σ
    (docs/theory/balls-in-bins.md#thm-bins-factor;
    ``test_the_factor_dominates_even_a_singular_gram_matrix``); a singular G needs no special
    treatment.

    *Rounding.* With ρ = max ‖m̃_j‖ and ‖z‖ ≤ 13.75 √b, the products <m̃_j, z>/σ are off by at most
    (b+3)u·ρ‖z‖/σ, the shifts (G̃_ij - G̃_jj/2)/σ² by (b+4)u·2ρ²/σ², exponentials by 4u each, the
    sum of b non-negative terms by bu, both relative, and the logarithm by 4u(1 + |L|): see
    ``rounding``, which is twice their sum. ``slack`` covers it while ρ ≤ 16σ, and at least 1e-9;
    where σ is so small that it does not, every loss is reported as ∞, an upper bound.

    Args:
        strategy: C; its entrywise magnitude is used (Schuchardt & Kalinin 2026, Lemma 2.8,
            arXiv 2601.21636).
        steps: n.
        bins: b ≥ 1, the distance of two participations.
    """

    strategy: Strategy
    steps: int
    bins: int

    @functools.cached_property
    def factor(self) -> Array:
        """R, shape (b, b)."""
        gram = gram_matrix(self.strategy, steps=self.steps, bins=self.bins)
        return dominating_factor(gram, self.steps)

    @functools.cached_property
    def gram(self) -> Array:
        """G̃ = R R^T."""
        return np.asarray(self.factor @ self.factor.T)

    @functools.cached_property
    def _rows(self) -> list[_Rows]:
        blocks = []
        for first in range(0, self.bins, _BLOCK_ROWS):
            end = min(first + _BLOCK_ROWS, self.bins)
            start = int(np.nonzero(self.factor[first:end].any(axis=0))[0][0])
            piece = np.ascontiguousarray(self.factor[first:end, start:end].T)
            blocks.append(_Rows(start, first, end, torch.from_numpy(piece)))
        return blocks

    @functools.cached_property
    def sensitivity(self) -> float:
        """max ‖m̃_i‖, rounded up."""
        return math.sqrt(float(self.gram.diagonal().max())) * (1.0 + (self.bins + 8) * UNIT)

    @property
    def work(self) -> int:
        """Number of bins."""
        return self.bins

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        return 4096

    def rounding(self, ratio: float) -> float:
        """Bound on the rounding of a loss where max ‖m̃_i‖/σ = ``ratio``."""
        reach = ratio * LARGEST_NORMAL * math.sqrt(self.bins) + 2.0 * ratio * ratio
        return 2.0 * UNIT * ((self.bins + 12.0) * reach + 2.0 * self.bins + 40.0)

    @property
    def slack(self) -> float:
        """Covers ``rounding`` up to ρ = 16σ; at least 1e-9."""
        return max(1e-9, self.rounding(_EASY))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: strategy, steps and bins."""
        return {
            "law": "balls-in-bins",
            "strategy": self.strategy.to_dict(),
            "strategy_hash": self.strategy.coefficient_hash,
            "steps": self.steps,
            "bins": self.bins,
        }

    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Draw losses, every σ by itself.

        Both directions and all σ share the products <m̃_j, z> of one z: under Q these are y's up to
        σ, under P row i of G̃ is added to them, i uniform.
        """
        directions = DIRECTIONS if direction == "both" else (direction,)
        losses = np.empty((len(directions), len(sigmas), size))
        chosen = rng.integers(self.bins, size=size)
        rows = max(1, _BLOCK_BYTES // (8 * self.bins))
        pieces = [self._losses_at(sigma, directions) for sigma in sigmas]
        for start in range(0, size, rows):
            part = slice(start, min(start + rows, size))
            products = self._products(rng, part.stop - part.start)
            for index, piece in enumerate(pieces):
                losses[:, index, part] = piece(products, chosen[part])
        return losses if direction == "both" else losses[0]

    def _products(self, rng: np.random.Generator, size: int) -> Array:
        """<m̃_j, z> for ``size`` draws of z: shape (size, bins)."""
        z = rng.standard_normal((size, self.bins))
        normals, products = torch.from_numpy(z), torch.empty((size, self.bins), dtype=torch.float64)
        for block in self._rows:
            torch.mm(
                normals[:, block.start : block.end],
                block.transposed,
                out=products[:, block.first : block.end],
            )
        return products.numpy()

    def _losses_at(self, sigma: float, directions: Sequence[Direction]) -> Evaluate:
        """A function from (products, chosen components) to losses (direction, sample) at one σ."""
        ratio, inverse = self.sensitivity / sigma, 1.0 / sigma
        half = self.gram.diagonal() / 2.0
        reach = ratio * LARGEST_NORMAL * math.sqrt(self.bins) + 1.5 * ratio * ratio

        def unknown(products: Array, chosen: npt.NDArray[np.int64]) -> Array:
            return np.full((len(directions), len(products)), math.inf)

        def scaled(products: Array, chosen: npt.NDArray[np.int64]) -> Array:
            terms = np.exp(products * inverse)
            sums = [
                np.einsum("sj,sj->s", terms, table[chosen])
                if each == "remove"
                else np.einsum("sj,j->s", terms, weights)
                for each in directions
            ]
            return signs * np.log(sums)

        def logarithmic(products: Array, chosen: npt.NDArray[np.int64]) -> Array:
            exponents = products * inverse - half * inverse**2
            sums = [
                logsumexp(
                    exponents + self.gram[chosen] * inverse**2 if each == "remove" else exponents,
                    axis=1,
                )
                for each in directions
            ]
            return signs * (np.stack(sums) - math.log(self.bins))

        signs = np.array([[1.0 if each == "remove" else -1.0] for each in directions])
        if self.rounding(ratio) > self.slack:
            return unknown
        if reach > _LARGEST_EXPONENT or self.bins > _LARGEST_TABLE:
            return logarithmic
        weights = np.exp(-half * inverse**2) / self.bins
        table = np.exp((self.gram - half) * inverse**2) / self.bins
        return scaled
