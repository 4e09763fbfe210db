"""Detection of layers that run, or are differentiated, as a part of gradient checkpointing."""

from __future__ import annotations

import sys
from typing import Literal

import torch
from torch.utils import checkpoint

_REENTRANT = checkpoint.CheckpointFunction.backward.__code__
_OTHER = ("recompute_fn", checkpoint.__file__)


def recomputation() -> Literal["reentrant", "non-reentrant"] | None:
    """Kind of ``torch.utils.checkpoint`` that runs this layer anew in a backward pass, or ``None``.

    The non-reentrant kind has run it with gradients before, and differentiates that pass: what is
    computed anew only fills in what was not kept. The reentrant kind has run it without, and
    differentiates the new pass. Of several, one within the other, it is the innermost.

    torch does not say so, but its stack does.
    """
    if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
        return None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _REENTRANT:
            return "reentrant"
        if (code.co_name, code.co_filename) == _OTHER:
            return "non-reentrant"
        frame = frame.f_back  # type: ignore[assignment]
    return None
