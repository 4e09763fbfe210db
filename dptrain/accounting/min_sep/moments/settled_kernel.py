"""Compiled sweeps for settled messages of b-min-sep sampling, and weights of what they draw.

A state of α = 2, 3 or 4 copies is the waits of the others beside one free copy, ascending. Its
number is that of ``engine_kernel``: w, v + w(w+1)/2, or u + v(v+1)/2 + w(w+1)(w+2)/6; ageing
leads to smaller ones. Nothing here calls a function of another file, see there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    options: dict[str, Any] = dict(nogil=True, fastmath={"contract"}, error_model="numpy")
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return njit(**options)(function)


@_compile
def place(waits, rest):  # type: ignore[no-untyped-def]
    """Number of the state ``waits`` - rest: waits ascending, the first of them equal to rest."""
    number = waits[1] - rest
    if waits.size > 2:
        w = waits[2] - rest
        number += w * (w + 1) // 2
    if waits.size > 3:
        w = waits[3] - rest
        number += w * (w + 1) * (w + 2) // 6
    return number


@_compile
def _joining(waits, min_sep, chances, gram, powers, h, after):  # type: ignore[no-untyped-def]
    """Σ over j ≥ 1 free copies that take part of weight times message, for any state."""
    order, free, overlap, total = waits.size, 0, 0.0, 0.0
    for k in range(order):
        if waits[k] == 0:
            free += 1
        else:
            overlap += gram[min_sep - waits[k]]
    for taking in range(1, free + 1):
        for k in range(free - taking):
            after[k] = 0
        for k in range(free, order):
            after[k - taking] = waits[k] - 1
        for k in range(order - taking, order):
            after[k] = min_sep - 1
        rest = after[0]
        exponent = taking * (taking - 1) / 2.0 * gram[0] + taking * overlap
        weight = chances[free, taking] * math.exp(exponent)
        total += weight * powers[rest] * h[place(after, rest)]
    return total


@_compile
def join(order, min_sep, chances, gram, growth, h, part):  # type: ignore[no-untyped-def]
    """Write what participation adds to the message of every state, messages being ``h``.

    A state without a free copy has the message of the state that it waits for, divided by
    ``growth`` for each step of the wait.

    Args:
        chances: [f, j] = C(f, j) p^j (1-p)^{f-j}.
        gram: <c_t, c_{t-d}>/σ², d = 0..b-1.
        h, part: shape (states,).
    """
    waits, after = np.zeros(order, dtype=np.int64), np.empty(order, dtype=np.int64)
    powers, pulls = np.empty(min_sep + 1), np.empty(min_sep + 1)
    for s in range(min_sep + 1):
        powers[s] = math.exp(-s * math.log(growth))
        pulls[s] = chances[1, 1] * math.exp(gram[s]) if s < min_sep else 0.0
    p, k = chances[1, 1], 0
    for w in range(min_sep):
        waits[order - 1] = w
        if order == 2:
            if w == 0:
                part[k] = _joining(waits, min_sep, chances, gram, powers, h, after)
            else:
                part[k] = pulls[min_sep - w] * powers[w - 1] * h[min_sep - w]
            k += 1
            continue
        # Two copies or more are free: the second wait is 0.
        for v in range(w + 1 if order == 4 else 1):
            waits[order - 2] = v
            at = k + v * (v + 1) // 2
            part[at] = _joining(waits, min_sep, chances, gram, powers, h, after)
        # One is, and the others wait u ≤ … ≤ w. If it takes part, then after u steps one has b-u.
        for u in range(1, w + 1):
            late, gap = min_sep - u, w - u
            factor = pulls[min_sep - w] * powers[u - 1] / p
            if order == 3:
                part[k + u] = factor * pulls[late] * h[gap + late * (late + 1) // 2]
                continue
            # v varies fastest: what is read lies in a row, in the largest of the arrays.
            first = gap * (gap + 1) // 2 + late * (late + 1) * (late + 2) // 6
            factor *= pulls[late] / p
            for v in range(u, w + 1):
                part[k + v * (v + 1) // 2 + u] = factor * pulls[min_sep - v] * h[first + v - u]
        k += w + 1 if order == 3 else (w + 1) * (w + 2) // 2


@_compile
def _row(stay, below, part, factor, out):  # type: ignore[no-untyped-def]
    for i in range(part.size):
        out[i] = (stay * below[i] + part[i]) * factor


@_compile
def age(order, min_sep, stay, part, factor, h, out):  # type: ignore[no-untyped-def]
    """Write (Th) times ``factor`` for all states but the first, from what participation adds.

    ``out`` may be ``h``: then each value is made from that of the state it ages to, new already.

    Args:
        stay: [f] = (1-p)^f.
    """
    k = 1
    for w in range(1, min_sep):
        if order == 2:
            out[w] = (stay[1] * h[w - 1] + part[w]) * factor
            continue
        for v in range(w + 1 if order == 4 else 1):
            # A row of states that differ in their least wait, 0 at first.
            last = v if order == 4 else w
            free = 2 if order == 3 or v > 0 else 3
            below = k - (v + w * (w + 1) // 2 if order == 4 else w)
            out[k] = (stay[free] * h[below] + part[k]) * factor
            _row(
                stay[1], h[below : below + last], part[k + 1 : k + 1 + last], factor,
                out[k + 1 : k + 1 + last],
            )  # fmt: skip
            k += last + 1


@_compile
def growths(part, h):  # type: ignore[no-untyped-def]
    """The least and the largest of part/h."""
    low, high = math.inf, 0.0
    for i in range(h.size):
        ratio = part[i] / h[i]
        low, high = min(low, ratio), max(high, ratio)
    return low, high


@_compile
def start_total(order, min_sep, p, growth, h):  # type: ignore[no-untyped-def]
    """Σ over warm starts of h times their chance, times (1 + (b-1)p)^α.

    A copy is free with weight 1 and barred for each of 1..b-1 steps with weight p. A start without
    a free copy waits m steps for a state whose waits are m less.
    """
    waiting = np.zeros(min_sep)  # Σ over m = 1..r of what waiting m steps divides by
    for r in range(1, min_sep):
        waiting[r] = waiting[r - 1] + math.exp(-r * math.log(growth))
    waits, total, k = np.zeros(order, dtype=np.int64), 0.0, 0
    for w in range(min_sep):
        waits[order - 1] = w
        barred, some = p**order * waiting[min_sep - 1 - w], 0.0
        for v in range(w + 1 if order > 2 else 1):
            if order > 2:
                waits[order - 2] = v
            for u in range(v + 1 if order > 3 else 1):
                if order > 3:
                    waits[1] = u
                ways, run, free = 1.0, 1, 1
                for i in range(1, order):
                    run = run + 1 if waits[i] == waits[i - 1] else 1
                    ways *= (i + 1.0) / run
                    free += waits[i] == 0
                some += ways * h[k] * (p ** (order - free) + barred)
                k += 1
        total += some
    return total


# fmt: off
@_compile
def log_weights(  # type: ignore[no-untyped-def]
    first, steps, min_sep, bands, products, h, log_growth, times, counts, out,
):
    # fmt: on
    """Write the logarithm of the weight of what was drawn by settled messages.

    It is minus what the settled chain counted and the run has not: overlaps with participations
    before step 0, and what the end of C cuts off; and minus log h of the state at the end.

    Args:
        first: waits before step 0, shape (lanes, order).
        products: [k, d] = Σ_{j<k} c_j c_{j+d}/σ².
        times, counts: as ``tilted_participations`` writes them, times below n only.
        out: shape (lanes,).
    """
    order = first.shape[1]
    waits = np.empty(order, dtype=np.int64)
    for lane in range(first.shape[0]):
        count, lost = counts[lane], 0.0
        for k in range(order):
            if first[lane, k] > 0:
                for i in range(count):
                    d = times[i, lane] + min_sep - first[lane, k]
                    if d >= bands:
                        break
                    lost += products[bands, d]
        for i in range(count - 1, -1, -1):
            left = steps - times[i, lane]
            if left >= bands:
                break
            for j in range(i - 1, -1, -1):
                d = times[i, lane] - times[j, lane]
                if d >= bands:
                    break
                lost += products[bands, d] - products[left, d]
        for k in range(order):
            i = count - order + k
            waits[k] = max(times[i, lane] - (steps - min_sep), 0) if i >= 0 else 0
        rest = waits[0]
        out[lane] = rest * log_growth - lost - math.log(h[place(waits, rest)])
