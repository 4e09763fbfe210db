"""Compiled draws and recursion of b-min-sep losses: normals, filter, exponential, recursion fused.

LANES examples advance together, row by row from the last to the first, and nothing leaves the
caches. Everything is float64. What is rounded, and why a loss is none the smaller for it, is stated
and proved in ``dptrain.accounting.min_sep.engine_compiled``; contraction to fused multiply-adds is
the only liberty the compiler has, and it only drops roundings.

All compiled functions are in this one file because a cached kernel is renewed when its own file
changes, not when a function it calls does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

LANES = 128  # a multiple of any vector's width; 16 bands work on 150 kB
ROWS = 16  # least number of rows filtered together; a multiple of TILE
TILE, TAPS = 4, 8  # rows and coefficients of one pass of the filter

U = np.uint64
_ANGLE_BITS, _EXTRA_BITS = 42, 20
_SIGN, _SWAP = U(1 << 63), U(1 << 62)
_EDGE, _BOTH_EDGES = U(1 << 16), U(1 << 17)
_ROOT_HALF = np.int64(np.float64(math.sqrt(0.5)).view(np.int64))
_LN2 = math.log(2.0)
_LN2_HIGH = 6.93147180369123816490e-01  # its last 21 bits are zero: k _LN2_HIGH is exact
_LN2_LOW = 1.90821492927058770002e-10
_ROUND = 1.5 * 2.0**52  # adding and subtracting it rounds to an integer


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    options: dict[str, Any] = dict(nogil=True, fastmath={"contract"}, error_model="numpy")
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return njit(**options)(function)


class KernelPair(NamedTuple):
    """The pair P, Q at one σ, as the kernel reads it.

    numba's files of compiled code hold the name of this class. If it is renamed or moved, the next
    version cannot read the files that an earlier one left, and fails.

    Attributes:
        steps, min_sep, probability, warm: n, b, p and the start of the law.
        padded: the coefficients between zeros, see ``_filter``; ``bands`` of them.
        cross: [k, d] = Σ_{j<k} c_j c_{j+d}.
        limit: a lane is spoiled where a row of C^T z exceeds it.
        scale: 1/σ.
        weights: of a participation at each step, shape (steps,); logarithms where ``every`` is 0.
        every: rows between two renewals of the scale; 0: only the logarithmic recursion is safe.
    """

    steps: int
    min_sep: int
    probability: float
    warm: bool
    padded: npt.NDArray[np.float64]
    bands: int
    cross: npt.NDArray[np.float64]
    limit: float
    scale: float
    weights: npt.NDArray[np.float64]
    every: int


@intrinsic
def _as_float(typingctx: Any, word: Any) -> Any:
    return types.float64(word), lambda c, b, s, args: b.bitcast(args[0], ir.DoubleType())


@intrinsic
def _as_int(typingctx: Any, value: Any) -> Any:
    return types.int64(value), lambda c, b, s, args: b.bitcast(args[0], ir.IntType(64))


@_compile
def _rotl(x, k):  # type: ignore[no-untyped-def]
    return (x << U(k)) | (x >> U(64 - k))


@_compile
def _next(a, b, c, d):  # type: ignore[no-untyped-def]
    """A word of xoshiro256++ (Blackman & Vigna 2021) and the next state."""
    word = _rotl(a + d, 23) + a
    t = b << U(17)
    c ^= a
    d ^= b
    b ^= c
    a ^= d
    c ^= t
    return word, a, b, c, _rotl(d, 45)


@_compile
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x for |x| ≤ 700: Taylor's series to degree 11 on |r| ≤ (log 2)/2."""
    t = x * 1.4426950408889634 + _ROUND
    k = t - _ROUND
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    q = 1 / 3628800.0 + r * (1 / 39916800.0)
    q = 1 / 720.0 + r * (1 / 5040.0 + r * (1 / 40320.0 + r * (1 / 362880.0 + r * q)))
    q = 1.0 + r * (1.0 + r * (1 / 2.0 + r * (1 / 6.0 + r * (1 / 24.0 + r * (1 / 120.0 + r * q)))))
    return _as_float(_as_int(q) + (_as_int(t) << np.int64(52)))


