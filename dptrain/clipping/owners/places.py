"""Where in the user's program something happens."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
from torch import nn

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep

Place = tuple[str | None, nn.Module | None]


def place() -> Place:
    """The innermost line that is neither torch's nor ours, and the innermost module's forward.

    The line is ``file:number``; in a backward pass there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    line: str | None = None
    module: nn.Module | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.startswith((_TORCH, _HERE))
        if line is None and not ours and not file.startswith("<frozen"):
            line = f"{os.path.basename(file)}:{frame.f_lineno}"
        if module is None and frame.f_code.co_name == "forward":
            owner = frame.f_locals.get("self")
            module = owner if isinstance(owner, nn.Module) else None
        if line is not None and module is not None:
            break
        frame = frame.f_back
    return line, module
