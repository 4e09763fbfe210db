"""A private step of a model that fully_shard divided, against fully_shard's own, without privacy.

The model is of GPT-2's widths, with fewer layers. Ranks are processes of this machine over gloo.
Both sides are in one process group and take turns step by step, on as many examples of the same
length; each does its passes, its exchanges and an update by AdamW. Times are those of the
processors, of all threads of a process, since ranks that share cores wait for one another; and by
the clock. Memory is counted from the tensors' storages, with the row of noise that is released. The
payload is what rank 0 has to send at least (a ring's share) in the collectives of its last step; it
is counted over gloo only. With ``--rows`` the ranks stand in so many rows, each of which has the
whole model (HSDP), on both sides.

    PYTHONPATH=. python scripts/bench/fully_sharded.py [--ranks 2 4] [--rows N] [--rounds N]
        [--examples N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from tqdm import tqdm

from dptrain import BandMF, Gradients, Identity, Poisson, PrivacyEngine
from dptrain.strategies import Strategy
from scripts.bench.ranks import bytes_of, found_by, hand_over, meeting, noise_and_state, write

STEPS, WARM_UP = 1000, 2
WIDTH, HEADS, VOCABULARY = 768, 12, 50257
CASES: dict[str, Strategy] = {"independent": Identity(), "BandMF, 8 bands": BandMF(bands=8)}
# What each of n ranks sends at least, in sizes of the larger of a call's tensors, times (n - 1)/n.
SENT = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_single": 1,
    "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1,
    "all_to_all_single": 1,
    "all_reduce": 2,
    "broadcast": 1,
}


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention to what came before, then each place by itself."""
        rows, length, _ = x.shape
        parts = self.attend(self.before(x)).view(rows, length, 3, HEADS, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.widen(self.after(x))))


