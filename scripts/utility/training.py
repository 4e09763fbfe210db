"""One run of a contest: train on the one part, look at the other once."""

from __future__ import annotations

import time
from typing import Any

import opacus
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from dptrain import Loading, MatrixMechanism, PrivacyEngine
from recipes.data import Split
from recipes.schedule import Schedule
from recipes.task import evaluate
from recipes.vision import classification_task
from scripts.utility.contest import Contest, Method

Noise = float | dict[str, Any]  # σ of Opacus, or our mechanism


def resized(noise: Noise, method: Method, size: int) -> Noise:
    """The same σ and sampling rates, for a training set of another size."""
    if not isinstance(noise, dict):
        return noise
    assert method.scheme is not None
    return noise | {"scheme": method.scheme(size).to_dict()}


def train(
    contest: Contest, split: Split, noise: Noise, *, rate: float, seed: int, device: str = "cpu"
) -> dict:
    """Accuracy and loss after the last step, and how long the steps took (wall clock, s)."""
    torch.manual_seed(seed)
    assert contest.network is not None
    model = contest.network(seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=contest.momentum)
    scheduler = LambdaLR(optimizer, Schedule(contest.schedule, contest.steps))
    start = time.perf_counter()
    if isinstance(noise, dict):
        _ours(contest, split, noise, model, optimizer, scheduler, seed, device)
    else:
        _opacus(contest, split, noise, model, optimizer, scheduler, seed, device)
    seconds = time.perf_counter() - start
    return evaluate(classification_task(split, model)) | {"seconds": seconds}


def _ours(
    contest: Contest,
    split: Split,
    noise: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    seed: int,
    device: str,
) -> None:
    mechanism = MatrixMechanism.from_dict(noise)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data=DataLoader(split.train),
        mechanism=mechanism,
        max_grad_norm=contest.max_grad_norm,
        loading=Loading(max_physical_batch_size=contest.rows_of(device)),
        seed=seed,
    )
    private.register_scheduler(scheduler)
    criterion = nn.CrossEntropyLoss()
    with private:
        for images, labels in private.loader:
            private.optimizer.zero_grad()
            criterion(model(images.to(device)), labels.to(device)).backward()
            private.optimizer.step()
            scheduler.step()


def _opacus(
    contest: Contest,
    split: Split,
    sigma: float,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    seed: int,
    device: str,
) -> None:
    size = round(len(split.train) / contest.epoch_length)
    private, noisy, loader = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(split.train, batch_size=size),
        noise_multiplier=sigma,
        max_grad_norm=contest.max_grad_norm,
        noise_generator=torch.Generator(device).manual_seed(seed + 1),
    )
    criterion, done = nn.CrossEntropyLoss(), 0
    while done < contest.steps:
        for images, labels in loader:
            noisy.zero_grad()
            if len(images):  # an empty batch would have no noise added; it does not occur here
                criterion(private(images.to(device)), labels.to(device)).backward()
                noisy.step()
            scheduler.step()
            done += 1
            if done == contest.steps:
                return