@_compile
def normals(state, rows, spoiled):  # type: ignore[no-untyped-def]
    """Two rows of normals from two words a lane.

    Box-Muller: radius √(-2 log U), U of 84 bits, angle of 42 bits within a quarter of the circle,
    the quarter by a sign and an exchange. A lane whose U is near 0 or 1 is marked as spoiled.
    """
    for i in range(LANES):
        a, b = state[i], state[LANES + i]
        first, a, b, c, d = _next(a, b, state[2 * LANES + i], state[3 * LANES + i])
        second, a, b, c, d = _next(a, b, c, d)
        state[i], state[LANES + i], state[2 * LANES + i], state[3 * LANES + i] = a, b, c, d

        spoiled[i] |= np.int64(first + _EDGE < _BOTH_EDGES)
        # log U = k log 2 + log(1 + f); where k = 0, f comes from 1 - U, which is more precise.
        extra = np.float64(np.int64(second & U((1 << _EXTRA_BITS) - 1))) + 0.5
        u = np.float64(first) * 2.0**-64 + extra * 2.0**-84
        bits = _as_int(u)
        k = (bits - _ROOT_HALF) >> np.int64(52)
        f = _as_float(bits - (k << np.int64(52))) - 1.0
        near_one = (np.float64(np.int64(first)) + 0.5) * 2.0**-64
        f = near_one if k == 0 else f
        s = f / (2.0 + f)
        v = s * s
        p = 1 / 9.0 + v * (1 / 11.0 + v * (1 / 13.0 + v * (1 / 15.0 + v * (1 / 17.0))))
        p = 1.0 + v * (1 / 3.0 + v * (1 / 5.0 + v * (1 / 7.0 + v * p)))
        radius = math.sqrt(-2.0 * (np.float64(k) * _LN2 + 2.0 * s * p))
        radius = _as_float(_as_int(radius) ^ np.int64(second & _SIGN))

        turn = np.int64((second >> U(_EXTRA_BITS)) & U((1 << _ANGLE_BITS) - 1))
        angle = (np.float64(turn) + (0.5 - 2.0**41)) * (math.pi / 2 * 2.0**-42)
        v = angle * angle
        p = 1 / 362880.0 + v * (-1 / 39916800.0 + v * (1 / 6227020800.0))
        p = v * (-1 / 6.0 + v * (1 / 120.0 + v * (-1 / 5040.0 + v * p)))
        sine = p * angle + angle
        p = 1 / 40320.0 + v * (-1 / 3628800.0 + v * (1 / 479001600.0 + v * (-1 / 87178291200.0)))
        cosine = 1.0 + v * (-1 / 2.0 + v * (1 / 24.0 + v * (-1 / 720.0 + v * p)))
        swap = (second & _SWAP) != U(0)
        rows[i] = radius * (sine if swap else cosine)
        rows[LANES + i] = radius * (cosine if swap else sine)


@_compile
def _tile(noise, out, c, keep):  # type: ignore[no-untyped-def]
    """Add TAPS rows of noise to TILE rows of the product, as far as coefficients reach."""
    c0, c1, c2, c3, c4, c5 = c[0], c[1], c[2], c[3], c[4], c[5]
    c6, c7, c8, c9, c10 = c[6], c[7], c[8], c[9], c[10]
    n = LANES
    for i in range(n):
        z0, z1, z2, z3 = noise[i], noise[n + i], noise[2 * n + i], noise[3 * n + i]
        z4, z5, z6, z7 = noise[4 * n + i], noise[5 * n + i], noise[6 * n + i], noise[7 * n + i]
        three = c0 * z0 + c1 * z1 + c2 * z2 + c3 * z3 + c4 * z4 + c5 * z5 + c6 * z6 + c7 * z7
        two = c1 * z0 + c2 * z1 + c3 * z2 + c4 * z3 + c5 * z4 + c6 * z5 + c7 * z6 + c8 * z7
        one = c2 * z0 + c3 * z1 + c4 * z2 + c5 * z3 + c6 * z4 + c7 * z5 + c8 * z6 + c9 * z7
        zero = c3 * z0 + c4 * z1 + c5 * z2 + c6 * z3 + c7 * z4 + c8 * z5 + c9 * z6 + c10 * z7
        out[3 * n + i] = keep * out[3 * n + i] + three
        out[2 * n + i] = keep * out[2 * n + i] + two
        out[n + i] = keep * out[n + i] + one
        out[i] = keep * out[i] + zero