class Decoder(nn.Module):
    """GPT-2 with so many layers, its head tied to its embedding."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of every place."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]).expand_as(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tokens(Dataset[Any]):
    """Random ones; an example is the text, and the same again as what is to be predicted.

    Args:
        size: number of examples.
        length: of each.
    """

    def __init__(self, size: int, length: int) -> None:
        self.ids = torch.randint(0, VOCABULARY, (size, length))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.ids[index]


def mesh_of(world: int, rows: int) -> DeviceMesh:
    """All ranks in order, in so many rows; of one dimension where it is one row."""
    if rows == 1:
        return init_device_mesh("cpu", (world,))
    shape = (rows, world // rows)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))


def divided(layers: int, length: int, mesh: DeviceMesh) -> nn.Module:
    """The model, each block and then all of it divided."""
    torch.manual_seed(0)
    module = Decoder(layers, length)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def loss_of(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The mean over the examples of the mean over their places."""
    logits = module(ids)[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


class Ordinary:
    """fully_shard's own training."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        self.module = divided(args.layers, args.length, mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        self.ids = Tokens(args.examples, args.length).ids

    def take(self) -> torch.Tensor:
        """A batch, which is no part of what is measured."""
        return self.ids

    def step(self, ids: torch.Tensor) -> None:
        """One update."""
        self.optimizer.zero_grad()
        loss_of(self.module, ids).backward()
        self.optimizer.step()

    def state(self) -> dict[str, int]:
        """Bytes of the optimizer's state on this rank."""
        held = [v for each in self.optimizer.state.values() for v in each.values()]
        return {"optimizer": bytes_of(v.to_local() for v in held if v.ndim)}


class Private(Ordinary):
    """The same with per-example clipping and noise."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, strategy: Strategy) -> None:
        self.module = divided(args.layers, args.length, mesh)
        self.adam = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        size = args.examples * mesh.size()
        private = PrivacyEngine(distributed=True).make_private(
            module=self.module,
            optimizer=self.adam,
            data=Tokens(size, args.length),
            scheme=Poisson(probability=1.0, dataset_size=size, steps=STEPS),
            strategy=strategy,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=0,
            gradients=Gradients(probe="first"),
        )
        private.end_early()
        self.optimizer = private.optimizer
        self.batches = iter(private.loader)

    def take(self) -> torch.Tensor:
        """A batch of the loader's: everything there is."""
        ids: torch.Tensor = next(self.batches)
        return ids

    def state(self) -> dict[str, int]:
        """Bytes of noise, with a row that is drawn now, and of the optimizer's state."""
        return noise_and_state(self.optimizer.noise, self.adam)


@contextlib.contextmanager
def counted() -> Iterator[list[float]]:
    """Yields a list whose number is the bytes that this rank has to send in the context."""
    total = [0.0]
    before = {name: getattr(dist, name) for name in SENT if hasattr(dist, name)}

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            flat = [*args, *kwargs.values()]
            given = [sum(t.nbytes for t in a) for a in flat if isinstance(a, list)]
            given += [a.nbytes for a in flat if isinstance(a, torch.Tensor)]
            groups = [a for a in flat if isinstance(a, dist.ProcessGroup)]
            ranks = dist.get_world_size(*groups)
            total[0] += SENT[name] * max(given) * (ranks - 1) / ranks
            with _once(before):  # one of these may call another
                return before[name](*args, **kwargs)

        return call

    counting = {name: noting(name) for name in before}
    _set(counting)
    try:
        yield total
    finally:
        _set(before)


@contextlib.contextmanager
def _once(before: dict[str, Any]) -> Iterator[None]:
    now = {name: getattr(dist, name) for name in before}
    _set(before)
    try:
        yield
    finally:
        _set(now)


def _set(functions: dict[str, Any]) -> None:
    for name, function in functions.items():
        setattr(dist, name, function)


def measure(rank: int, world: int, folder: str, name: str, args: argparse.Namespace) -> None:
    """One process; rank 0 hands the row over."""
    with meeting(rank, world, folder):
        row = of_rank(rank, world, name, args)
        if rank == 0:
            hand_over(row, folder)


def of_rank(rank: int, world: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides' steps, and what all ranks hold and spent."""
    mesh = mesh_of(world, args.rows)
    sides: dict[str, Ordinary] = {
        "ordinary": Ordinary(args, mesh),
        "private": Private(args, mesh, CASES[name]),
    }
    clock: dict[str, list[float]] = {side: [] for side in sides}
    work: dict[str, list[float]] = {side: [] for side in sides}
    payload = dict.fromkeys(sides, 0.0)
    rounds = range(-WARM_UP, args.rounds)
    for turn in tqdm(rounds, desc=f"{name}, {world} ranks", delay=2, disable=rank > 0):
        for side in ("ordinary", "private") if turn % 2 == 0 else ("private", "ordinary"):
            ids = sides[side].take()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            with counted() as sent:
                sides[side].step(ids)
            end = time.perf_counter(), time.process_time()
            if turn >= 0:
                clock[side].append(end[0] - start[0])
                work[side].append(end[1] - start[1])
            payload[side] = sent[0]
    held: list[Any] = [None] * world
    mine = {side: each.state() for side, each in sides.items()}
    dist.all_gather_object(held, (mine, work))
    size = sum(p.numel() for p in sides["private"].module.parameters())
    rows = CASES[name].bands if isinstance(CASES[name], BandMF) else 1
    whole = {"noise": 4 * size * rows, "optimizer": 8 * size}
    spent = {
        side: [sum(each) for each in zip(*(one[side] for _, one in held), strict=True)]
        for side in sides
    }
    return {
        "strategy": name,
        "ranks": world,
        "rows_of_ranks": args.rows,
        "parameters": size,
        "layers": args.layers,
        "examples": args.examples,
        "length": args.length,
        "rounds": args.rounds,
        "whole": whole,
        "largest": {
            what: max(one["private"][what] for one, _ in held) for what in ("noise", "optimizer")
        },
        "payload_bytes": {side: round(payload[side]) for side in sides},
        "processor_seconds": {side: statistics.median(spent[side]) for side in sides},
        "processor_ratio": statistics.median(
            one / other for one, other in zip(spent["private"], spent["ordinary"], strict=True)
        ),
        "clock_seconds": {side: statistics.median(clock[side]) for side in sides},
        "clock_ratio": statistics.median(
            one / other for one, other in zip(clock["private"], clock["ordinary"], strict=True)
        ),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rows", type=int, default=1, help="of ranks, that each have all (HSDP)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--examples", type=int, default=8, help="a rank's")
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if odd := [world for world in args.ranks if world % args.rows]:
        parser.error(f"--rows {args.rows} does not divide --ranks {odd}: give a mesh of full rows")
    rows = []
    for world in args.ranks:
        for name in CASES:
            row = found_by(measure, world, name, args)
            rows.append(row)
            whole, largest = (sum(row[kind].values()) for kind in ("whole", "largest"))
            payload = row["payload_bytes"]
            shards = world // args.rows
            print(
                f"{name:18} {args.rows} x {shards} ranks: {largest / 2**20:.1f} of "
                f"{whole / 2**20:.1f} MiB, {largest * shards / whole:.3f} of whole/shards; payload "
                f"{payload['private'] / payload['ordinary']:.3f} of fully_shard's; time "
                f"{row['processor_ratio']:.3f} of the processors', {row['clock_ratio']:.3f}",
                flush=True,
            )
    write(args.json, rows)


if __name__ == "__main__":
    main()
