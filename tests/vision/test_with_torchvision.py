"""A torchvision that is merely installed, perhaps for another torch build, must not break us."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.image_files import write_batches, write_cinic, write_hub_files

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)

# A fresh interpreter, as nothing here may depend on what other tests have imported.
SCRIPT = """
import sys
import torch
from dptrain import PrivacyEngine
from dptrain.sampling import Poisson
import recipes.vision

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
model = torch.nn.Linear(4, 2)
private = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data=data,
    scheme=Poisson(probability=0.25, dataset_size=64, steps=3), noise_multiplier=1.0,
    max_grad_norm=1.0)
model, optimizer, loader = private
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
assert private.steps_executed == 3
assert "torchvision" not in sys.modules
print("trained")
"""


def test_import_and_training_beside_torchvision():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("trained")


READING = """
import sys
from recipes.data import cifar10, cinic10
from recipes.data.augment import Views

batches, parquet, folders = sys.argv[1:]
assert len(cinic10(folders, views=Views(augment=True)).train) == 10
assert len(cifar10(batches, views=Views(augment=True)).train) == len(cifar10(parquet).train) == 10
assert "torchvision" not in sys.modules
"""


def test_readers_and_augmentation_beside_torchvision(tmp_path):
    folders = [tmp_path / name for name in ("batches", "parquet", "folders")]
    write_batches(folders[0], size=2)
    write_hub_files(folders[1], size=10)
    write_cinic(folders[2], per_class=1)
    done = subprocess.run(
        [sys.executable, "-c", READING, *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
