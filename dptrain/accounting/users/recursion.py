"""P/Q of a ``UserLaw``, by a program over the user's chain."""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.accounting.users.law import UserLaw
from dptrain.core import Array, checks

Codes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

# exp() of anything below this neither overflows nor underflows in float64, with room to spare.
_SAFE = 600.0
_BLOCK = 64  # lanes whose states stay in the fastest cache


def log_ratio(
    law: UserLaw,
    examples: int,
    exponents: Array,
    half_norms: Array,
    codes: Codes,
    *,
    rescale_every: int | None,
) -> Array:
    """log P/Q given the public information, shape (lanes,).

    Let F_t(c) be the ratio of rows t, t+1, … if the next c steps are barred, P_j the chance of
    j draws at step t (Bin(k', p), or certainty at an exposed step), L_j = exp(j u_t - j² h_t) with
    u_t = <c_t, y>/σ² and h_t = ‖c_t‖²/(2σ²). From F_n = 1 down, under ``"sampling"``,

        F_t(0) = P_0 F_{t+1}(0) + Σ_{j≥1} P_j L_j F_{t+1}(b-1)
        F_t(c) = P_0 F_{t+1}(c-1) + (1 - P_0) F_{t+1}(b-1),

    and F_t(c) = F_{t+1}(c-1), c ≥ 1, under ``"participation"``. Participations are at least
    b ≥ bands steps apart, so they touch different rows of y and their ratios multiply.

    Args:
        examples: k'.
        exponents: u_t, shape (steps, lanes); overwritten.
        half_norms: h_t, shape (steps,).
        codes: 0 for a hidden step, 1 + r_t for an exposed one, shape (steps, lanes).
        rescale_every: rows between renewals of the scale, or ``None`` for log space; see
            ``rescale_interval``.
    """
    start = law.start(examples)
    mass = law.mass(examples)
    sampling = law.exclusion == "sampling"
    if rescale_every is None or not compiles():
        return _log_space(exponents, half_norms, codes, mass, start, law.min_sep, sampling)
    np.exp(exponents, out=exponents)
    j = np.arange(examples + 1)
    factors = np.exp(-np.outer(half_norms, j * j))  # L_j = (e^u)^j e^{-j² h}
    result = np.empty(exponents.shape[1])
    compiled(_linear)(
        exponents, factors, codes, mass, start, law.min_sep, sampling, rescale_every, result
    )
    checks.invariant(
        np.isfinite(result).all(), "the linear recursion exceeded the range of float64"
    )
    return result


def rescale_interval(
    law: UserLaw, examples: int, sigma: float, *, power: float = 1.0, copies: float = 1.0
) -> int | None:
    """Rows between two renewals of the scale, or ``None`` where only log space is safe.

    L_j may be raised to a ``power``, and y have the signal of so many ``copies`` of x.

    Within b rows a user takes part once, which multiplies by e^{±U} at most: U bounds |log L_j|
    with noise within 12 standard deviations (a breach has probability 4e-33 an element and is
    caught) and the signal of two participations. Under ``"sampling"`` two states driven by the same
    coins agree after the next draw, so they differ by a factor e^{U} at most; under
    ``"participation"`` by e^{2U} (1-p)^{-k'b} at most.
    """
    norm = math.sqrt(float(law.squared_norms.max())) / sigma
    bound = examples * (12.0 * norm + 2.0 * copies * examples * norm**2)
    bound = power * (bound + examples**2 * norm**2 / 2.0)
    spread = 3.0 * bound
    if law.exclusion != "sampling":
        if law.probability == 1.0:
            return None
        spread -= law.min_sep * examples * math.log1p(-law.probability)
    periods = int((_SAFE - spread) / bound) if bound > 0 else 16
    return law.min_sep * min(periods, 16) if periods >= 1 else None


def _log_space(
    exponents: Array,
    half_norms: Array,
    codes: Codes,
    mass: Array,
    start: Array,
    b: int,
    sampling: bool,
) -> Array:
    """The program on log F, for any exponent; row c of the state is F_t(c)."""
    steps, lanes = exponents.shape
    with np.errstate(divide="ignore"):
        log_mass, log_some = np.log(mass), math.log(some) if (some := mass[1:].sum()) else -np.inf
        log_start = np.log(start)
    state = np.zeros((b, lanes))
    for t in range(steps - 1, -1, -1):
        drawn = codes[t].astype(np.int64) - 1  # -1: hidden
        hidden = drawn < 0
        none = np.where(hidden, log_mass[0], np.where(drawn == 0, 0.0, -np.inf))
        some_ = np.where(hidden, log_some, np.where(drawn > 0, 0.0, -np.inf))
        barred = state[-1].copy()
        available = none + state[0]
        for j in range(1, len(mass)):
            chance = np.where(hidden, log_mass[j], np.where(drawn == j, 0.0, -np.inf))
            taken = j * exponents[t] - j * j * half_norms[t] + barred
            available = np.logaddexp(available, chance + taken)
        if sampling:
            state[1:] = np.logaddexp(none + state[:-1], some_ + barred)
        else:
            state[1:] = state[:-1].copy()
        state[0] = available
    total: Array = np.logaddexp.reduce(log_start[:, None] + state, axis=0)
    return total


