"""Lets torchvision's Python part load beside a torch for which its operators were not compiled.

torchvision registers fake kernels for two of its operators while it is imported, and torch refuses
these where the operators' schemas are unknown, because the compiled extension that declares them
could not be loaded. Models of images' classes need no operator, so declaring the two schemas is
enough to test them. This is the tests' doing alone.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import torch


@functools.cache  # torch forgets the schemas with the object
def declare_schemas() -> torch.library.Library | None:
    """The two schemas if torchvision is installed but its extension does not load, else None."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    extensions = [*pathlib.Path(spec.origin).parent.glob("_C.*")]
    try:
        for extension in extensions:
            torch.ops.load_library(extension)
        return None
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
