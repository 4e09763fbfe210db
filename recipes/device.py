"""Whether a device can be trained on here."""

from __future__ import annotations

import torch


def unusable(device: str) -> str | None:
    """Why nothing can be put on a device, in a line; ``None`` where it can."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        return "it is none of torch's: take cpu or cuda"
    if kind not in ("cpu", "cuda"):
        return "noise is drawn on cpu and cuda only: take one of these"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None
