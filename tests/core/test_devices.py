"""Where exact numbers are computed; on a device of another kind see ``tests/stand_in``."""

import pytest
import torch

from dptrain.core import exact_device, in_float64


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps:0", "cpu"), ("xpu:3", "cpu"), ("hpu:0", "cpu")],
)
def test_only_the_cpu_and_cuda_are_trusted_with_exact_numbers(device, expected):
    assert exact_device(torch.device(device)) == torch.device(expected)


def test_float64_stays_where_it_is_and_is_no_copy_there():
    x = torch.ones(3, dtype=torch.float64)
    assert in_float64(x) is x
    assert in_float64(x.half()).dtype == torch.float64
