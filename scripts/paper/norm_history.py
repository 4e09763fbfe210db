"""DP-SGD of a small network on images of digits, with every row's gradient norm at every step.

The norms are computed for accounting only: nothing of the training depends on them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm

from dptrain import Gradients, PrivacyEngine, PrivateTraining
from dptrain.contrib.individual import NormGrid
from dptrain.sampling import Poisson
from recipes.data.digits import digits
from recipes.data.mnist import read_mnist
from recipes.models.mlp import mlp
from scripts.paper.per_example_norms import per_example_norms

SAVED_EVERY = 500  # steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """The training setting: a network of one hidden layer, plain SGD on Poisson batches.

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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """Flat images of digits and their labels.

    Attributes:
        name: for titles.
        train, test: inputs (rows, pixels) and labels (rows,).
    """

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of_scikit_learn(cls) -> Digits:
        """1,437 training rows of 64 pixels in [-1, 1], and 360 test rows."""
        split = digits(image_size=8)
        train, test = (
            (part.tensors[0].flatten(1), part.tensors[1]) for part in (split.train, split.test)
        )
        return cls(name="scikit-learn's digits", train=train, test=test)

    @classmethod
    def of_mnist(cls, root: pathlib.Path) -> Digits:
        """60,000 training rows of 784 pixels in [0, 1], and 10,000 test rows."""
        train, test = (
            (pixels.flatten(1).float() / 255, labels) for pixels, labels in read_mnist(root)
        )
        return cls(name="MNIST", train=train, test=test)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormHistory:
    """Counts of norms of some rows of the training set.

    Attributes:
        rows: their positions in the training set, shape (N,).
        counts: how often each value of the grid occurred, shape (N, grid).
        accuracy: of the trained model on the test rows.
    """

    rows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.uint32]
    accuracy: float

    @classmethod
    def of(
        cls,
        training: Training,
        *,
        rows: int,
        grid: NormGrid,
        data: Digits | None = None,
        checkpoint: pathlib.Path | None = None,
    ) -> NormHistory:
        """Train, and look at so many rows (at most all), drawn at random.

        Args:
            training: of what, and how long.
            rows: number of rows to look at.
            grid: of the norms over C.
            data: ``None`` is scikit-learn's digits.
            checkpoint: file from which an interrupted training goes on, and which is gone at its
                end; ``None`` keeps nothing.

        Raises:
            ValueError: if the checkpoint is of another training.
        """
        data = Digits.of_scikit_learn() if data is None else data
        inputs, labels = data.train
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
        # What decides the norms, beside the data, whose change the run itself notices.
        told = {**dataclasses.asdict(training), "rows": len(chosen), "grid": repr(grid)}
        if checkpoint is not None and checkpoint.exists():
            counts = _resume(checkpoint, told, private)
        done = private.steps_executed
        bar = tqdm(
            loader, desc=f"DP-SGD on {data.name}", total=training.steps, initial=done, unit="step"
        )
        for x, y in bar:
            loss = criterion(module(looked_at[0]), looked_at[1])
            norms = per_example_norms(module, loss, rows=len(chosen))
            ratios = norms.double().numpy() / training.max_grad_norm
            counts[np.arange(len(chosen)), grid.bucket(np.minimum(ratios, 1.0))] += 1
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
            if checkpoint is not None and private.steps_executed % SAVED_EVERY == 0:
                _save(checkpoint, told, private, counts)
        held_out, truth = data.test
        with torch.no_grad():
            accuracy = float((model(held_out).argmax(1) == truth).double().mean())
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
        return cls(rows=chosen, counts=counts, accuracy=accuracy)


def _save(
    path: pathlib.Path,
    told: dict[str, Any],
    private: PrivateTraining,
    counts: npt.NDArray[np.uint32],
) -> None:
    """In one step: a crash leaves the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "training": told,
        "run": private.state_dict(),
        "counts": torch.from_numpy(counts.astype(np.int64)),
    }
    temporary = path.with_name(f"{path.name}.tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def _resume(
    path: pathlib.Path, told: dict[str, Any], private: PrivateTraining
) -> npt.NDArray[np.uint32]:
    """Put the run where the checkpoint has it; returns the counts so far."""
    state = torch.load(path, weights_only=True)
    if state["training"] != told:
        raise ValueError(
            f"{path} is of another training ({state['training']}, not {told}); delete it to begin "
            "anew"
        )
    private.load_state_dict(state["run"])
    return state["counts"].numpy().astype(np.uint32)