def _linear(
    exponentials: Array,
    factors: Array,
    codes: Codes,
    mass: Array,
    start: Array,
    b: int,
    sampling: bool,
    every: int,
    result: Array,
) -> None:  # pragma: no cover (compiled)
    """The program on F with a scale per lane. Slot s of the state is F_t(c) with t + c = s mod b:
    a countdown that runs down keeps its slot."""
    steps, lanes = exponentials.shape
    k = mass.size - 1
    state = np.empty((b, _BLOCK))
    none = np.empty(_BLOCK)
    after = np.empty(_BLOCK)
    lift = np.empty(_BLOCK)
    scale = np.empty(_BLOCK)
    weights = np.empty(k + 1)
    for first in range(0, lanes, _BLOCK):
        width = min(_BLOCK, lanes - first)
        state[:] = 1.0
        scale[:] = 0.0
        since = 0
        for t in range(steps - 1, -1, -1):
            barred = state[t % b]
            available = state[(t + 1) % b]
            ratio = exponentials[t, first : first + width]
            code = codes[t, first : first + width]
            for j in range(1, k + 1):
                weights[j] = mass[j] * factors[t, j]
            for i in range(width):
                none[i] = mass[0] if code[i] == 0 else 1.0
            for i in range(width):
                total = 0.0
                for j in range(k, 0, -1):
                    total = (total + weights[j]) * ratio[i]
                after[i] = none[i] * available[i]
                after[i] += barred[i] * total if code[i] == 0 else 0.0
            for i in range(width):
                if code[i] > 1:
                    r = code[i] - 1
                    after[i] = factors[t, r] * ratio[i] ** r * barred[i]
                    none[i] = 0.0
            if sampling:
                for i in range(width):
                    lift[i] = (1.0 - none[i]) * barred[i]
                for s in range(b):
                    if s != t % b:
                        for i in range(width):
                            state[s, i] = none[i] * state[s, i] + lift[i]
            for i in range(width):
                barred[i] = after[i]
            since += 1
            if since == every:
                since = 0
                for i in range(width):
                    top = 0.0
                    for s in range(b):
                        top = max(top, state[s, i])
                    scale[i] += math.log(top)
                    for s in range(b):
                        state[s, i] /= top
        for i in range(width):
            total = 0.0
            for c in range(b):
                total += start[c] * state[c, i]
            result[first + i] = math.log(total) + scale[i]


def _chain(drawn: Codes, barred: Counts, gap: int, sampling: bool, x: Codes) -> None:
    # pragma: no cover (compiled)
    for t in range(drawn.shape[0]):
        for i in range(drawn.shape[1]):
            free = barred[i] == 0
            x[t, i] = drawn[t, i] if free else 0
            if drawn[t, i] > 0 and (sampling or free):
                barred[i] = gap
            elif not free:
                barred[i] -= 1


def participations(law: UserLaw, drawn: Codes, barred: Counts) -> Codes:
    """x_t of the chain for draws r_t, shape (steps, lanes); ``barred`` first steps are barred."""
    x = np.zeros_like(drawn)
    left = barred.astype(np.int64)
    sampling = law.exclusion == "sampling"
    if compiles():
        compiled(_chain)(drawn, left, law.min_sep - 1, sampling, x)
        return x
    for t in range(law.steps):
        free = left == 0
        x[t] = np.where(free, drawn[t], 0)
        restart = (drawn[t] > 0) & (free | sampling)
        left = np.where(restart, law.min_sep - 1, np.maximum(left - 1, 0))
    return x


def compiles() -> bool:
    """True if the extra ``fast`` is installed; without, the program in log space does it all."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled(function: Any) -> Any:
    """A kernel, compiled at its first use."""
    import numba  # late: it takes long to import

    return numba.njit(nogil=True, fastmath={"contract"})(function)
