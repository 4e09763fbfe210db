"""Time of one training step: ours against stock Opacus and against ordinary training.

Same model, same batch, same loss; clipping, noise and update included, data loading left out.
The sides take turns within one process, so that a drift of the machine's speed hits all of them,
each with an untimed step first; the ratio printed is the median over rounds of the ratio within a
round.

    PYTHONPATH=. python scripts/bench/step_time.py [--device cpu] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import pathlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dptrain import BandMF, Poisson, PrivacyEngine
from dptrain.noise import noise_stream
from recipes.models import vgg

Step = Callable[[], None]
MODELS = {"vgg": 256, "mlp": 1024}


def build(name: str) -> tuple[nn.Module, TensorDataset]:
    """The model and one batch of random data for it."""
    torch.manual_seed(0)
    size = MODELS[name]
    labels = torch.randint(0, 10, (size,))
    if name == "vgg":
        return vgg(in_channels=3, classes=10), TensorDataset(torch.randn(size, 3, 32, 32), labels)
    mlp = nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )
    return mlp, TensorDataset(torch.randn(size, 784), labels)


def plain(name: str, device: str) -> Step:
    """Ordinary training."""
    model, data = build(name)
    model.to(device)
    x, y = (t.to(device) for t in data.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step


def stock(name: str, device: str, mode: str) -> Step:
    """Opacus, every example in every batch."""
    model, data = build(name)
    model.to(device)
    x, y = (t.to(device) for t in data.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    made = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=len(data)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    private, optimizer, *rest = made
    loss = rest[0] if mode == "ghost" else nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(private(x), y).backward()
        optimizer.step()

    return step


def ours(name: str, device: str, mode: str, bands: int, steps: int) -> Step:
    """dptrain, every example in every batch; the next batch is fetched outside the timed part."""
    model, data = build(name)
    model.to(device)
    scheme = Poisson(probability=1.0, dataset_size=len(data), steps=steps)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        dataset=data,
        scheme=scheme,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    wrapped, optimizer, loader, *rest = private
    loss = rest[0] if mode == "ghost" else nn.CrossEntropyLoss()
    if bands > 1:  # only the cost of the noise matters here, not what it would guarantee
        strategy = BandMF(bands=bands)
        optimizer.noise = noise_stream(strategy, steps=steps, like=optimizer.params, seed=0)
    batches = iter(loader)
    x, y = (t.to(device) for t in next(batches))
    first = True

    def prepare() -> None:
        nonlocal first
        if not first:
            next(batches)
        first = False

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(x), y).backward()
        optimizer.step()

    step.prepare = prepare  # type: ignore[attr-defined]
    return step


def once(step: Step, device: str) -> float:
    """Seconds of one step."""
    getattr(step, "prepare", lambda: None)()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, device: str, mode: str, rounds: int, bands: int) -> dict[str, Any]:
    """Medians in seconds and ratios within rounds, for one model and clipping mode."""
    steps = max(2 * (rounds + 2), bands)
    sides = {
        "ordinary": plain(name, device),
        "opacus": stock(name, device, mode),
        "dptrain": ours(name, device, mode, 1, steps),
        f"dptrain, {bands} bands": ours(name, device, mode, bands, steps),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 2):
        order = list(sides) if number % 2 else list(reversed(sides))
        for side in order:
            once(sides[side], device)  # brings back its own memory, which others have used since
            seconds = once(sides[side], device)
            if number >= 2:  # warm-up
                times[side].append(seconds)

    def ratio(top: str, bottom: str) -> float:
        return statistics.median(a / b for a, b in zip(times[top], times[bottom], strict=True))

    result = {
        "model": name,
        "batch": MODELS[name],
        "mode": mode,
        "seconds": {side: statistics.median(values) for side, values in times.items()},
        "dptrain / opacus": ratio("dptrain", "opacus"),
        f"dptrain, {bands} bands / opacus": ratio(f"dptrain, {bands} bands", "opacus"),
        "opacus / ordinary": ratio("opacus", "ordinary"),
        "dptrain / ordinary": ratio("dptrain", "ordinary"),
        "load": os.getloadavg()[0],
    }
    del sides
    gc.collect()
    return result


def main() -> None:
    """Print the table; optionally write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bands", type=int, default=16)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["hooks", "functorch", "ghost"])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, opacus {opacus.__version__}, {options.device}, {machine}")
    results = []
    for name in options.models:
        for mode in options.modes:
            row = measure(name, options.device, mode, options.rounds, options.bands)
            results.append(row)
            seconds = "  ".join(f"{k} {1e3 * v:.0f} ms" for k, v in row["seconds"].items())
            ratios = "  ".join(f"{k} {v:.3f}" for k, v in row.items() if " / " in k)
            print(f"{name} batch {row['batch']} {mode}: {seconds}\n    {ratios}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
