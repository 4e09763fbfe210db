"""Least error of dense strategies with equal column norms, by a fixed point with a certificate."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.linalg import cholesky, eigh
from tqdm import tqdm

from dptrain.core import Array
from dptrain.strategies.workloads import Workload

_TOLERANCE = 1e-6  # of the duality gap, relative; half of it in the error itself
_ACCEPTED = 1e-4  # gap that is still returned when the iterations run out
_ITERATIONS = 300
_SHORT = 500  # steps, up to which an iteration takes a fraction of a second, so that there may be:
_ITERATIONS_SHORT = 1000
_NEAR = 0.03  # of the blocks of X to identities, from where on the gap is worth computing
_SETTLED = 0.3  # of the same, from where on norms are moved
_EXPONENT = 3.0  # over-relaxation at the start; 1 is the plain fixed point
_LARGEST_EXPONENT = 8.0
_LEAST_DIAGONAL = 1e-4  # of A, relative to its largest; below, A counts as singular
_RIDGE = 1e-6  # of the mean diagonal of AᵀA, added where A is singular


@dataclasses.dataclass(frozen=True)
class DenseOptimum:
    """A strategy matrix and how far from optimal it can be.

    Attributes:
        matrix: C, lower triangular, columns of norm 1 unless these are free, shape (n, n).
        loss: ‖A C^-1‖_F².
        gap: (loss - lower bound)/loss, where the lower bound holds for every feasible C.
    """

    matrix: Array
    loss: float
    gap: float


def workload_factor(workload: Workload, steps: int) -> Array:
    """F, shape (n, n), with ‖F C^-1‖_F² the error that the dense optimizers minimize.

    A itself, unless a diagonal entry of A is (nearly) zero, as with a learning rate that starts at
    0: the noise of that step then costs nothing and the optimum is not attained. In that case
    FᵀF = AᵀA + ρI with ρ = 10^-6 times the mean diagonal of AᵀA, which is to say that the noise
    itself is worth keeping small too.
    """
    dense = workload.matrix(steps)
    diagonal = np.abs(np.diag(dense))
    if diagonal.min() > _LEAST_DIAGONAL * np.abs(dense).max():
        return dense
    gram = dense.T @ dense
    gram[np.diag_indices(steps)] += _RIDGE * np.trace(gram) / steps
    return np.asarray(cholesky(gram, check_finite=False))


def optimal_for_epochs(factor: Array, epochs: int, *, equal_norms: bool = True) -> DenseOptimum:
    """C of least ‖F C^-1‖_F² whose columns have norm 1 and are orthogonal at multiples of n/e.

    In X = CᵀC the problem is convex: minimize tr(M X^-1), M = FᵀF, over X ≻ 0 whose e×e blocks
    (the rows and columns s, s + n/e, s + 2n/e, …) are identities. With Lagrange multipliers N ≻ 0,
    block diagonal in the same blocks, the minimum over all X is attained where X^-1 M X^-1 = N, at

        X(N) = N^{-1/2} S N^{-1/2},  S = (N^{1/2} M N^{1/2})^{1/2},

    and is 2 tr S - tr N: a lower bound for every feasible X, whatever N. N is optimal where the
    blocks of X(N) are identities, that is N = blocks(S), whose fixed-point iteration is that of
    Denisov et al. 2022 for e = 1 (diagonal N). Here the step N ← N^{1/2} blocks(X)^ω N^{1/2} is
    over-relaxed: ω grows while the blocks come closer to identities and falls when they do not
    (ω = 1 is the plain iteration, which takes thousands of steps where a learning rate of zero
    leaves M nearly singular). Scaling X(N) by the inverse roots of its blocks makes it feasible,
    which gives an upper bound to set against the lower one. Bounds that stay more than 10^-4 apart
    are an error.

    *Free norms.* Participations exactly n/e apart cost the sum of the squared norms in one block,
    so only that has to be e. With X = D Y D, D diagonal, Y is as X was, for D^-1 M D^-1; and the
    multipliers of X, D^-1 N D^-1, must have equal diagonals within each block. N_ii falls like
    1/D_ii² where the rest stays, so D_ii² ← D_ii sqrt(N_ii), scaled to sum e, is the Newton-like
    step that goes on beside the others. As X_ii ≥ 0, e times the largest diagonal entry of a
    block's multipliers bounds its part of tr(N X) whatever they are: the lower bound again.

    Args:
        factor: F, shape (n, n), with M = FᵀF ≻ 0.
        epochs: e, a divisor of n; with e = 1 only the norms are fixed.
        equal_norms: whether every column has norm 1, or only each block's squares add up to e.
    """
    n = len(factor)
    blocks = _Blocks(n, epochs)
    gram = factor[:, blocks.order].T @ factor[:, blocks.order]
    values, vectors = eigh(gram, driver="evd", check_finite=False)
    multipliers = blocks.of_product(vectors, np.sqrt(np.maximum(values, 0)))
    iterations = _ITERATIONS_SHORT if n <= _SHORT else _ITERATIONS
    exponent, last = _EXPONENT, np.inf
    loss, gap, best = np.inf, np.inf, gram
    squares = found_squares = np.ones((blocks.count, epochs))  # D², of the columns in order
    with tqdm(desc=f"Dense strategy, {n} steps", unit="iteration", delay=2, mininterval=1) as bar:
        for left in range(iterations - 1, -1, -1):
            root, inverse_root = _power(multipliers, 0.5), _power(multipliers, -0.5)
            scaled = blocks.left(root, blocks.left(root, gram).T)
            values, vectors = eigh(scaled, driver="evd", check_finite=False)
            values = np.sqrt(np.maximum(values, np.finfo(float).eps * values[-1]))
            inner = inverse_root @ blocks.of_product(vectors, values) @ inverse_root
            distance = float(np.abs(inner - np.eye(epochs)).max())
            if distance <= _NEAR or not left:
                diagonal = np.diagonal(multipliers, axis1=1, axis2=2)
                fixed = diagonal.sum(axis=1)
                if not equal_norms:
                    fixed = epochs * (diagonal / squares).max(axis=1)
                bound = 2 * values.sum() - fixed.sum()
                # A feasible X = P Pᵀ, P = blocks(X(N))^{-1/2} N^{-1/2} V sqrt(Λ) with S = V Λ Vᵀ.
                back = blocks.left(_power(inner, 0.5) @ root, vectors) / np.sqrt(values)
                loss = float(np.sum((gram @ back) * back))
                gap = (loss - float(bound)) / loss
                best = blocks.left(_power(inner, -0.5) @ inverse_root, vectors) * np.sqrt(values)
                found_squares = squares
            bar.set_postfix(rmse=f"{np.sqrt(loss / n):.6g}", gap=f"{gap:.1e}", refresh=False)
            bar.update()
            if gap <= _TOLERANCE:
                break
            closer = distance <= 0.999 * last
            exponent = min(_LARGEST_EXPONENT, 1.1 * exponent) if closer else 0.6 * exponent
            exponent = max(1.0, exponent)
            last = distance
            multipliers = root @ _power(inner, exponent) @ root
            if not equal_norms and distance <= _SETTLED:
                shares = np.sqrt(squares * np.diagonal(multipliers, axis1=1, axis2=2))
                shares *= epochs / shares.sum(axis=1, keepdims=True)
                step = np.sqrt(shares / squares)
                squares = shares
                multipliers = multipliers * step[:, :, None] * step[:, None, :]
                gram = gram / step.ravel() / step.ravel()[:, None]
    if not gap <= _ACCEPTED:
        raise RuntimeError(
            f"no optimum found for steps={n}, epochs={epochs}: the duality gap is still {gap:.1e} "
            f"after {iterations} iterations; use fewer epochs, or a workload whose entries vary "
            "less"
        )
    product = best @ best.T
    blocks.set_identity(product)  # which they are to rounding
    x = np.empty((n, n))
    x[np.ix_(blocks.order, blocks.order)] = product
    norms = np.empty(n)
    norms[blocks.order] = np.sqrt(found_squares.ravel())
    return DenseOptimum(matrix=_unit_columns(x) * norms, loss=loss, gap=gap)


class _Blocks:
    """Matrices whose rows are ordered so that indices n/e apart are next to each other."""

    def __init__(self, n: int, size: int) -> None:
        self.size = size
        self.count = n // size
        self.order = np.arange(n).reshape(size, self.count).T.ravel()

    def left(self, blocks: Array, x: Array) -> Array:
        """The block diagonal matrix times x."""
        product: Array = np.matmul(blocks, x.reshape(self.count, self.size, -1))
        return product.reshape(x.shape)

    def of_product(self, vectors: Array, weights: Array) -> Array:
        """The diagonal blocks of V diag(weights) Vᵀ, shape (count, size, size)."""
        rows = vectors.reshape(self.count, self.size, -1)
        product: Array = np.matmul(rows * weights, rows.transpose(0, 2, 1))
        return product

    def set_identity(self, x: Array) -> None:
        """Overwrite the diagonal blocks of x with identities."""
        i = np.arange(self.count)
        x.reshape(self.count, self.size, self.count, self.size)[i, :, i, :] = np.eye(self.size)


def _power(blocks: Array, exponent: float) -> Array:
    """Symmetric positive definite blocks to a power."""
    values, vectors = np.linalg.eigh(blocks)
    return np.asarray((vectors * values[:, None, :] ** exponent) @ vectors.transpose(0, 2, 1))


def _unit_columns(x: Array) -> Array:
    """The lower-triangular C with CᵀC = x (to rounding) and columns of norm 1.

    With J the reversal, J x J = L Lᵀ gives C = J Lᵀ J. Negative entries that are rounding (below
    10^-13) become zeros before the norms are taken; what is returned is C, so nothing is lost.
    """
    lower = cholesky(x[::-1, ::-1], lower=True, check_finite=False)
    c = np.tril(lower.T[::-1, ::-1])
    c[np.abs(c) < 1e-13] = 0.0
    return np.asarray(c / np.linalg.norm(c, axis=0))
