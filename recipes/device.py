"""Whether a device can be trained on here."""

from __future__ import annotations

import torch


def unusable(device: str) -> str | None:
    """Why nothing can be put on a device, in a line; ``None`` where it can."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None
