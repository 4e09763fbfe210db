"""The padding row: a collated batch with every number in it set to zero."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence


def blank(batch: Any) -> Any:
    """``batch`` with every numeric tensor and numpy array zeroed and all other leaves kept.

    Looks into dictionaries, lists, tuples, named tuples and dataclasses; shapes, dtypes and
    devices stay. The argument is not changed.
    """
    if isinstance(batch, torch.Tensor):
        return torch.zeros_like(batch)
    if isinstance(batch, np.ndarray | np.generic):
        return np.zeros_like(batch)[()] if batch.dtype.kind in "biufc" else batch
    if isinstance(batch, PackedSequence):  # its other fields are structure, not numbers
        return batch._replace(data=torch.zeros_like(batch.data))
    if isinstance(batch, MutableMapping):
        clone = copy.copy(batch)
        clone.update({key: blank(value) for key, value in batch.items()})
        return clone
    if isinstance(batch, tuple):
        items = [blank(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [blank(item) for item in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        record: Any = copy.copy(batch)
        for field in dataclasses.fields(batch):  # replace() would refuse init=False fields
            object.__setattr__(record, field.name, blank(getattr(batch, field.name)))
        return record
    return batch
