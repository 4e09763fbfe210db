"""A private step of a model that fully_shard divided, against fully_shard's own, without privacy.

The model is of GPT-2's widths, with fewer layers. Ranks are processes of this machine over gloo.
Both sides are in one process group and take turns step by step, on as many examples of the same
length; each does its passes, its exchanges and an update by AdamW. Times are those of the
processors, of all threads of a process, since ranks that share cores wait for one another; and by
the clock. A private run looks at the loss of its first batches, and its history of noise fills up
meanwhile: it takes these steps alone, and their time is told beside the ratio of the later ones.
Memory is counted from the tensors' storages, with the row of noise that is released. The payload is
what rank 0 has to send at least (a ring's share) in the collectives of its last step; it is counted
over gloo only. A mesh of several rows has the whole model in each of them (HSDP), on both sides.
Results of other meshes that the file holds already are kept.

    PYTHONPATH=. python scripts/bench/fully_sharded.py [--meshes 1x2 1x4 2x2] [--rounds N]
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
from scripts import results
from scripts.bench.ranks import bytes_of, found_by, hand_over, meeting, noise_and_state

STEPS = 1000
# Of the first batches the loss is looked at in sixteen (LossSignature), and the bands of noise are
# full after eight; an ordinary step only has to have its optimizer's state.
WARM_UP = {"ordinary": 2, "private": 18}
WIDTH, HEADS, VOCABULARY = 768, 12, 50257
CASES: dict[str, Strategy] = {"independent": Identity(), "BandMF, 8 bands": BandMF(bands=8)}
COLUMNS = (
    ("noise", "{strategy}"),
    ("mesh", "{groups} × {shards}"),
    ("noise and optimizer of a rank", "{held:MiB .0f} MiB"),
    ("of whole / shards", "{of_whole:.3f}"),
    ("payload, fully_shard's", "{payload_bytes.ordinary:MiB .1f} MiB"),
    ("private", "× {payload_ratio:.3f}"),
    ("processor time", "× {processor_ratio:.2f}"),
    ("time", "× {clock_ratio:.2f}"),
    ("first steps, processor time", "× {first_processor_ratio:.2f}"),
)
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
        """Bytes of past noise and of the optimizer's state."""
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
    mesh = mesh_of(world, world // args.shards)
    sides: dict[str, Ordinary] = {
        "ordinary": Ordinary(args, mesh),
        "private": Private(args, mesh, CASES[name]),
    }
    first = {side: _Times() for side in sides}
    later = {side: _Times() for side in sides}
    turns = [side for side, steps in WARM_UP.items() for _ in range(steps)]
    payload = dict.fromkeys(sides, 0.0)
    for turn in range(args.rounds):
        turns += ("ordinary", "private") if turn % 2 == 0 else ("private", "ordinary")
    title = f"{name}, {world // args.shards} x {args.shards} ranks"
    for turn, side in enumerate(tqdm(turns, desc=title, delay=2, disable=rank > 0)):
        ids = sides[side].take()
        dist.barrier()
        with counted() as sent:
            (first if turn < sum(WARM_UP.values()) else later)[side].of(sides[side], ids)
        payload[side] = sent[0]
    found: list[Any] = [None] * world
    mine = {side: each.state() for side, each in sides.items()}
    work = {side: each.work for side, each in later.items()}
    start = first["private"].work[len(first["private"].work) // 4 :]  # the very first is set-up
    dist.all_gather_object(found, (mine, work, start))
    size = sum(p.numel() for p in sides["private"].module.parameters())
    bands = CASES[name].bands if isinstance(CASES[name], BandMF) else 1
    spent = {
        side: [sum(each) for each in zip(*(work[side] for _, work, _ in found), strict=True)]
        for side in sides
    }
    early = statistics.median(map(sum, zip(*(start for _, _, start in found), strict=True)))
    whole = {"noise": 4 * size * bands, "optimizer": 8 * size}
    largest = {
        what: max(one["private"][what] for one, _, _ in found) for what in ("noise", "optimizer")
    }
    held = sum(largest.values())
    return {
        "strategy": name,
        "ranks": world,
        "groups": world // args.shards,
        "shards": args.shards,
        "parameters": size,
        "layers": args.layers,
        "examples": args.examples,
        "length": args.length,
        "rounds": args.rounds,
        "whole": whole,
        "largest": largest,
        "held": held,
        "of_whole": held * args.shards / sum(whole.values()),
        "payload_ratio": payload["private"] / payload["ordinary"],
        "payload_bytes": {side: round(payload[side]) for side in sides},
        "processor_seconds": {side: statistics.median(spent[side]) for side in sides},
        "processor_ratio": _ratio(spent),
        "first_processor_ratio": early / statistics.median(spent["ordinary"]),
        "clock_seconds": {side: statistics.median(each.clock) for side, each in later.items()},
        "clock_ratio": _ratio({side: each.clock for side, each in later.items()}),
    }


class _Times:
    """Of steps, by the clock and by this process's processors."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.work: list[float] = []

    def of(self, side: Ordinary, ids: torch.Tensor) -> None:
        start = time.perf_counter(), time.process_time()
        side.step(ids)
        self.clock.append(time.perf_counter() - start[0])
        self.work.append(time.process_time() - start[1])


def _ratio(times: dict[str, list[float]]) -> float:
    """Of a private step to the ordinary one beside it, the median."""
    pairs = zip(times["private"], times["ordinary"], strict=True)
    return statistics.median(one / other for one, other in pairs)


def mesh_given(text: str) -> tuple[int, int]:
    """Rows and ranks in each, of ``2x4``."""
    rows, _, shards = text.partition("x")
    if not (rows.isdigit() and shards.isdigit() and int(rows) > 0 and int(shards) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh: give rows x ranks, as 2x4")
    return int(rows), int(shards)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    meshes = [(1, 2), (1, 4), (2, 2)]
    parser.add_argument("--meshes", type=mesh_given, nargs="+", default=meshes)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--examples", type=int, default=8, help="of a step, of all ranks")
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    batch, new = args.examples, {(rows * shards, shards) for rows, shards in args.meshes}
    if odd := [ranks for ranks, _ in new if batch % ranks]:
        parser.error(f"--examples {batch}: cannot be shared out to {odd} ranks")
    old = results.rows_of(args.json, "fully_sharded")
    found = [row for row in old if (row["ranks"], row["shards"]) not in new]
    for rows, shards in args.meshes:
        args.shards, args.examples = shards, batch // (rows * shards)
        for name in CASES:
            row = found_by(measure, rows * shards, name, args)
            found.append(row)
            table = results.Table(COLUMNS, found)
            results.publish(
                args.json,
                {"fully_sharded": table},
                script=__file__,
                machine=results.machine("torch"),
            )


if __name__ == "__main__":
    main()
