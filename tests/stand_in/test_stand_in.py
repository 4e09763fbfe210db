"""On a device that torch was told of; in a process of its own, for that cannot be undone."""

import os
import pathlib
import subprocess
import sys

import pytest
from torch.utils import backend_registration

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes devices from compiled code only",
)
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_private_training_on_a_stand_in(marks):
    command = ["-m", "pytest", "-rs", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-p", "tests.stand_in.device", "-m", marks, "tests/stand_in/within.py"]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "SKIPPED" not in done.stdout
