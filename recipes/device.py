"""Checks that a device can be trained on here."""

from __future__ import annotations

import torch


def unusable(device: str) -> str | None:
    """The reason why a device cannot be trained on, in a line; ``None`` if it can.

    Args:
        device: as torch names it.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return "it is none of torch's: take cpu or cuda"
    if kind == "meta":
        return "tensors have no numbers there: take cpu or cuda"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        return str(error).splitlines()[0].partition(". ")[0]
    return None
