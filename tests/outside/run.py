"""Trains with what the package brings: ``run.py train FOLDER``, then ``run.py resume FOLDER``."""

from __future__ import annotations

import pathlib
import sys

import torch
from stranger_dp import Cohort, Fading, Shift
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import MatrixMechanism, PrivacyEngine, PrivateTraining

STEPS, HALF = 8, 4


def wire(**mechanism: object) -> PrivateTraining:
    """The run: a small model with a layer of the package's own."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 5, generator=generator)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), Shift(4), nn.Tanh(), nn.Linear(4, 2))
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        data=TensorDataset(features, (features[:, 0] > 0).long()),
        max_grad_norm=1.0,
        **mechanism,
    )


def train(private: PrivateTraining, until: int) -> None:
    """Steps up to ``until``."""
    model, optimizer, loader = private
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if private.steps_executed == until:
            break


def finish(private: PrivateTraining, folder: pathlib.Path, name: str) -> None:
    """Train to the end; keep the parameters and the statement."""
    train(private, STEPS)
    torch.save([p.detach() for p in private.module.parameters()], folder / f"{name}.pt")
    (folder / f"{name}.json").write_text(private.guarantee(delta=1e-3).to_json(), encoding="utf-8")


def main(mode: str, folder: pathlib.Path) -> None:
    """One of the two processes."""
    if mode == "train":
        private = wire(
            scheme=Cohort(probability=0.25, dataset_size=200, steps=STEPS),
            strategy=Fading(ratio=0.5),
            target_epsilon=2.0,
            target_delta=1e-3,
        )
        train(private, HALF)
        torch.save(private.state_dict(), folder / "checkpoint.pt")
        finish(private, folder, "whole")
    else:
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        private = wire(mechanism=MatrixMechanism.from_dict(state["mechanism"]))
        private.load_state_dict(state)
        finish(private, folder, "resumed")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