@_compile
def _filter(noise, padded, rows, out):  # type: ignore[no-untyped-def]
    """out_r = Σ_k c_k noise_{r+k}; ``padded`` is c between zeros."""
    for r in range(0, rows, TILE):
        for m in range(0, padded.size - TAPS - TILE + 1, TAPS):
            low, high = (r + m) * LANES, (r + m + TAPS) * LANES
            tile = out[r * LANES : (r + TILE) * LANES]
            _tile(noise[low:high], tile, padded[m : m + TAPS + TILE - 1], 0.0 if m == 0 else 1.0)


@_compile
def _add_signal(start, rows, steps, bands, cross, times, left, out):  # type: ignore[no-untyped-def]
    """Rows start, …, start+rows-1 of C^T C x; left[lane] events may still be seen."""
    out[:] = 0.0
    for lane in range(LANES):
        seen = left[lane]
        while seen > 0 and times[seen - 1, lane] >= start + rows + bands - 1:
            seen -= 1
        left[lane] = seen
        while seen > 0 and times[seen - 1, lane] > start - bands:
            seen -= 1
            t = np.int64(times[seen, lane])
            for i in range(max(start, t - bands + 1, 0), min(start + rows, t + bands, steps)):
                cut = min(bands, steps - max(i, t))  # the end of C cuts the later column
                out[(i - start) * LANES + lane] += cross[cut, abs(i - t)]


@_compile
def _hold(row, left, unit, lean, spread, limit, spoiled):  # type: ignore[no-untyped-def]
    """Turn free normals of a row into those whose remaining products with ``unit`` give left."""
    for i in range(LANES):
        z = lean * left[i] + spread * row[i]
        left[i] -= unit * z
        row[i] = z
        spoiled[i] |= np.int64(not abs(z) <= limit)


@_compile
def _mark(values, limit, spoiled):  # type: ignore[no-untyped-def]
    for i in range(LANES):
        spoiled[i] |= np.int64(not abs(values[i]) <= limit)


@_compile
def _linear(product, signal, scale, weight, keep, after, current):  # type: ignore[no-untyped-def]
    for i in range(LANES):
        x = scale * product[i] + scale * scale * signal[i]
        current[i] = keep * after[i] + weight * _exp(x) * current[i]


@_compile
def _logarithmic(product, signal, scale, weight, keep, after, current):  # type: ignore[no-untyped-def]
    for i in range(LANES):
        x = scale * product[i] + scale * scale * signal[i]
        taken, kept = weight + x + current[i], keep + after[i]
        high, low = max(taken, kept), min(taken, kept)
        current[i] = high + math.log1p(math.exp(low - high))


@_compile
def _rescale(window, min_sep, top, exponents):  # type: ignore[no-untyped-def]
    """Divide every lane by the power of two below its largest value: exact."""
    top[:] = 0.0
    for j in range(min_sep):
        row = window[j * LANES : (j + 1) * LANES]
        for i in range(LANES):
            top[i] = max(top[i], row[i])
    for i in range(LANES):
        k = (_as_int(top[i]) >> np.int64(52)) - np.int64(1023)
        exponents[i] += k
        top[i] = _as_float((np.int64(1023) - k) << np.int64(52))
    for j in range(min_sep):
        row = window[j * LANES : (j + 1) * LANES]
        for i in range(LANES):
            row[i] *= top[i]


@_compile
def _ratio(window, exponents, min_sep, probability, warm, log_gauge, steps, linear, out):  # type: ignore[no-untyped-def]
    """log P/Q of every lane once row 0 has been consumed."""
    for i in range(LANES):
        if linear:
            total = window[i]
            for j in range(1, min_sep if warm else 1):
                total += probability * math.exp(-j * log_gauge) * window[j * LANES + i]
            out[i] = math.log(total) + exponents[i] * _LN2 + steps * log_gauge
        else:
            top = window[i]
            for j in range(1, min_sep if warm else 1):
                top = max(top, window[j * LANES + i])
            total = math.exp(window[i] - top)
            for j in range(1, min_sep if warm else 1):
                total += probability * math.exp(window[j * LANES + i] - top)
            out[i] = math.log(total) + top
        if warm:
            out[i] -= math.log1p((min_sep - 1) * probability)


