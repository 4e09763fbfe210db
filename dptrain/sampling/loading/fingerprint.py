"""Recognizing a data set: the same one has to be there when a run goes on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dptrain.core import seeded_globals

ROWS = 64  # rows that are looked at where the data set has no fingerprint of its own
_SEED = 0x66696E676572  # of random augmentations while rows are read


def fingerprint(dataset: Any) -> str:
    """SHA-256 (hex) by which a map-style data set is recognized; private data.

    A data set may say it itself, by an attribute ``fingerprint`` that is text. Otherwise it is made
    of the length and of ``ROWS`` rows spread evenly: a change elsewhere goes unnoticed. Rows
    that come out differently when read twice (augmentation from a generator of the data set's own)
    are left out.

    Raises:
        ValueError: if a row cannot be read in this process.
    """
    sha = hashlib.sha256()
    declared = getattr(dataset, "fingerprint", None)
    size = len(dataset)
    sha.update(f"{size};".encode())
    if isinstance(declared, str):
        sha.update(declared.encode())
        return sha.hexdigest()
    rows = sorted(set(np.linspace(0, size - 1, min(size, ROWS)).astype(int).tolist()))
    for row in tqdm(rows, desc="recognizing the data", unit="row", delay=2, leave=False):
        try:
            first, second = _row_digest(dataset, row), _row_digest(dataset, row)
        except Exception as error:  # whatever a data set raises that only workers can read
            raise ValueError(
                f"row {row} of {type(dataset).__name__} cannot be read in the main process "
                f"({type(error).__name__}: {error}), where the data are recognized for a "
                "checkpoint; make it readable there, or give the data set an attribute "
                "fingerprint, a text that names its contents"
            ) from error
        sha.update(first if first == second else b"unstable")
    return sha.hexdigest()


def _row_digest(dataset: Any, row: int) -> bytes:
    sha = hashlib.sha256()
    with seeded_globals(_SEED):
        _feed(sha, dataset[row])
    return sha.digest()


def _feed(sha: Any, value: Any) -> None:
    """Add a value with its type and shape, so that no two different rows read alike."""
    sha.update(f"{type(value).__name__}(".encode())
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().flatten()
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "O":
        sha.update(f"{value.dtype.str}{value.shape}".encode())
        sha.update(value.tobytes())
    elif isinstance(value, np.ndarray | list | tuple):
        for item in value:
            _feed(sha, item)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _feed(sha, str(key))
            _feed(sha, value[key])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _feed(sha, getattr(value, field.name))
    elif isinstance(value, str | bytes | int | float | complex | None):
        sha.update(repr(value).encode())
    elif callable(pixels := getattr(value, "tobytes", None)):  # a PIL image
        sha.update(f"{getattr(value, 'mode', '')}{getattr(value, 'size', '')}".encode())
        sha.update(pixels())
    sha.update(b")")
