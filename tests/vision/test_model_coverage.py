"""Models of timm and torchvision are clipped as one example at a time is, or refused by name."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.coverage.case import Case
from tests.coverage.harness import examine
from tests.coverage.record import assert_as_recorded, dtypes
from tests.coverage.zoo import WITH_TORCHVISION

pytestmark = [pytest.mark.slow, pytest.mark.followed]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, id=f"{case.group}, {case.name}-{str(dtype)[6:]}")
        for case in WITH_TORCHVISION
        for dtype in dtypes(case)
    ],
)
def test_clipped_sums_are_the_loop_s_or_a_layer_is_refused(case: Case, dtype: torch.dtype) -> None:
    if not (importlib.util.find_spec("torchvision") and importlib.util.find_spec("timm")):
        pytest.skip("torchvision and timm are not installed")
    assert_as_recorded(case, examine(case, dtype))
