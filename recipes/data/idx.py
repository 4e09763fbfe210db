"""The IDX files of MNIST: a magic number, a shape, and bytes, gzipped or not."""

from __future__ import annotations

import gzip
import math
import pathlib
import struct
import zlib

import numpy as np
import numpy.typing as npt

_UINT8 = 0x08


def read_idx(path: pathlib.Path, *, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array of bytes in an IDX file; a name that ends in ``.gz`` is gzipped.

    Raises:
        ValueError: if the file is damaged, cut off, or holds something else.
    """
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from error
    head = 4 * (1 + dimensions)
    if len(raw) < head or raw[:4] != bytes([0, 0, _UINT8, dimensions]):
        raise ValueError(
            f"{path} does not begin as an IDX file of bytes in {dimensions} dimensions does "
            f"({raw[:4].hex()}); download it again"
        )
    shape = struct.unpack(f">{dimensions}I", raw[4:head])
    if len(raw) - head != math.prod(shape):
        raise ValueError(
            f"{path} holds {len(raw) - head} bytes, not the {math.prod(shape)} of its shape "
            f"{shape}; download it again"
        )
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape).copy()
