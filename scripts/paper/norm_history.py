"""DP-SGD of a small network on scikit-learn's digits with every row's gradient norm at every step.

The norms are computed for accounting only: nothing of the training depends on them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm

from dptrain import Gradients, PrivacyEngine
from dptrain.accounting.per_example import NormGrid
from dptrain.clipping import per_example_norms
from dptrain.sampling import Poisson
from recipes.data.digits import digits
from recipes.models.mlp import mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained: a network of one hidden layer by plain SGD on Poisson batches.

    Attributes:
        probability: Poisson rate q.
        noise_multiplier: σ.
        max_grad_norm: C.
        steps: of training.
        learning_rate: of the mean gradient.
        width: of the hidden layer.
        seed: of the initial weights, the batches and the noise.
    """

    probability: float
    noise_multiplier: float
    max_grad_norm: float
    steps: int
    learning_rate: float
    width: int
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormHistory:
    """Counts of norms of some rows of the training set.

    Attributes:
        rows: their positions in the training set, shape (N,).
        counts: how often each value of the grid occurred, shape (N, grid).
        accuracy: of the trained model on the held-out rows.
    """

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.uint32]
    accuracy: float

    @classmethod
    def of(cls, training: Training, *, rows: int, grid: NormGrid) -> NormHistory:
        """Train, and look at so many rows (at most all), drawn at random."""
        split = digits(image_size=8)
        inputs, labels = _rows(split.train)
        size, rng = len(inputs), np.random.default_rng(training.seed)
        chosen = np.sort(rng.choice(size, min(rows, size), replace=False))
        looked_at = inputs[chosen], labels[chosen]
        with torch.random.fork_rng():
            torch.manual_seed(training.seed)
            model = mlp(inputs=inputs.shape[1], outputs=10, widths=[training.width])
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=training.learning_rate),
            data=TensorDataset(inputs, labels),
            scheme=Poisson(
                probability=training.probability, dataset_size=size, steps=training.steps
            ),
            noise_multiplier=training.noise_multiplier,
            max_grad_norm=training.max_grad_norm,
            seed=training.seed,
            gradients=Gradients(mode="bookkeeping"),
        )
        module, optimizer, loader = private
        criterion = torch.nn.CrossEntropyLoss()
        counts = np.zeros((len(chosen), len(grid.values)), np.uint32)
        for x, y in tqdm(loader, desc="DP-SGD on digits", total=training.steps, unit="step"):
            loss = criterion(module(looked_at[0]), looked_at[1])
            norms = per_example_norms(module, loss, rows=len(chosen))
            ratios = norms.double().numpy() / training.max_grad_norm
            counts[np.arange(len(chosen)), grid.bucket(np.minimum(ratios, 1.0))] += 1
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
        held_out, truth = _rows(split.test)
        with torch.no_grad():
            accuracy = float((model(held_out).argmax(1) == truth).double().mean())
        return cls(rows=chosen, counts=counts, accuracy=accuracy)


def _rows(dataset: TensorDataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat images and labels."""
    images, labels = dataset.tensors
    return images.flatten(1), labels
