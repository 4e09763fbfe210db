"""Host side of the compiled b-min-sep engine, and the bound on its rounding."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.core import Array

if TYPE_CHECKING:
    from dptrain.accounting.min_sep import engine_kernel as kernel

LARGEST_NORMAL = 8.16  # √(2·48·log 2), rounded up: U ≥ 2^-48
PAIR_ERROR = 2e-12  # Euclidean error of a pair of normals
LARGEST_HELD = 16.0  # of a normal where a direction is held; beyond it a sample is spoiled
BREACH = 12.0  # C^T z beyond this many standard deviations spoils a sample
UNIT = 2.0**-53
# exp() of anything below this neither overflows nor underflows in float64, with room to spare.
SAFE_EXPONENT = 300.0


def available() -> bool:
    """True if numba can be imported (optional extra ``fast``)."""
    return importlib.util.find_spec("numba") is not None


def check_available() -> None:
    """Raise ``ModuleNotFoundError`` where terms are to be made and numba is missing."""
    if not available():
        raise ModuleNotFoundError(
            "samples of b-min-sep sampling are drawn by compiled code, and numba is not installed: "
            "install dptrain[fast], or use accountant='min-sep-renyi', which draws none"
        )


def rounding_bound(
    law: MinSepLaw, sigma: float, *, copies: int = 1, held: float | None = None
) -> float:
    """Bound on what rounding takes from a loss drawn by the compiled or the tensor engine.

    *The statement.* Let the generator's words be independent and uniform. Then the losses drawn
    are coupled with exact ones of independent samples with the same participations, from which
    they differ by this bound at most, unless the sample is *spoiled*: it then counts as much as
    any sample can.

    *Draws.* A pair of exact normals is √(-2 log U)·(cos θ, sin θ), with U and the place of θ in its
    quarter uniform reals. Their 84 and 42 leading bits are the words drawn, which couples the two;
    the engine takes the middle of each cell. Unspoiled are 2^-48 ≤ U < 1 - 2^-48. Half a cell of U
    moves E = -log U by ≤ 2^-85 / 2^-48 = 2^-37, and R = √(2E) by ≤ 2^-37/8.1 = 9e-13 at the lower
    end, by less elsewhere (2^-85/(U R) falls with U, as U R rises up to U = e^{-1/2}; above √½ the
    cell has 64 bits, 1 - U ≥ 2^-48, and ΔE/R ≤ 2^-65/2^-23.5 < 4e-13). θ moves by ≤ (π/2) 2^-43,
    the normals by 8.16 times that, 1.46e-12. The series end within 1e-14 (the logarithm's first
    term left out is s^18/19 of it, s ≤ .172; sine's (π/4)^15/15!, cosine's (π/4)^16/16!): together,
    with float64's roundings, √(9e-13² + 1.46e-12²) + 3e-14·8.16 < 2e-12 = PAIR_ERROR.
    P(spoiled) < n 2^-47: it costs δ less than 1e-11 at n = 2,000 and is charged by itself.

    *From normals to losses.* log P/Q = log Σ_x Pr[x] e^{<Cx,z>/σ + terms without z}, a soft
    maximum: a change of z by Δ moves it by at most max_x <Cx, Δ>/σ ≤ sensitivity·‖Δ‖/σ, and
    ‖Δ‖ ≤ PAIR_ERROR √(pairs).

    *From exponents to losses.* Likewise an error ≤ e of each of the n exponents moves a loss by
    ≤ m e, m = ⌈n/b⌉ ≥ the participations of any pattern; and a relative error of each of the n
    positive steps f ← (1-p) f' + p e^u f'' adds up. With u the unit roundoff: C^T z, T products
    of normals ≤ 8.16, has an error ≤ (T+2) u ‖c‖₁ 8.16, times 1/σ (two roundings more); <c_i, Cx> ≤
    2‖c‖² has one ≤ (T'+4) u of it. Here T ≤ bands + 11 and T' = bands; the tensor engine's
    products of dense blocks of B = max(16, bands) rows have T ≤ 2B, T' ≤ 5B, zeros counted. With
    α ``copies`` of x the signal is a sum of α such terms. Where a direction is held, ``held``
    bounds what that adds to ‖Δ‖ (``held_error``), and normals reach 16. e^x,
    |x| ≤ X = 12 r + (2α + ½) r², r = ‖c‖/σ, has one of 1e-14 (the series goes on by less than
    (.347)^12/12! e^.35 ≤ 9e-15) plus 2 u X; a participation's weight one of 4 u (X + |log p| +
    b |log(1-p)|); a step 4 u, and in log space 8 u times the largest |log f|; renewals multiply by
    powers of two.
    The result is twice the sum.
    """
    u, rate = UNIT, abs(math.log(law.probability))
    norm, total = math.sqrt(float(law.squared_norms[0])), float(law.coefficients.sum())
    most, ratio = -(-law.steps // law.min_sep), norm / sigma
    largest = BREACH * ratio + (2.0 * copies + 0.5) * ratio**2
    gauge = abs(log_gauge(law.probability))
    moved = PAIR_ERROR * math.sqrt(law.steps / 2 + 1) + (held or 0.0)
    draws = law.sensitivity / sigma * moved
    normal = LARGEST_NORMAL if held is None else LARGEST_HELD
    product = (4 * law.block_rows + 15) * u * total * normal / sigma
    signal = (6 * law.block_rows + 15) * u * 2.0 * copies * ratio**2
    weight = 4.0 * u * (largest + rate + law.min_sep * gauge)
    exponent = product + signal + 1.2e-14 + 2.0 * u * largest + weight
    keep = abs(math.log1p(-law.probability)) if law.probability < 1.0 else 0.0
    magnitude = 1.0 + most * (largest + rate) + law.steps * keep
    step = 4.0 * u if interval(law, sigma, copies) else 8.0 * u * magnitude
    return 2.0 * (draws + most * exponent + law.steps * step + 16.0 * u * magnitude)


def log_gauge(probability: float) -> float:
    """log r of the linear recursion: r = 1-p, or 1 where p is above one half.

    Kept is g_i = f_i / r^{n-i}, for which the recursion of ``log_mixture`` reads
    g_i = ((1-p)/r) g_{i+1} + (p/r^b) exp(u_i - h_i) g_{i+b}: r = 1-p spares the first product.
    (Where 1-p is small its powers are not.)
    """
    return math.log1p(-probability) if probability <= 0.5 else 0.0


def interval(law: MinSepLaw, sigma: float, copies: int = 1) -> int:
    """Rows between two renewals of the scale; 0 where only the logarithmic recursion is safe.

    (docs/theory/min-sep.md#thm-min-sep-rescaling; ``test_losses_are_those_of_the_draws``.) Any
    pattern takes part at most once in b rows, so R = kb rows multiply f by at most k factors of
    size exp(±U), U bounding the exponents: noise within 12 standard deviations (a breach has
    probability 4e-33 an element and spoils the sample) plus a signal of at most 2‖c‖²/σ² for each
    of the ``copies`` of an example's participations that the outputs hold and the half norm, and
    the gauge adds r^{-b} a factor. Within the window, entries differ by (1-p)^b at worst and by the
    gauge once more; for p = 1 the b chains are separate and one that vanishes beside the others
    counts nothing, unless it is the only one asked for.
    """
    p, b = law.probability, law.min_sep
    norm, gauge = math.sqrt(float(law.squared_norms[0])), -b * log_gauge(p)
    bound = BREACH * norm / sigma + (2.0 * copies + 0.5) * (norm / sigma) ** 2 + gauge
    spread = 0.0
    if p < 1.0:
        spread = gauge - b * math.log1p(-p)
    elif b > 1 and not law.warm_start:
        return 0
    factors = int((SAFE_EXPONENT - spread) / bound) - 1
    return b * min(factors, 16) if factors >= 1 else 0


def kernel_pair(law: MinSepLaw, sigma: float, *, copies: int = 1) -> kernel.KernelPair:
    """The law at σ as ``engine_kernel.log_ratios`` reads it, for ``copies`` that take part."""
    from dptrain.accounting.min_sep import engine_kernel as kernel

    c, bands = law.coefficients, law.bands
    tail = -(-(bands + kernel.TILE - 1) // kernel.TAPS) * kernel.TAPS - bands
    padded = np.concatenate([np.zeros(kernel.TILE - 1), c, np.zeros(tail + kernel.TILE - 1)])
    scale, every = 1.0 / sigma, interval(law, sigma, copies)
    weights = math.log(law.probability) - scale**2 * (law.squared_norms / 2.0)
    if every > 0:
        weights = np.exp(weights - law.min_sep * log_gauge(law.probability))
    return kernel.KernelPair(
        steps=law.steps,
        min_sep=law.min_sep,
        probability=float(law.probability),
        warm=law.warm_start,
        padded=padded,
        bands=bands,
        cross=law.column_products,
        limit=BREACH * math.sqrt(float(law.squared_norms[0])),
        scale=scale,
        weights=weights,
        every=every,
    )


def generators(rng: np.random.Generator, blocks: int, lanes: int) -> npt.NDArray[np.uint64]:
    """States of xoshiro256++ for noise and participations: shape (2, blocks, 4 lanes)."""
    return rng.integers(0, 1 << 64, size=(2, blocks, 4 * lanes), dtype=np.uint64)


def held_rows(unit: Array) -> Array:
    """Argument of ``engine_kernel.log_ratios`` for drawing normals z with a given <unit, z> = g.

    Rows are drawn from the last to the first. With R what the rows up to i still have to give and
    S_i = Σ_{j≤i} unit_j², z_i has the conditional law N(unit_i R/S_i, S_{i-1}/S_i), and leaves
    R - unit_i z_i: together they have the law of N(0, I) given g
    (``test_a_direction_can_be_held``).

    Returns:
        unit, unit/S, √(S_{i-1}/S_i) of every row; shape (3, steps + 1), the last column
        LARGEST_HELD, beyond which a normal spoils its sample.
    """
    found = np.zeros((3, unit.size + 1))
    found[0, :-1], found[:, -1] = unit, LARGEST_HELD
    total = rest = 0.0
    for i, value in enumerate((unit**2).tolist()):
        # Neumaier's sum: every S_i to its last digit.
        before, exact = total + rest, total + value
        rest += (total - exact) + value if total >= value else (value - exact) + total
        total = exact
        after = total + rest
        if after == 0.0:
            found[2, i] = 1.0
        else:
            found[1, i], found[2, i] = unit[i] / after, math.sqrt(before / after)
    return found


def held_error(unit: Array) -> float:
    """Bound on the Euclidean error that ``held_rows`` adds to the normals of an unspoiled sample.

    The map from free normals and g to z is an isometry, so that it passes on their own errors as
    they are. Its coefficients err by 6 units u, a z_i, |z_i| ≤ 16, by λ = 300 u of its own, as its
    two terms are at most 16 + 8.16 and 8.16. With e_i the error of R, R ≤ 16 U_i, U_i = Σ_{j≤i}
    |unit_j|, and e_{i-1} = e_i S_{i-1}/S_i - unit_i λ_i + ν_i, |ν_i| ≤ 32 u (U_i + |unit_i|) from
    the rounding of the difference. So e_i/S_i ≤ Σ_{j>i} (|unit_j| λ + |ν_j|)/S_{j-1}, and z_i errs
    by |unit_i| times that, plus λ. The direction's own rounding turns z by 2 u √n at most, of a
    norm of at most 16 √n.
    """
    size, u = np.abs(unit), UNIT
    own, most = 300.0 * u, np.cumsum(size)
    squares = np.cumsum(size**2)
    before = np.concatenate([[0.0], squares[:-1]])
    new = size * own + 32.0 * u * (most + size)
    drift = np.divide(new, before, out=np.zeros_like(new), where=before > 0.0)
    later = np.cumsum(drift[::-1])[::-1] - drift  # of the rows after i
    n = unit.size
    error = np.linalg.norm(size * later) + own * math.sqrt(n) + 32.0 * u * n
    return float(error) * (1.0 + 1e-9)


def losses_along(
    law: MinSepLaw, sigma: float, unit: Array, rng: np.random.Generator, along: Array
) -> Array:
    """Add-direction losses log Q/P of y = σz, z standard normal but that <unit, z> = along.

    They are raised by the bound on their rounding, and +∞ where a sample is spoiled: shape (k,).
    """
    from dptrain.accounting.min_sep import engine_kernel as kernel

    size, lanes = along.size, kernel.LANES
    blocks = -(-size // lanes)
    noise = generators(rng, blocks, lanes)[0]
    pair = kernel_pair(law, sigma)
    targets = np.zeros(blocks * lanes)
    targets[:size] = along
    held, found = held_rows(unit), np.empty(blocks * lanes)
    times, none = np.empty((0, lanes), dtype=np.int32), np.zeros(lanes, dtype=np.int64)
    for block in range(blocks):
        place = slice(block * lanes, (block + 1) * lanes)
        spoiled = np.zeros(lanes, dtype=np.int64)
        kernel.log_ratios(
            noise[block], times, none, spoiled, targets[place], held, pair, found[place]
        )
    bound = rounding_bound(law, sigma, held=held_error(unit))
    return np.where(np.isnan(found), np.inf, bound - found)[:size]


NOTHING_HELD = (np.empty(0), np.empty((3, 0)))
