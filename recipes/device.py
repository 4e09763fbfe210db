"""Checks that a device can be trained on here."""

from __future__ import annotations

import torch


def unusable(device: str, *, private: bool = True) -> str | None:
    """The reason why a device cannot be trained on, in a line; ``None`` if it can.

    Args:
        device: as torch names it.
        private: whether noise is drawn there, too.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return "it is none of torch's: take cpu or cuda"
    if private and kind not in ("cpu", "cuda"):
        return "noise is drawn on cpu and cuda only: take one of these"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        return str(error).splitlines()[0]
    return None
