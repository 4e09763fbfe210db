"""Padding rows: a collated batch with the numbers of some or all of its rows set to zero."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence


def blank(batch: Any) -> Any:
    """``batch`` with every numeric tensor and numpy array zeroed and all other leaves kept.

    Looks into dictionaries, lists, tuples, named tuples and dataclasses; shapes, dtypes and
    devices stay. The argument is not changed.
    """
    return map_leaves(batch, _zeros)


def blank_rows(batch: Any, *, start: int, rows: int) -> Any:
    """``batch`` with rows ``start`` to ``rows - 1`` zeroed in whatever has ``rows`` rows.

    Leaves without a first dimension of that length (strings, packed sequences, shared tables) are
    kept: padding rows have weight 0, whatever they hold.
    """

    def zero_tail(leaf: Any, _: str) -> Any:
        if isinstance(leaf, PackedSequence) or np.ndim(leaf) == 0 or len(leaf) != rows:
            return leaf
        clone = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
        clone[start:] = 0
        return clone

    return map_leaves(batch, zero_tail)


def _zeros(leaf: Any, _: str) -> Any:
    if isinstance(leaf, PackedSequence):  # its other fields are structure, not numbers
        return leaf._replace(data=torch.zeros_like(leaf.data))
    if isinstance(leaf, torch.Tensor):
        return torch.zeros_like(leaf)
    return np.zeros_like(leaf)[()]


def map_leaves(batch: Any, change: Callable[[Any, str], Any], name: str = "") -> Any:
    """``change`` applied to the numeric leaves, and their names: the keys and fields they are in.

    What is not numeric is kept, and nothing that is given is changed.
    """
    if isinstance(batch, torch.Tensor | PackedSequence):
        return change(batch, name)
    if isinstance(batch, np.ndarray | np.generic):
        return change(batch, name) if batch.dtype.kind in "biufc" else batch
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)
        clone.update({key: map_leaves(value, change, str(key)) for key, value in batch.items()})
        return clone
    if isinstance(batch, tuple):
        fields = getattr(batch, "_fields", (name,) * len(batch))
        items = [map_leaves(item, change, n) for item, n in zip(batch, fields, strict=True)]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [map_leaves(item, change, name) for item in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        record: Any = copy.copy(batch)
        for field in dataclasses.fields(batch):  # replace() would refuse init=False fields
            value = map_leaves(getattr(batch, field.name), change, field.name)
            object.__setattr__(record, field.name, value)
        return record
    return batch
