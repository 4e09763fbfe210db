"""A user's data set and data loader: what can be taken over, and how the data are recognized.

The same data set has to be there when a run goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from tqdm import tqdm

from dptrain.core import named_error, seeded_globals
from dptrain.sampling.scheme import Scheme

ROWS = 64  # rows that are looked at where the data set has no fingerprint of its own
_SEED = 0x66696E676572  # of random augmentations while rows are read


def length_of(dataset: Any) -> int:
    """Number N of examples.

    Raises:
        ValueError: with the remedy, for a dataset without length; no example is read.
    """
    no_length = (
        f"dataset is of type {type(dataset).__name__}, a dataset without length, but a scheme "
        "needs the number of examples and draws each by its index: use a map-style dataset (such "
        "as list(dataset), if it fits into memory)"
    )
    if isinstance(dataset, IterableDataset):  # which may have one, and no rows
        raise ValueError(no_length)
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(no_length) from error


def check_length(dataset: Any, scheme: Scheme) -> None:
    """Refuse a dataset without length, or of another length than the scheme was made for.

    Raises:
        ValueError: with the remedy; no example is read.
    """
    length = length_of(dataset)
    if length != scheme.dataset_size:
        raise ValueError(
            f"the dataset has {length} examples but the scheme was made for "
            f"dataset_size={scheme.dataset_size}: make the scheme with dataset_size={length}"
        )


def check_sampler(data_loader: DataLoader[Any]) -> None:
    """Refuse a data loader that does more than go through all rows, in order or shuffled.

    Raises:
        ValueError: if it does not batch, or has its own batch sampler or sampler.
    """
    remedy = "pass a DataLoader(dataset, collate_fn=…) if the scheme should draw from all rows"
    if data_loader.batch_size is None:
        if data_loader.batch_sampler is not None:
            raise ValueError(
                f"the data loader's batch sampler ({type(data_loader.batch_sampler).__name__}) "
                f"draws batches in its own way, which no accountant covers: {remedy}"
            )
        raise ValueError(
            "the data loader has batch_size=None, so its collate function does not make batches; "
            "give it a batch size"
        )
    # SubsetRandomSampler, say, would leave rows out that the scheme would then train on.
    if type(data_loader.sampler) not in (RandomSampler, SequentialSampler):
        raise ValueError(
            f"the data loader's sampler ({type(data_loader.sampler).__name__}) selects rows in its "
            f"own way, which the scheme would replace: {remedy}, or a Subset of the dataset"
        )


def fetching_options(data_loader: DataLoader[Any]) -> dict[str, Any]:
    """The options by which a data loader fetches: its collate function, workers and pinning."""
    names = (
        "collate_fn",
        "num_workers",
        "pin_memory",
        "persistent_workers",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
    )
    return {name: getattr(data_loader, name) for name in names}


def fingerprint(dataset: Any) -> str:
    """SHA-256 (hex) by which a map-style data set is recognized; private data.

    A data set may say it itself, by an attribute ``fingerprint`` that is text. Otherwise it is made
    of the length and of ``ROWS`` rows spread evenly: a change elsewhere goes unnoticed. Rows
    that come out differently when read twice (augmentation from a generator of the data set's own)
    are left out.
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
                f"({named_error(error)}), where a checkpoint records which data it belongs to. "
                "Make it readable there, or give the data set an attribute fingerprint, a string "
                "that identifies its contents"
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
