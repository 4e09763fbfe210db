"""Norms of sums of outer products, as gradients of weights are, rounded up."""

from __future__ import annotations

import functools
import itertools
import math

import torch

from dptrain.clipping.base.rows import row_norms

ROUNDING = 16.0
"""Norms are rounded up by this, in units of the unit roundoff u of the dtype that sums have."""

_LONG = 64  # positions from which on parts of a Gram matrix cost less in several products than all
_STRIPES = 3  # products, of a third of the rows each: 2/3 of the multiplications are left
_ALIGNED = 8  # positions at whose multiples a stripe begins: products of odd sizes are slower


class Gram:
    """⟨l_s, l_t⟩ of every row in float64, s ≤ t, for several sums that have a side in common.

    Args:
        side: l, shape (rows, positions, m).
        most: float32 numbers whose memory copies may take at a time.
    """

    def __init__(self, side: torch.Tensor, most: int = 2**24) -> None:
        self.side, self.most = side, most

    @functools.cached_property
    def stripes(self) -> list[torch.Tensor]:
        """Shapes (rows, positions s, positions t), of all rows what ``_gram`` has of some."""
        step = max(1, self.most // (2 * max(1, self.side[0].numel())))
        parts = [_gram(part) for part in self.side.split(step)]
        return [torch.cat(stripe) for stripe in zip(*parts, strict=True)]


def outer_norms(
    left: torch.Tensor,
    right: torch.Tensor,
    most: int = 2**24,
    grams: tuple[Gram | None, Gram | None] = (None, None),
    kinds: torch.Tensor | None = None,
) -> torch.Tensor:
    """‖Σ_t l_t r_tᵀ‖ of every row without the sums, shape (rows,), never too small.

    The square is Σ_{s,t} ⟨l_s, l_t⟩⟨r_s, r_t⟩, a difference of large numbers where positions
    cancel. In float32 it came out up to 107 S² u too small (three positions of 4,096 equal numbers;
    S = Σ_t ‖l_t‖‖r_t‖, u = 6e-8), and what looks like S/400 while it is S/100 is neither clipped
    nor charged for. So it is computed in float64, and rounded up by ``pad``
    (docs/theory/clipping.md#thm-outer-norms; ``test_cancelling_positions_do_not_escape_clipping``).

    Args:
        left: l, shape (rows, positions, m).
        right: r, shape (rows, positions, n).
        most: float32 numbers whose memory copies and Gram matrices may take at a time.
        grams: of l and of r, where other sums need them too.
        kinds: shape (rows, positions); of several sums, by kinds of positions, the norm of all
            together: products of positions of different kinds are left out.
    """
    rows, positions = left.shape[:2]
    sizes = left.shape[2], right.shape[2]
    if positions == 1:
        return rank_one_norms(row_norms(left[:, 0]), row_norms(right[:, 0]), sizes)
    step = max(1, most // (4 * positions**2 + 2 * positions * sum(sizes)))
    found = [left.new_empty(0, dtype=torch.float64)]
    for start in range(0, rows, step):
        some = slice(start, start + step)
        mine, others = (
            _gram(side[some]) if gram is None else [stripe[some] for stripe in gram.stripes]
            for side, gram in zip((left, right), grams, strict=True)
        )
        squares, lengths = _squares(mine, others, None if kinds is None else kinds[some])
        terms = sum(sizes) + 2 * positions
        found.append(squares.clamp(min=0) + pad(left.dtype, terms) * lengths.square())
    return torch.cat(found).sqrt().to(left.dtype)


def gram_squares(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """‖Σ_t l_t r_tᵀ‖² in float64, which cancellation may make negative, and S = Σ_t ‖l_t‖‖r_t‖."""
    return _squares(_gram(left), _gram(right))


def _gram(side: torch.Tensor) -> list[torch.Tensor]:
    """Stripes of the Gram matrices, of so many positions s each and of all t from these on."""
    side = side.double()
    positions = side.shape[1]
    stripes = _STRIPES if positions >= _LONG else 1
    inner = (positions * k // stripes // _ALIGNED * _ALIGNED for k in range(1, stripes))
    return [
        torch.bmm(side[:, start:stop], side[:, start:].transpose(1, 2))
        for start, stop in itertools.pairwise((0, *inner, positions))
    ]


def _squares(
    left: list[torch.Tensor], right: list[torch.Tensor], kinds: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gram_squares`` of Gram matrices; what lies beside the squares is there twice."""
    squares, lengths, start = [], [], 0
    for mine, others in zip(left, right, strict=True):
        products, size = mine * others, mine.shape[1]
        if kinds is not None:
            mixed = kinds[:, start : start + size, None] != kinds[:, None, start:]
            products.masked_fill_(mixed, 0.0)
            start += size
        squares.append(products[:, :, :size].sum(2).sum(1))
        squares.append(2 * products[:, :, size:].sum(2).sum(1))
        lengths.append((_diagonal_roots(mine) * _diagonal_roots(others)).sum(1))
    return torch.stack(squares).sum(0), torch.stack(lengths).sum(0)


def rank_one_norms(left: torch.Tensor, right: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """Norms ‖l rᵀ‖ of every row from ‖l‖ and ‖r‖, all of shape (rows,), rounded up.

    The square of a number below the root of the least normal one may have been lost, and the other
    side may be as large as that is small: so it is added to both.

    Args:
        left: ‖l‖, by ``row_norms``.
        right: ‖r‖, likewise.
        sizes: numbers of l and of r.
    """
    least = math.sqrt(torch.finfo(left.dtype).tiny)
    left, right = left + 2 * least * math.sqrt(sizes[0]), right + 2 * least * math.sqrt(sizes[1])
    return left.mul_(right).mul_(1 + ROUNDING * unit(left.dtype))


def pad(dtype: torch.dtype, terms: int) -> float:
    """Pad that is added to the square of a norm from products in float64, in units of S².

    It is above what the square may be off by (docs/theory/clipping.md#thm-outer-norms;
    ``test_norms_are_rounded_up``).

    Args:
        terms: m + n + 2T.
    """
    return max(ROUNDING * unit(dtype), 1.02 * (terms + 16) * unit(torch.float64))


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u of a dtype."""
    return torch.finfo(dtype).eps / 2


def _diagonal_roots(squares: torch.Tensor) -> torch.Tensor:
    return squares.diagonal(dim1=1, dim2=2).sqrt()
