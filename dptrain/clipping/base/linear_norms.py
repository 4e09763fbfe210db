"""Norms of sums of outer products, as gradients of weights are, rounded up."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from dptrain.clipping.base.rows import HALF, row_norms
from dptrain.core import exact_device, in_float64, on_processor

ROUNDING = 16.0
"""Norms are rounded up by this, in units of the unit roundoff u of the dtype that sums have."""

_SINGLE = (torch.float32, *HALF)  # dtypes whose Gram matrices are float32; others' are float64
_LONG = 64  # positions from which on parts of a Gram matrix cost less in several products than all
_STRIPES = 3  # products, of a third of the rows each: 2/3 of the multiplications are left
_ALIGNED = 8  # positions at whose multiples a stripe begins: products of odd sizes are slower
_INNER = 256  # terms of a float32 product; the sums of so many are added one after the other
_MOST, _COARSE = 2**17, 1e-3  # positions and relative errors up to which the theorem holds
_LOOSE = 1.02  # ratio of squares up to which a bound in float32 is taken for the norm


class Gram:
    """⟨l_s, l_t⟩ of every row, s ≤ t, for several sums that have a side in common.

    Args:
        side: l, shape (rows, positions, m).
    """

    def __init__(self, side: torch.Tensor) -> None:
        self.side, self.own = side, False  # whether nobody else has its memory

    @functools.cached_property
    def stripes(self) -> list[torch.Tensor]:
        """Shapes (rows, positions s, positions t), by ``gram_stripes`` in float32."""
        return gram_stripes(self.side, torch.float32)


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
    nor charged for. So it is rounded up by what it may be off by, see ``rounded_up``
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
    sides, sizes = (left, right), (left.shape[2], right.shape[2])
    if positions == 1:
        return rank_one_norms(row_norms(left[:, 0]), row_norms(right[:, 0]), sizes)

    def squares(index: torch.Tensor | None, dtype: torch.dtype) -> Iterator[Squares]:
        kept = grams if index is None and dtype == torch.float32 else (None, None)
        copied = sum(size for side, size in zip(sides, sizes, strict=True) if side.dtype != dtype)
        numbers = (2 * positions**2 + positions * copied) * dtype.itemsize // 4
        for some in parts_of_rows(rows, index, max(1, most // numbers)):
            mine, others = (
                gram_stripes(side[some], dtype)
                if gram is None
                else [stripe[some] for stripe in gram.stripes]
                for side, gram in zip(sides, kept, strict=True)
            )
            yield gram_squares(mine, others, sizes, None if kinds is None else kinds[some])

    single = fits_single(sides, positions, sizes)
    found = rounded_up(squares, left, single=single, factors=sides).sqrt()
    return found.to(left.dtype).to(left.device)


class Squares(NamedTuple):
    """‖Σ_t l_t r_tᵀ‖² of some rows by ``in_float64``, as it was computed from Gram matrices.

    Attributes:
        value: which cancellation may make negative.
        off: what it differs from the true one by at most.
        length: S² or more, for S = Σ_t ‖l_t‖‖r_t‖.
    """

    value: torch.Tensor
    off: torch.Tensor
    length: torch.Tensor


def rounded_up(
    squares: Callable[[torch.Tensor | None, torch.dtype], Iterator[Squares]],
    like: torch.Tensor,
    *,
    single: bool,
    factors: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Squares of norms, by ``in_float64``, shape (rows,), none too small, from float32 products.

    Rows whose square may come out more than 2 % too large are computed again in float64, but not on
    a CUDA device: it would have to be waited for to know which they are, and many have few units
    for float64. 16 u S² is added to all.

    Args:
        squares: those of some rows (``None``: of all), from products in a dtype, in parts.
        like: a side, with the unit roundoff u of its dtype.
        single: whether float32 will do at all, see ``fits_single``.
        factors: sides without which nothing is left: rows of zeros are not computed again.
    """

    def total(index: torch.Tensor | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [torch.cat(part) for part in zip(*squares(index, dtype), strict=True)]
        value, off, length = parts or 3 * [in_float64(like.new_empty(0))]
        close = value + off <= _LOOSE * (value - off)  # not where any of them is no number
        return value.clamp(min=0) + off + ROUNDING * unit(like.dtype) * length, close

    if not single:
        return total(None, torch.float64)[0]
    found, close = total(None, torch.float32)
    if exact_device(like.device) == like.device and not on_processor(like):
        return found
    again = (~close).nonzero()[:, 0]
    for factor in factors:
        if len(again):
            alive = factor[again].flatten(1).any(1).to(found.device)
            alive |= ~found[again].isfinite()  # 0 · NaN is NaN
            found[again[~alive]] = 0.0
            again = again[alive]
    if len(again):
        found[again] = total(again, torch.float64)[0]
    return found


def fits_single(
    sides: Sequence[torch.Tensor], positions: int, sizes: tuple[int, int], taps: int = 0
) -> bool:
    """True if Gram matrices in float32 are as good as the theorem asks.

    Args:
        sides: l and r.
        positions: T.
        sizes: m and n.
        taps: as of ``gram_squares``.
    """
    if not all(side.dtype in _SINGLE for side in sides) or positions > _MOST:
        return False
    return max(roundings(size, torch.float32, taps) for size in sizes) <= _COARSE


def parts_of_rows(
    rows: int, index: torch.Tensor | None, step: int
) -> Iterator[slice | torch.Tensor]:
    """All rows, or those of an index, so many at a time."""
    if index is not None:
        yield from index.split(step)
        return
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def in_dtype(side: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A side for products in a dtype; where its device has no float64, on one that does."""
    return in_float64(side) if dtype == torch.float64 else side.to(dtype)


def gram_stripes(side: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Stripes of the Gram matrices, of so many positions s each and of all t from these on."""
    side, positions = in_dtype(side, dtype), side.shape[1]
    stripes = _STRIPES if positions >= _LONG else 1
    inner = (positions * k // stripes // _ALIGNED * _ALIGNED for k in range(1, stripes))
    return [
        gram_product(side[:, start:stop], side[:, start:])
        for start, stop in itertools.pairwise((0, *inner, positions))
    ]


def gram_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """⟨l_s, r_t⟩, shape (rows, positions s, positions t), by as few roundings as ``roundings``."""
    if left.dtype == torch.float64 or left.shape[2] <= _INNER:
        return torch.bmm(left, right.transpose(1, 2))
    first, *rest = zip(left.split(_INNER, 2), right.transpose(1, 2).split(_INNER, 1), strict=True)
    found = torch.bmm(*first)
    for part in rest:
        found += torch.bmm(*part)
    return found


def roundings(terms: int, dtype: torch.dtype, taps: int = 0) -> float:
    """What ``taps`` sums of products are off by, relative to their sum of absolute values.

    Args:
        terms: of each, by ``gram_product``.
        dtype: of the products.
        taps: sums that are added one by one.
    """
    most = terms if dtype == torch.float64 else min(terms, _INNER) + -(-terms // _INNER)
    return 1.02 * (max(1, most) + taps) * unit(dtype)


def gram_squares(
    left: list[torch.Tensor],
    right: list[torch.Tensor],
    sizes: tuple[int, int],
    kinds: torch.Tensor | None = None,
    taps: int = 0,
) -> Squares:
    """‖Σ_t l_t r_tᵀ‖² from Gram matrices, with what it is off by.

    (docs/theory/clipping.md#thm-outer-norms; ``test_norms_are_rounded_up``.)

    Args:
        left: stripes of l, by ``gram_stripes``.
        right: of r.
        sizes: m and n, terms of each number of a Gram matrix.
        kinds: as of ``outer_norms``.
        taps: further terms of each number of r's.
    """
    dtype = left[0].dtype
    u, lost, of_left = unit(dtype), _lost(dtype), roundings(sizes[0], dtype)
    of_right = roundings(sizes[1], dtype, taps)
    a = _lengths(left, of_left, sizes[0])
    b = _lengths(right, of_right, sizes[1] * max(1, taps))
    positions = a.shape[1]
    # Sums over t in float32 where there is no float64, and further ones elsewhere.
    inner = torch.float64 if exact_device(a.device) == a.device else dtype
    sums: tuple[list[torch.Tensor], ...] = ([], [], [])
    start = 0
    for mine, others in zip(left, right, strict=True):
        width = mine.shape[1]
        stop = start + width
        twice = torch.ones_like(a[:, None, start:])
        twice[:, :, width:] = 2.0  # pairs of different blocks stand for both orders
        if kinds is not None:
            of = kinds.to(a.device)
            mixed = of[:, start:stop, None] != of[:, None, start:]
            mine, others = mine.masked_fill(mixed, 0.0), others.masked_fill(mixed, 0.0)
        sums[0].append(in_float64((mine * others).mul_(twice).sum(2, dtype=inner)).sum(1))
        for found, gram, length in ((sums[1], others, a), (sums[2], mine, b)):
            parts = gram.abs().mul_(length[:, None, start:] * twice).sum(2)
            found.append(in_float64((parts + positions * lost) * length[:, start:stop]).sum(1))
        start = stop
    value, by_left, by_right = (torch.stack(each).sum(0) for each in sums)
    length = in_float64(a * b).sum(1).square()
    off = (of_left + 4 * u) * by_left + of_right * by_right + 1.05 * of_left * of_right * length
    off += (2 * positions + 8) * unit(torch.float64) * length  # of sums in float64
    if inner != torch.float64:
        off += 1.03 * positions * unit(inner) * length
    return Squares(value, 1.02 * off + 2 * positions**2 * lost, 1.01 * length)


def _lengths(stripes: list[torch.Tensor], off: float, terms: int) -> torch.Tensor:
    """‖l_t‖ from the diagonals of Gram matrices, rounded up, shape (rows, positions).

    They are so long that ``off`` times a product of two covers what underflow takes from as many
    terms.
    """
    squares = torch.cat([stripe.diagonal(dim1=1, dim2=2) for stripe in stripes], dim=1)
    lost = _lost(squares.dtype)
    return (squares * (1 + 2 * off + 8 * unit(squares.dtype)) + 2 * terms * lost / off).sqrt_()


def rank_one_norms(left: torch.Tensor, right: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """Norms ‖l rᵀ‖ of every row from ‖l‖ and ‖r‖, all of shape (rows,), rounded up.

    The square of a number below the root of the least normal one may have been lost, and the other
    side may be as large as that is small: so it is added to both.

    Args:
        left: ‖l‖, by ``row_norms``.
        right: ‖r‖, likewise.
        sizes: numbers of l and of r.
    """
    return several_rank_one_norms([(left, right, sizes)])[0]


def several_rank_one_norms(
    several: Sequence[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]],
) -> list[torch.Tensor]:
    """``rank_one_norms`` of several pairs of one dtype, by as few calls as of one."""
    dtype = several[0][0].dtype
    least = math.sqrt(torch.finfo(dtype).tiny)
    norms = [side for pair in several for side in pair[:2]]
    added = [2 * least * math.sqrt(size) for *_, sizes in several for size in sizes]
    sides = torch._foreach_add(norms, added)
    found = list(sides[::2])
    torch._foreach_mul_(found, list(sides[1::2]))
    torch._foreach_mul_(found, 1 + ROUNDING * unit(dtype))
    return found


def _lost(dtype: torch.dtype) -> float:
    """What a product and the sum that it is added to lose at most where they underflow."""
    return 2 * torch.finfo(dtype).tiny


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff u of a dtype."""
    return torch.finfo(dtype).eps / 2
