"""Rounded normals from uniform words, the same bits on every processor.

What is computed is the Box-Muller transform in float64, on a grid, plus a small uniform dither that
makes every grid point reachable (docs/theory/noise.md#thm-rounded-normals). Only sums, products,
quotients, square roots and shifts are used, which IEEE 754 rounds in one way; so the loops that
numba compiles and the array operations of numpy give the same numbers, and so do all processors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import Array
from dptrain.noise.generators.compiled import chosen

WORDS = 4
"""64-bit words that a pair of normals takes."""

DITHER = 5
"""The dither is uniform over 2^-5 of the standard deviation or a little less, more than 2^-6."""

FINEST = 43
"""The largest ``bits`` of normals with standard deviation below 2: a grid of 2^-43 of it."""

RATIO = 2.0**-37
"""Joint probabilities of a pair of numbers are those of ideal normals with the same rounding and
dither up to a factor in 1 ± √2·RATIO (docs/theory/noise.md#thm-rounded-normals)."""

REST = 2.0**-81
"""Chance that ``RATIO`` says nothing of a number."""

_SPARE = 26  # low bits of the dithers' words, which continue the uniform number of the radius
_LOW = (1 << _SPARE) - 1
_MIDDLE = 511  # of the angle's word, after two bits that turn it: 9 bits more for the radius
_TILE = 1024
_SIGNATURES = ("void(int64[::1], float64[::1], int64, float64, int64)",)

_LN2 = math.log(2.0)
_ROOT_HALF = 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
_ROUND = 1.5 * 2.0**52  # added and taken away again, it rounds what is below 2^51
# cos(πt/4) and sin(πt/4)/t by their series in t²; what is left out is below 5e-17 for |t| ≤ 1.
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = (
    (-1) ** k * (math.pi / 4) ** (2 * k) / math.factorial(2 * k) for k in range(9)
)
_S0, _S1, _S2, _S3, _S4, _S5, _S6, _S7 = (
    (-1) ** k * (math.pi / 4) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(8)
)
# 2 artanh(q)/q by its series in q²; what is left out is below 3e-17 for |q| ≤ 0.1716.
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9 = (2.0 / (2 * k + 1) for k in range(10))


def rounded_normals(words: npt.NDArray[np.int64], out: Array, *, bits: int, scale: float) -> None:
    """``out`` ← integers: normals of standard deviation ``scale``·2^``bits``, rounded and dithered.

    With the words w, x, y, z of a pair, the first is

        ⌊2^bits·scale·√(-2 ln u)·cos α⌉ + dither

    and the second has the sine. u is uniform on the bits of w and the lower ones of y and z, α on
    those of x; the dithers are the leading bits of y and z, centered
    (docs/theory/noise.md#thm-rounded-normals).

    Args:
        words: shape (``WORDS``·pairs,), all first words, then all second ones, and so on; uniform.
        out: float64, shape (2·pairs,) or one less; the first of all pairs, then the second ones.
        bits: of the grid; at most ``FINEST`` for a ``scale`` of 1, one less for twice the scale.
        scale: factor of the standard deviation, positive.
    """
    pairs = len(words) // WORDS
    fill = chosen(_plain, _loops, _SIGNATURES, entries=pairs)
    fill(words, out, pairs, scale * 2.0**bits, _shift(bits, scale))


def _shift(bits: int, scale: float) -> int:
    """Number of bits by which a word is shifted to be a dither, without its ``_SPARE`` low ones."""
    shift = 64 - (bits + math.frexp(scale)[1] - 1 - DITHER)
    if not _SPARE <= shift < 64:
        raise ValueError(
            f"bits={bits} with scale={scale:g}: a normal of standard deviation 1 has at most "
            f"{FINEST} bits, and as many fewer as its standard deviation has more"
        )
    return shift


def _loops(words: Any, out: Any, pairs: int, deviation: float, shift: int) -> None:
    """Compute the same as ``_plain``, entry by entry: what is compiled."""
    second = len(out) - pairs
    halves, numbers, mantissas = np.empty(_TILE), np.empty(_TILE), np.empty(_TILE)
    number_bits, mantissa_bits = numbers.view(np.int64), mantissas.view(np.int64)
    exponents, sines = np.empty(_TILE), np.empty(_TILE)
    for start in range(0, pairs, _TILE):
        size = min(_TILE, pairs - start)
        w = words[start : start + size]
        x = words[pairs + start : pairs + start + size]
        y = words[2 * pairs + start : 2 * pairs + start + size]
        z = words[3 * pairs + start : 3 * pairs + start + size]
        for i in range(size):
            low = ((((y[i] & _LOW) << _SPARE) | (z[i] & _LOW)) << 9) | ((x[i] >> 2) & _MIDDLE)
            high = (w[i] >> 1) & 0x7FFFFFFFFFFFFFFF
            half = high * 2.0**-64 + (low * 2.0**-61 + 2.0**-62) * 2.0**-64
            halves[i] = half
            near = (w[i] & 1) * 1.0
            numbers[i] = near * (1.0 - half) + (1.0 - near) * half
        for i in range(size):
            exponent = (number_bits[i] - _ROOT_HALF) >> 52
            mantissa_bits[i] = number_bits[i] - (exponent << 52)
            exponents[i] = exponent
        cosines = out[start : start + size]
        for i in range(size):
            near = (w[i] & 1) * 1.0
            f = mantissas[i] - 1.0
            f = f + near * (exponents[i] + 1.0) * (-halves[i] - f)
            q = f / (2.0 + f)
            s = q * q
            p = _L9 * s + _L8
            p = p * s + _L7
            p = p * s + _L6
            p = p * s + _L5
            p = p * s + _L4
            p = p * s + _L3
            p = p * s + _L2
            p = p * s + _L1
            p = p * s + _L0
            radius = math.sqrt(-2.0 * (exponents[i] * _LN2 + p * q)) * deviation
            t = (x[i] >> 11) * 2.0**-52 + 2.0**-53
            s = t * t
            cosine = _C8 * s + _C7
            cosine = cosine * s + _C6
            cosine = cosine * s + _C5
            cosine = cosine * s + _C4
            cosine = cosine * s + _C3
            cosine = cosine * s + _C2
            cosine = cosine * s + _C1
            cosine = cosine * s + _C0
            sine = _S7 * s + _S6
            sine = sine * s + _S5
            sine = sine * s + _S4
            sine = sine * s + _S3
            sine = sine * s + _S2
            sine = sine * s + _S1
            sine = sine * s + _S0
            sine = sine * t
            cosine = cosine * (1.0 - 2.0 * (x[i] & 1))
            turned = ((x[i] >> 1) & 1) * 1.0
            first = cosine + turned * (sine - cosine)
            other = sine + turned * (cosine - sine)
            cosines[i] = ((radius * first + _ROUND) - _ROUND) + (y[i] >> shift)
            sines[i] = ((radius * other + _ROUND) - _ROUND) + (z[i] >> shift)
        left = min(size, second - start)
        if left > 0:
            out[pairs + start : pairs + start + left] = sines[:left]


def _plain(
    words: npt.NDArray[np.int64], out: Array, pairs: int, deviation: float, shift: int
) -> None:
    """Compute the numbers by numpy: the operations of ``_loops`` in the same order."""
    second = len(out) - pairs
    for start in range(0, pairs, _TILE):
        stop = min(start + _TILE, pairs)
        w, x, y, z = (words[k * pairs + start : k * pairs + stop] for k in range(WORDS))
        low = ((((y & _LOW) << _SPARE) | (z & _LOW)) << 9) | ((x >> 2) & _MIDDLE)
        high = (w >> 1) & 0x7FFFFFFFFFFFFFFF
        half = high * 2.0**-64 + (low * 2.0**-61 + 2.0**-62) * 2.0**-64
        near = (w & 1) * 1.0
        number = near * (1.0 - half) + (1.0 - near) * half
        number_bits = number.view(np.int64)
        exponent = (number_bits - _ROOT_HALF) >> 52
        f = (number_bits - (exponent << 52)).view(np.float64) - 1.0
        f = f + near * (exponent + 1.0) * (-half - f)
        q = f / (2.0 + f)
        s = q * q
        logarithm = _horner(s, _L9, _L8, _L7, _L6, _L5, _L4, _L3, _L2, _L1, _L0) * q
        radius = np.sqrt(-2.0 * (exponent * _LN2 + logarithm)) * deviation
        t = (x >> 11) * 2.0**-52 + 2.0**-53
        s = t * t
        cosine = _horner(s, _C8, _C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0)
        sine = _horner(s, _S7, _S6, _S5, _S4, _S3, _S2, _S1, _S0) * t
        cosine = cosine * (1.0 - 2.0 * (x & 1))
        turned = ((x >> 1) & 1) * 1.0
        first = cosine + turned * (sine - cosine)
        other = sine + turned * (cosine - sine)
        out[start:stop] = ((radius * first + _ROUND) - _ROUND) + (y >> shift)
        sines = ((radius * other + _ROUND) - _ROUND) + (z >> shift)
        left = min(stop, second) - start
        if left > 0:
            out[pairs + start : pairs + start + left] = sines[:left]


def _horner(s: Array, leading: float, *others: float) -> Array:
    """A polynomial in s, its highest coefficient first."""
    value = leading * s + others[0]
    for coefficient in others[1:]:
        value *= s
        value += coefficient
    return value


def rounded_normals_of_tensors(
    words: torch.Tensor, out: torch.Tensor, *, bits: int, scale: float
) -> None:
    """Compute ``rounded_normals`` by torch's functions: on a GPU.

    The logarithm and the waves are the device's, so that the last bits depend on its model. CUDA
    documents errors of at most 2 units in the last place for them in float64.
    """
    pairs = len(words) // WORDS
    w, x, *_ = columns = words.view(WORDS, pairs)
    dithers = columns[2:]
    low, lowest = dithers & _LOW
    low = (low << _SPARE).bitwise_or_(lowest).bitwise_left_shift_(9)
    low |= (x >> 2).bitwise_and_(_MIDDLE)
    half = (w >> 1).bitwise_and_(0x7FFFFFFFFFFFFFFF).double().mul_(2.0**-64)
    half.add_(low.double().add_(0.5), alpha=2.0**-125)  # times a power of two: exact
    radius = torch.where((w & 1).bool(), torch.log1p(-half), torch.log(half))
    radius.mul_(-2.0).sqrt_().mul_(scale * 2.0**bits)
    angle = (x >> 11).double().mul_(2.0**-52).add_(2.0**-53).mul_(math.pi / 4)
    waves = angle.new_empty(2, pairs)
    torch.cos(angle, out=waves[0]).view(torch.int64).bitwise_xor_(x << 63)  # the bit of the sign
    torch.sin(angle, out=waves[1])
    found = torch.where((x & 2).bool(), waves.flip(0), waves).mul_(radius).round_()
    dithers = dithers >> _shift(bits, scale)
    if len(out) == 2 * pairs:
        torch.add(found, dithers, out=out.view(2, pairs))
    else:
        out.copy_(found.add_(dithers).view(-1)[: len(out)])
