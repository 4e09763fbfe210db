"""Lets torchvision's Python part load beside a torch for which its operators were not compiled.

torchvision registers fake kernels for two of its operators while it is imported, and torch refuses
these where the operators' schemas are unknown, because the compiled extension that declares them
could not be loaded. Transforms and folder listings need no operator, so declaring the two schemas
is enough to test them. This is the tests' doing alone: users get an error that says what to
install, and the tests of that error run in processes of their own.
"""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import torch


def _declare_schemas() -> torch.library.Library | None:
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


_SCHEMAS = _declare_schemas()  # torch forgets them with the object


@pytest.fixture
def only_beside_a_broken_torchvision() -> None:
    """Skips where torchvision was compiled for this torch."""
    if _SCHEMAS is None:
        pytest.skip("torchvision loads here")
