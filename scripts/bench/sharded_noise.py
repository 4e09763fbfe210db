"""Memory, traffic and time of a step whose ranks divide noise and optimizer, against one without.

Ranks are processes of this machine over gloo. Both sides are runs of the same ranks, model, data
and batches (equal seeds), and take turns step by step; every side does clipping, noise, update and
its exchanges. Memory is counted from the tensors' storages, with the row of noise that is released.
The payload is what a rank has to send at least (a ring's share); what went over the loopback
device is counted too, where the system tells. Threads are one a rank.

    PYTHONPATH=. python scripts/bench/sharded_noise.py [--ranks 2 4] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from dptrain import BLT, BandMF, NoiseOptions, Poisson, PrivacyEngine
from dptrain.strategies import Strategy
from scripts import results
from scripts.bench.ranks import found_by, hand_over, meeting, noise_and_state

STEPS = 1000
EXAMPLES, BATCH = 4096, 32
WARM_UP = 4
CASES: dict[str, Strategy] = {
    "BandMF, 16 bands": BandMF(bands=16),
    "BLT, 4 buffers": BLT(buffers=4, max_participations=8, min_sep=100),
}
COLUMNS = (
    ("noise", "{strategy}"),
    ("ranks", "{ranks}"),
    ("not divided", "{bytes_whole:MiB .1f} MiB"),
    ("largest rank", "{bytes_largest:MiB .1f} MiB"),
    ("× ranks / not divided", "{of_whole:.3f}"),
    ("payload a rank", "{payload_bytes:MiB .1f} MiB"),
    ("sent, not divided", "{loopback_bytes.off:MiB .1f} MiB"),
    ("sent, divided", "{loopback_bytes.auto:MiB .1f} MiB"),
    ("time of a step", "{ratio:.2f}"),
)
LOOPBACK = pathlib.Path("/sys/class/net/lo/statistics/tx_bytes")


class Side:
    """One run, whose steps are timed one at a time."""

    def __init__(self, strategy: Strategy, shard: str) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        data = TensorDataset(torch.randn(EXAMPLES, 784), torch.randint(0, 10, (EXAMPLES,)))
        self.state = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        private = PrivacyEngine(distributed=True).make_private(
            module=self.module,
            optimizer=self.state,
            data=data,
            scheme=Poisson.for_batch_size(batch_size=BATCH, dataset_size=EXAMPLES, steps=STEPS),
            strategy=strategy,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=0,
            noise=NoiseOptions(shard=shard),
        )
        private.end_early()
        self.optimizer = private.optimizer
        self.batches = iter(private.loader)

    def step(self) -> float:
        """Seconds of the next step, from the moment that all ranks begin it."""
        x, y = next(self.batches)
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def memory(self) -> dict[str, int]:
        """Bytes of past noise and of the optimizer's state."""
        return noise_and_state(self.optimizer.noise, self.state)


def measure(rank: int, world: int, folder: str, rounds: int, name: str) -> None:
    """One process; rank 0 hands the row over."""
    with meeting(rank, world, folder):
        row = of_rank(rank, world, rounds, name)
        if rank == 0:
            hand_over(row, folder)


def of_rank(rank: int, world: int, rounds: int, name: str) -> dict[str, Any]:
    """Both sides' steps, and what all ranks hold."""
    sides = {shard: Side(CASES[name], shard) for shard in ("off", "auto")}
    for side in sides.values():
        for _ in range(WARM_UP):
            side.step()
    took: dict[str, list[float]] = {shard: [] for shard in sides}
    sent = dict.fromkeys(sides, 0)
    for turn in tqdm(range(rounds), desc=f"{name}, {world} ranks", delay=2, disable=rank > 0):
        for shard in ("off", "auto") if turn % 2 == 0 else ("auto", "off"):
            dist.barrier()
            before = loopback()
            took[shard].append(sides[shard].step())
            dist.barrier()
            sent[shard] += loopback() - before
    memory = {shard: side.memory() for shard, side in sides.items()}
    held: list[Any] = [None] * world
    dist.all_gather_object(held, memory)
    pairs = zip(took["auto"], took["off"], strict=True)
    size = sum(p.numel() for p in sides["off"].module.parameters())
    whole = held[0]["off"]
    largest = {what: max(one["auto"][what] for one in held) for what in ("noise", "optimizer")}
    bytes_whole, bytes_largest = (sum(each.values()) for each in (whole, largest))
    return {
        "strategy": name,
        "ranks": world,
        "parameters": size,
        "rounds": rounds,
        "whole": whole,
        "largest": largest,
        "bytes_whole": bytes_whole,
        "bytes_largest": bytes_largest,
        "of_whole": bytes_largest * world / bytes_whole,
        "payload_bytes": round(2 * 4 * size * (world - 1) / world),
        "loopback_bytes": {shard: round(sent[shard] / rounds / world) for shard in sides},
        "seconds": {shard: statistics.median(took[shard]) for shard in sides},
        "ratio": statistics.median(one / other for one, other in pairs),
        "ratio_of_totals": sum(took["auto"]) / sum(took["off"]),
    }


def loopback() -> int:
    """Bytes that the machine has sent to itself; 0 where the system does not tell."""
    return int(LOOPBACK.read_text()) if LOOPBACK.is_file() else 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = [found_by(measure, world, args.rounds, name) for world in args.ranks for name in CASES]
    results.publish(
        args.json,
        {"sharded_noise": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine("torch"),
    )


if __name__ == "__main__":
    main()
