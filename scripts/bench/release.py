"""The cost of a release on a grid beside noise that is added in floating point.

Both are in one process and take turns: first a step of noise with its addition to a sum, then whole
private steps of a model whose noise is either. Printed are medians, and the median of the ratio
within a round.

    PYTHONPATH=. python scripts/bench/release.py [--params 10000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import MinSep, PrivacyEngine
from dptrain.noise import noise_stream
from dptrain.strategies import BISR, BLT, BSR, Identity, Strategy
from scripts import results
from scripts.bench.float_noise import FloatNoise

HERE = pathlib.Path(__file__).parent
COLUMNS = (
    ("noise", "{name}"),
    ("added in float32 (ms)", "{float32:.1f}"),
    ("released on a grid (ms)", "{grid:.1f}"),
    ("ratio", "{ratio:.2f}"),
    ("bytes kept of a parameter", "{bytes kept:.0f}"),
)
STEP_COLUMNS = (
    ("a whole private step", "{name}"),
    ("float32 (ms)", "{float32:.0f}"),
    ("grid (ms)", "{grid:.0f}"),
    ("ratio", "{ratio:.3f}"),
)
STEPS = 512
STRATEGIES: dict[str, Strategy] = {
    "identity": Identity(),
    "ring, 16 bands": BSR(bands=16),
    "ring, 64 bands": BSR(bands=64),
    "convolution, 16 bands": BISR(inverse_bands=16),
    "BLT, 3 buffers": BLT(buffers=3, theta=(0.9998, 0.98, 0.6), omega=(0.02, 0.08, 0.3)),
}


def taking_turns(sides: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median ms of each side, and the median ratio of the second to the first."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    old, new = times.values()
    found = {name: statistics.median(each) for name, each in times.items()}
    return {**found, "ratio": statistics.median(b / a for a, b in zip(old, new, strict=True))}


def noise_step(strategy: Strategy, params: int, rounds: int) -> dict[str, float]:
    """A step of noise, added to a sum."""
    like = torch.zeros(params)
    old = FloatNoise(strategy, steps=STEPS, like=like, seed=1 << 100)
    new = noise_stream(strategy, steps=STEPS, like=[like], seed=1 << 100)
    total = torch.randn(params)
    sides: dict[str, Callable[[], object]] = {
        "float32": lambda: old.release([total], 0.5),
        "grid": lambda: new.release([total], 0.5),
    }
    for _ in range(66):  # until the rings are full
        for run in sides.values():
            run()
    found = taking_turns(sides, rounds)
    return {**found, "bytes kept": new.buffer_bytes / params}


def vgg() -> tuple[nn.Module, tuple[int, ...]]:
    """A VGG for 32×32 images, .55 million parameters."""
    widths, layers, channels = (32, 64, 128), [], 3
    for width in widths:
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10)), (3, 32, 32)


def perceptron() -> tuple[nn.Module, tuple[int, ...]]:
    """3.2 million parameters and little else to do: the worst case for noise."""
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 784), nn.ReLU(), nn.Linear(784, 10)
    ), (784,)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "VGG, .3 M parameters": vgg,
    "MLP, 3.2 M parameters": perceptron,
}


def private_step(name: str, batch: int, rounds: int) -> dict[str, float]:
    """Whole private steps with b-min-sep and 16 bands."""
    sides: dict[str, Callable[[], object]] = {}
    size, steps = 20 * batch, 3 * rounds + 40
    for side in ("float32", "grid"):
        torch.manual_seed(0)
        model, shape = MODELS[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(size, *shape), torch.randint(0, 10, (size,)))
        strategy = BSR(bands=16)
        private = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data=data,
            scheme=MinSep.for_batch_size(
                batch_size=batch, dataset_size=size, min_sep=16, steps=steps
            ),
            strategy=strategy,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        entries = torch.zeros(sum(p.numel() for p in model.parameters()))
        if side == "float32":
            private.optimizer.noise = FloatNoise(  # type: ignore[assignment]
                strategy, steps=steps, like=entries, seed=1
            )
        loss, batches = nn.CrossEntropyLoss(), iter(private.loader)

        def step(private: Any = private, batches: Any = batches, loss: Any = loss) -> None:
            x, y = next(batches)
            private.optimizer.zero_grad()
            loss(private.module(x), y).backward()
            private.optimizer.step()

        sides[side] = step
    for _ in range(20):
        for run in sides.values():
            run()
    return taking_turns(sides, rounds)


def main() -> None:
    """Print a line a case; write all figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, help="as torch has them by default")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the figures to")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    facts = results.machine("torch", load=True) | {"threads": torch.get_num_threads()}
    noise = [
        {"name": name, **noise_step(strategy, options.params, options.rounds)}
        for name, strategy in STRATEGIES.items()
    ]
    steps = [{"name": name, **private_step(name, options.batch, options.rounds)} for name in MODELS]
    results.publish(
        options.json,
        {
            "release": results.Table(COLUMNS, noise),
            "release_steps": results.Table(STEP_COLUMNS, steps),
        },
        script=__file__,
        machine=facts,
        params=options.params,
    )


if __name__ == "__main__":
    main()
