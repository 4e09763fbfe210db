"""Privacy losses of b-min-sep sampling with a largest batch, bands ≤ b."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import column_products, log_mixture
from dptrain.accounting.simulation.simulation import Direction, Simulation
from dptrain.core import Array
from dptrain.sampling import MinSep

# Entries of one array of steps times samples: 4 MB, of which about a dozen exist at a time.
_ENTRIES = 1 << 19
_MOST_LANES = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class TruncatedMinSepLosses(Simulation):
    """The pair of ``MinSep`` with ``max_batch_size`` under zero-out, exact for each output.

    Corollary D.2 of Dong & Ganesh 2026 (arXiv 2602.09338): public are the numbers r_t of other
    examples drawn; given them, x and y are made from the same draws of the example, and from the
    same lottery:

        x_t = 1, y_t = 0 if it is drawn and r_t < B,
        x_t = 2, y_t = -1 if it is drawn, r_t ≥ B, and it is kept (probability B/(r_t + 1)),
        x_t = y_t = 0 otherwise; P = C x + N(0, σ²I), Q = C y + N(0, σ²I).

    Both are divided by R = N(0, σ²I): P/R is the recursion of b-min-sep sampling in which step i
    multiplies by exp(u_i - h_i) if r_i < B, with u_i = <c_i, output>/σ², h_i = ‖c_i‖²/(2σ²), and by
    k exp(2u_i - 4h_i) + 1 - k, k = B/(r_i + 1), if not; Q/R likewise by 1 and k exp(-u_i - h_i) +
    1 - k. Columns c_i are cut at row n. Each is averaged over a warm start, then they are divided.

    The pair dominates the mechanism under zero-out (docs/theory/min-sep.md#thm-truncated-min-sep;
    ``test_ratio_by_enumeration``, ``test_vectors_are_no_worse_than_numbers``).

    σ: more noise is post-processing given r. ``sensitivity`` is the mechanism's own (publish
    the example's draws, too: the difference is C d·g, ‖g_t‖ ≤ 1, d_t in {0, 1}), not the pair's.

    Args:
        scheme: the sampling, with a largest batch B.
        coefficients: first column of C, shape (bands,), non-negative, bands ≤ min_sep.

    Raises:
        ValueError: if the coefficients are out of range, or the scheme cuts no batch.
    """

    scheme: MinSep
    coefficients: Array
    law: MinSepLaw = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        scheme = self.scheme
        if scheme.max_batch_size is None:
            raise ValueError(
                "scheme: max_batch_size=None; without it ask the accountants of whole batches"
            )
        law = MinSepLaw(
            coefficients=self.coefficients,
            probability=scheme.probability,
            min_sep=scheme.min_sep,
            steps=scheme.steps,
            warm_start=scheme.warm_start,
        )
        object.__setattr__(self, "law", law)

    @property
    def sensitivity(self) -> float:
        """max ‖Cx‖ over the patterns of participation."""
        return self.law.sensitivity

    @property
    def _largest(self) -> int:
        assert self.scheme.max_batch_size is not None
        return self.scheme.max_batch_size

    @property
    def work(self) -> int:
        """Drawing the others' numbers costs several times what b-min-sep sampling does."""
        return 8 * self.law.steps

    @property
    def lanes(self) -> int:
        """Samples a chunk."""
        return max(1, min(_MOST_LANES, _ENTRIES // self.law.steps))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value of the law."""
        return {
            **self.law.to_dict(),
            "dataset_size": self.scheme.dataset_size,
            "max_batch_size": self._largest,
        }

    def draw(
        self,
        sigmas: Sequence[float],
        direction: Direction | Literal["both"],
        rng: np.random.Generator,
        size: int,
    ) -> Array:
        """Draw losses, every σ by itself."""
        law, largest = self.law, self._largest
        by_sample, counts = self.scheme.sample_draws(rng, size)
        drawn, others = by_sample.T, counts.T
        full = others >= largest
        kept = full & drawn & (rng.random((law.steps, size)) * (others + 1) < largest)
        mean_p = column_products(law, _convolve(law, np.where(kept, 2.0, drawn & ~full)))
        mean_q = column_products(law, _convolve(law, np.where(kept, -1.0, 0.0)))
        noise = column_products(law, rng.standard_normal((law.steps, size)))
        means = {"remove": [mean_p], "add": [mean_q], "both": [mean_p, mean_q]}[direction]
        losses = np.empty((len(means), len(sigmas), size))
        for index, sigma in enumerate(sigmas):
            inner = np.stack([mean / sigma**2 + noise / sigma for mean in means], axis=1)
            losses[:, index] = self._log_ratio(sigma, inner, others)
        if direction != "remove":
            losses[-1] *= -1.0
        return losses if direction == "both" else losses[0]

    def log_ratio(self, sigma: float, outputs: npt.ArrayLike, others: npt.ArrayLike) -> Array:
        """log P/Q of given outputs and numbers r_t of others drawn, both (steps, k): shape (k,).

        Raises:
            ValueError: if the shapes do not match.
        """
        y, r = np.asarray(outputs, dtype=np.float64), np.asarray(others)
        if y.ndim != 2 or y.shape[0] != self.law.steps or r.shape != y.shape:
            raise ValueError(
                f"outputs of shape {y.shape}, others of shape {r.shape}: expected "
                f"({self.law.steps}, k) twice"
            )
        inner = column_products(self.law, y)[:, None, :] / sigma**2
        return self._log_ratio(sigma, inner, r)[0]

    def _log_ratio(self, sigma: float, inner: Array, others: npt.NDArray[np.int64]) -> Array:
        """log P/Q from u of shape (steps, directions, lanes), r of shape (steps, lanes)."""
        law, largest = self.law, self._largest
        steps, directions, lanes = inner.shape
        half_norms = law.squared_norms / (2.0 * sigma**2)
        exponents = np.zeros((steps, 2, directions, lanes))
        np.subtract(inner, half_norms[:, None, None], out=exponents[:, 0])
        rows, lane = np.nonzero(others >= largest)
        if rows.size:
            kept = (largest / (others[rows, lane] + 1.0))[:, None]
            with np.errstate(divide="ignore"):
                log_kept, log_cut = np.log(kept), np.log1p(-kept)
            h, u = half_norms[rows][:, None], inner[rows, :, lane]
            exponents[rows, 0, :, lane] = np.logaddexp(log_cut, log_kept + 2.0 * u - 4.0 * h)
            exponents[rows, 1, :, lane] = np.logaddexp(log_cut, log_kept - u - h)
        ratios = log_mixture(
            exponents,
            np.zeros(steps),
            probability=law.probability,
            min_sep=law.min_sep,
            warm_start=law.warm_start,
        )
        return np.asarray(ratios[0] - ratios[1])


def _convolve(law: MinSepLaw, x: Array) -> Array:
    """C x for a sparse x of shape (steps, lanes)."""
    product = np.zeros(x.shape)
    rows, lane = np.nonzero(x)
    values = x[rows, lane]
    for k, value in enumerate(law.coefficients):
        inside = rows + k < law.steps
        product[rows[inside] + k, lane[inside]] += value * values[inside]
    return product
