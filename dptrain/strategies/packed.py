"""Lower-triangular matrices as text, so that a value that holds one is hashable and JSON-able."""

from __future__ import annotations

import base64
import math

import numpy as np
import numpy.typing as npt

from dptrain.core import Array


def encode(entries: Array) -> str:
    """Numbers as base64 of little-endian float64; negative zeros become zeros."""
    return base64.b64encode((entries + 0.0).astype("<f8").tobytes()).decode("ascii")


def decode(text: str) -> Array:
    """The numbers that ``encode`` made the text of, bit for bit."""
    raw = base64.b64decode(text, validate=True)
    if not raw or len(raw) % 8:
        raise ValueError(f"{len(raw)} bytes")
    return np.frombuffer(raw, dtype="<f8").astype(np.float64)


def pack(matrix: npt.ArrayLike, name: str = "matrix") -> str:
    """A square, finite, lower-triangular matrix as base64 of its rows' little-endian float64.

    Only the lower triangle is stored: row t contributes its t + 1 first entries. Negative zeros
    become zeros, so that equal matrices have equal texts.
    """
    try:
        given = np.asarray(matrix)
        if np.iscomplexobj(given):  # numpy would only warn, and drop the imaginary parts
            raise TypeError("complex entries")
        dense = given.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: is not a matrix of real numbers ({error}); give an array (steps, steps)"
        ) from error
    if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or dense.shape[0] < 1:
        raise ValueError(f"{name} has the shape {dense.shape}: must be square, (steps, steps)")
    if not np.all(np.isfinite(dense)):
        t, j = np.argwhere(~np.isfinite(dense))[0]
        raise ValueError(f"{name}[{t}, {j}]={dense[t, j]}: every entry must be finite")
    above = np.argwhere(np.triu(dense, 1))
    if above.size:
        t, j = above[0]
        raise ValueError(
            f"{name}[{t}, {j}]={dense[t, j]:.6g}: must be lower triangular, since step {t} cannot "
            "depend on a later one; is it transposed?"
        )
    return encode(dense[np.tril_indices(dense.shape[0])])


def unpack(text: str, name: str = "matrix") -> Array:
    """The matrix that ``pack`` made the text of, shape (n, n), bit for bit."""
    remedy = f"{name}: not a packed lower-triangular matrix ({{}}); use pack(matrix)"
    try:
        triangle = decode(text)
    except (ValueError, TypeError) as error:
        raise ValueError(remedy.format(error)) from error
    n = (math.isqrt(8 * triangle.size + 1) - 1) // 2
    if n * (n + 1) // 2 != triangle.size:
        raise ValueError(remedy.format(f"{triangle.size} entries do not form a triangle"))
    if not np.all(np.isfinite(triangle)):
        raise ValueError(remedy.format("entries that are not finite"))
    dense = np.zeros((n, n))
    dense[np.tril_indices(n)] = triangle
    return dense