@_compile
def log_ratios(noise_state, times, left, spoiled, along, held, pair, out):  # type: ignore[no-untyped-def]
    """Write log P/Q of drawn outputs, NaN where a lane is spoiled: shape (lanes,).

    Args:
        noise_state: generators of one block of LANES.
        times: participation times of the lanes, ``left`` of them each, ascending; one that stands
            twice counts twice. No rows: the outputs are noise alone. ``spoiled``: lanes that are
            spoiled already. Both are overwritten.
        along: products of the lanes' noise with a direction that is held fixed; overwritten.
        held: of each row the direction's unit vector, what a lane leans by and what is left of its
            spread, and in the last place the limit of a normal, see ``held_rows``; no columns where
            no direction is held.
        pair: see ``KernelPair``.
    """
    steps, min_sep, probability, bands = pair.steps, pair.min_sep, pair.probability, pair.bands
    scale, weights, every = pair.scale, pair.weights, pair.every
    rows = max(ROWS, -(-bands // TILE) * TILE)
    halo, size = (bands - 1) * LANES, rows * LANES
    noise = np.zeros(size + (pair.padded.size - TILE + 1) * LANES)
    # Zeros, not np.empty: a first pass of the filter multiplies the old product by nought.
    product, signal = np.zeros(size), np.zeros(size)
    window, exponents = np.empty(min_sep * LANES), np.zeros(LANES, dtype=np.int64)
    after, top = np.empty(LANES), np.empty(LANES)
    linear, log_gauge = every > 0, math.log1p(-probability) if probability <= 0.5 else 0.0
    keep = 1.0 if probability <= 0.5 else 1.0 - probability
    if not linear:
        keep = math.log1p(-probability) if probability < 1.0 else -math.inf
    for j in range(min_sep):  # g_{n+j} = r^j, f_{n+j} = 1
        place = (steps + j) % min_sep * LANES
        window[place : place + LANES] = math.exp(j * log_gauge) if linear else 0.0

    for start in range(steps - rows, -rows, -rows):
        noise[size : size + halo] = noise[:halo]
        first = max(0, -start)
        for i in range(first - first % 2, rows, 2):
            normals(noise_state, noise[i * LANES : (i + 2) * LANES], spoiled)
        for i in range(rows - 1, (first if held.shape[1] else rows) - 1, -1):
            unit, lean, spread = held[0, start + i], held[1, start + i], held[2, start + i]
            row = noise[i * LANES : (i + 1) * LANES]
            _hold(row, along, unit, lean, spread, held[0, steps], spoiled)
        _filter(noise, pair.padded, rows, product)
        for i in range(first, rows):
            _mark(product[i * LANES : (i + 1) * LANES], pair.limit, spoiled)
        if times.shape[0]:
            _add_signal(start, rows, steps, bands, pair.cross, times, left, signal)
        for i in range(rows - 1, first - 1, -1):
            low, row = i * LANES, start + i
            place, place_after = row % min_sep * LANES, (row + 1) % min_sep * LANES
            after[:] = window[place_after : place_after + LANES]
            x, y = product[low : low + LANES], signal[low : low + LANES]
            current = window[place : place + LANES]
            if linear:
                _linear(x, y, scale, weights[row], keep, after, current)
                if (steps - row) % every == 0:
                    _rescale(window, min_sep, top, exponents)
            else:
                _logarithmic(x, y, scale, weights[row], keep, after, current)
    _ratio(window, exponents, min_sep, probability, pair.warm, log_gauge, steps, linear, out)
    for i in range(LANES):
        if spoiled[i] != 0:
            out[i] = math.nan


@_compile
def _place(waits):  # type: ignore[no-untyped-def]
    """Number of a state among those with a free copy: waits ascending, the first of them 0.

    Σ_k C(w_k + k - 1, k) over k ≥ 1.
    """
    if waits.size == 2:
        return waits[1]
    if waits.size == 3:
        return waits[1] + waits[2] * (waits[2] + 1) // 2
    place = waits[1] + waits[2] * (waits[2] + 1) // 2 if waits.size > 3 else 0
    for k in range(3, waits.size):
        count = waits[k] * (waits[k] + 1) * (waits[k] + 2) // 6
        for i in range(3, k):
            count = count * (waits[k] + i) // (i + 1)
        place += count
    return place


@_compile
def _act(waits, free, taking, min_sep, after):  # type: ignore[no-untyped-def]
    """Write the waits once ``taking`` of the free copies took part; steps until one is free."""
    order = waits.size
    for k in range(free - taking):
        after[k] = 0
    for k in range(free, order):
        after[k - taking] = waits[k] - 1
    for k in range(order - taking, order):
        after[k] = min_sep - 1
    rest = after[0]
    for k in range(order):
        after[k] -= rest
    return 1 + rest


# fmt: off
@_compile
def _choices(  # type: ignore[no-untyped-def]
    waits, t, steps, min_sep, gram, chances, levels, level_of, log_scale, after, weights,
):
    # fmt: on
    """Write the weights of 0, 1, … participations at t, relative to the scale of t + 1.

    Returns the number of free copies.
    """
    order = waits.size
    free, overlap = 0, 0.0
    for k in range(order):
        if waits[k] == 0:
            free += 1
        else:
            overlap += gram[min_sep - waits[k]]
    for taking in range(free + 1):
        then = min(t + _act(waits, free, taking, min_sep, after), steps)
        message = 1.0 if then == steps else levels[level_of[then], _place(after)]
        if then > t + 1:
            message *= math.exp(log_scale[then] - log_scale[t + 1])
        exponent = taking * (taking - 1) / 2.0 * gram[0] + taking * overlap
        weights[taking] = chances[free, taking] * math.exp(exponent) * message
    return free


# fmt: off
@_compile
def _one_free(  # type: ignore[no-untyped-def]
    t, order, steps, min_sep, pulls, chances, levels, level_of, log_scale, out,
):
    # fmt: on
    """Messages of the states of 2, 3 or 4 copies of which one is free: it rests or takes part.

    If it takes part nothing is free until the next copy is, so all states of one first wait need
    one later level, from which runs of numbers are read.
    """
    after, keep = levels[level_of[t + 1]], chances[1, 0]
    for first in range(1, min_sep):
        then = min(t + first, steps)
        row, late = levels[level_of[then]], min_sep - first
        factor = chances[1, 1] * pulls[late] * math.exp(log_scale[then] - log_scale[t + 1])
        if order == 2:
            out[first] = keep * after[first - 1] + factor * row[late]
            continue
        two, three = late * (late + 1) // 2, late * (late + 1) * (late + 2) // 6
        if order == 3:
            for w in range(first, min_sep):
                here, rest = first + w * (w + 1) // 2, first - 1 + w * (w - 1) // 2
                pull = factor * pulls[min_sep - w]
                out[here] = keep * after[rest] + pull * row[w - first + two]
            continue
        for v in range(first, min_sep):
            middle, pulled = v - first, factor * pulls[min_sep - v]
            here, rest = first + v * (v + 1) // 2, first - 1 + v * (v - 1) // 2
            for w in range(v, min_sep):
                cube = w * (w + 1) * (w + 2) // 6
                below = cube - w * (w + 1) // 2
                gap = w - first
                value = pulled * pulls[min_sep - w] * row[middle + gap * (gap + 1) // 2 + three]
                out[here + cube] = keep * after[rest + below] + value


# fmt: off
@_compile
def tilted_level(  # type: ignore[no-untyped-def]
    t, order, steps, min_sep, gram, chances, levels, level_of, log_scale, out,
):
    # fmt: on
    """Write the messages of step t, one for each state with a free copy, from those after it."""
    fixed = 1
    if 2 <= order <= 4:
        _one_free(
            t, order, steps, min_sep, np.exp(gram), chances, levels, level_of, log_scale, out
        )
        fixed = 2  # what is left are states with two free copies or more: the second wait is 0 too
    waits, after = np.zeros(order, dtype=np.int64), np.empty(order, dtype=np.int64)
    weights = np.empty(order + 1)
    while True:
        free = _choices(
            waits, t, steps, min_sep, gram, chances, levels, level_of, log_scale, after, weights
        )
        total = 0.0
        for taking in range(free + 1):
            total += weights[taking]
        out[_place(waits)] = total
        k = fixed
        while k < order - 1 and waits[k] == waits[k + 1]:
            waits[k] = 0
            k += 1
        if k >= order or waits[k] == min_sep - 1:
            break
        waits[k] += 1


@_compile
def _uniform(state, lane):  # type: ignore[no-untyped-def]
    a, b = state[lane], state[LANES + lane]
    word, a, b, c, d = _next(a, b, state[2 * LANES + lane], state[3 * LANES + lane])
    state[lane], state[LANES + lane] = a, b
    state[2 * LANES + lane], state[3 * LANES + lane] = c, d
    return (np.float64(word >> U(11)) + 0.5) * 2.0**-53


# fmt: off
@_compile
def _stay(  # type: ignore[no-untyped-def]
    waits, free, k, t, log_keep, levels, level_of, log_scale, after,
):
    # fmt: on
    """Chance that none of the free copies takes part for k more steps, none becoming free before.

    (1-p)^{fk} times the later message over the one of now: all between them cancel.
    """
    for i in range(waits.size):
        after[i] = 0 if i < free else waits[i] - k
    change = levels[level_of[t + k], _place(after)] / levels[level_of[t], _place(waits)]
    return change * math.exp(log_keep * (free * k) + log_scale[t + k] - log_scale[t])


# fmt: off
@_compile
def tilted_participations(  # type: ignore[no-untyped-def]
    first, steps, min_sep, grams, gram_of, chances, levels, level_of, log_scale, log_quiet, state,
    times, counts,
):
    # fmt: on
    """Participation times of all copies of LANES tuples, drawn from their tilted law.

    While nobody takes part the state only ages, so that the step of the next participation, or that
    there is none before another copy is free, is drawn at once.

    Args:
        first: waits before step 0, ascending, shape (LANES, order).
        grams: rows of <c_t, c_{t-d}>/σ², ``gram_of[t]`` that of step t.
        chances: [f, j] = C(f, j) p^j (1-p)^{f-j}.
        levels: messages, ``level_of[t]`` those of step t, up to the factor e^{log_scale[t]}.
        log_quiet: [t] = logarithm of the chance that no copy takes part before step t, if all are
            free from step 0 on; shape (steps + 1,).
        times: written: ascending, a time for each copy that takes part then, ``counts[lane]``.
    """
    order = first.shape[1]
    waits, after = np.empty(order, dtype=np.int64), np.empty(order, dtype=np.int64)
    weights = np.empty(order + 1)
    log_keep = math.log(chances[1, 0]) if chances[1, 0] > 0.0 else -800.0
    for lane in range(LANES):
        t, count = first[lane, 0], 0
        for k in range(order):
            waits[k] = first[lane, k] - t
        while t < steps:
            if waits[order - 1] == 0:  # all are free
                end = log_quiet[t] + math.log(_uniform(state, lane))
                if log_quiet[steps] >= end:
                    break
                high = steps  # the first with log_quiet[high] < end is in t+1, ..., high
                while high - t > 1:
                    middle = (t + high) // 2
                    if log_quiet[middle] < end:
                        high = middle
                    else:
                        t = middle
            else:
                free = 1
                while waits[free] == 0:
                    free += 1
                high, u = min(waits[free], steps - t), _uniform(state, lane)
                stays = u < _stay(
                    waits, free, high, t, log_keep, levels, level_of, log_scale, after
                )
                low = high if stays else 0  # else the first k with a chance ≤ u is in low+1..high
                while high - low > 1:
                    k = (low + high) // 2
                    chance = _stay(waits, free, k, t, log_keep, levels, level_of, log_scale, after)
                    low, high = (k, high) if u < chance else (low, k)
                t += low
                for k in range(free, order):
                    waits[k] -= low
                if stays:
                    continue
            free = _choices(
                waits, t, steps, min_sep, grams[gram_of[t]], chances, levels, level_of, log_scale,
                after, weights,
            )  # fmt: skip
            total = 0.0
            for taking in range(1, free + 1):
                total += weights[taking]
            chosen = 1
            left = _uniform(state, lane) * total - weights[1]
            while left >= 0.0 and chosen < free:
                chosen += 1
                left -= weights[chosen]
            for _ in range(chosen):
                times[count, lane] = np.int32(t)
                count += 1
            t += _act(waits, free, chosen, min_sep, after)
            waits[:] = after
        counts[lane] = count
