"""On which devices the suite runs, and why not."""

import pytest
import torch

NO_GPU = (
    "torch finds no CUDA device on this machine; docs/contributing/index.md says how to run these "
    "tests where there is one"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("cuda", marks=needs_gpu),
]
