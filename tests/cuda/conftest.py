"""Every test here runs on two kinds of device: a GPU, and, so that the tests are right, the CPU."""

import os

import pytest
import torch

# Read when cuBLAS starts: without it products add up in another order from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from tests.cuda.devices import DEVICES


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where modules, inputs and noise are."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def exact():
    """Products of float32 numbers as such, and the same sums in every run."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, torch.are_deterministic_algorithms_enabled()
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)  # equality is tested
    yield
    cudnn.allow_tf32, matmul.allow_tf32 = before[:2]
    torch.use_deterministic_algorithms(before[2])
