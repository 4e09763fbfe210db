"""What two processes do in the tests of users' schemes; each leaves what it found in a file."""

import functools

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import BandMF
from dptrain.sampling import AttributionGraph, GraphPartition, MinSep, PerUser, Poisson, UserCyclic
from tests.helpers.engine import (
    flat,
    make,
    put_together,
    small_net,
    train,
    watch_releases,
)
from tests.helpers.worlds import leave, meeting
from tests.sampling.users.test_per_user import graph_with

MODES = ["hooks", "functorch", "bookkeeping"]
STEPS = 6
SIZES = (1, 4, 2, 3, 1, 6, 2, 5)
OWNED = graph_with(SIZES, seed=4)
RINGS = AttributionGraph.from_lists(
    [[4 * (e // 4) + e % 4, 4 * (e // 4) + (e + 1) % 4] for e in range(24)]
)
BOUND = 0.5


def slots(cycle=4, probability=0.6, steps=STEPS, spread=2):
    """Rings of four users, whose examples alternate between slots half a cycle apart."""
    partition = GraphPartition.of_graph(RINGS, cycle=cycle, spread=spread)
    sizes = [size for size in partition.sizes if size]
    return UserCyclic(partition=partition, batch_size=probability * min(sizes), steps=steps)


def averaged(group_size=3, **users):
    users = {"probability": 0.5, "dataset_size": OWNED.users, "steps": STEPS, **users}
    kind = MinSep if "min_sep" in users else Poisson
    return PerUser(graph=OWNED, users=kind(**users), group_size=group_size)


CASES = {
    "slots": {"scheme": slots(), "strategy": BandMF(bands=2)},
    "slots, microbatches": {
        "scheme": slots(),
        "strategy": BandMF(bands=2),
        "max_physical_batch_size": 2,
    },
    "means": {"scheme": averaged()},
    "means, microbatches": {"scheme": averaged(), "max_physical_batch_size": 4},
    "means, separated": {
        "scheme": averaged(min_sep=3, probability=0.4),
        "strategy": BandMF(bands=3),
        "max_physical_batch_size": 3,
    },
    "means, so many parts": {"scheme": averaged(group_size=6), "microbatches": 3},
    "means, padded": {
        "scheme": averaged(max_batch_size=5),
        "max_physical_batch_size": 4,
    },
    "means, few users": {"scheme": averaged(probability=0.1), "max_physical_batch_size": 3},
    "means, sums": {"scheme": averaged(), "loss_reduction": "sum"},
}


def data_of(scheme, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    size = scheme.dataset_size
    x = torch.randn(size, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))


def build(mode, *, module=None, data=None, **options):
    """A run whose guarantee no test asks for; any accountant that takes every scheme will do."""
    module = small_net() if module is None else module
    data = data_of(options["scheme"]) if data is None else data
    if isinstance(options["scheme"], PerUser):
        options.setdefault("accountant", "gaussian")
    return make(module, data, mode, max_grad_norm=BOUND, **options)


def run(mode, **options):
    private = build(mode, **options)
    releases = watch_releases(private)
    train(private)
    return {
        "parameters": flat(private.module),
        "released": put_together(private, releases[-1]),
        "steps": private.steps_executed,
    }


def records(**options):
    """(step, part, weight, rows) of everything clipped as one that this rank was given."""
    private = build("bookkeeping", **options)
    model, optimizer, loader = private
    reduction = options.get("loss_reduction", "mean")
    found = []
    for x, y in loader:
        micro, start = loader.current, 0
        rows = micro.indices.tolist()
        sizes = [1] * len(micro.weights) if micro.sizes is None else micro.sizes.tolist()
        for size, weight in zip(sizes, micro.weights.tolist(), strict=True):
            found.append((micro.step, micro.part, weight, rows[start : start + size]))
            start += size
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
    return found


def sums(mode, **options):
    """What is released without noise, times B̄, of every step of a model that stands still."""
    private = build(
        mode,
        module=small_net().double(),
        data=data_of(options["scheme"], torch.float64),
        lr=0.0,
        noise_multiplier=0.0,
        **options,
    )
    summed = options.get("loss_reduction") == "sum"
    factor = 1.0 if summed else private.optimizer.expected_batch_size
    found = watch_releases(private)
    train(private)
    return [put_together(private, release) * factor for release in found]


def interrupted(name, state=None, stop=None, dropout=0.0):
    private = build("bookkeeping", module=small_net(dropout), **CASES[name])
    if state is not None:
        private.load_state_dict(state)
    train(private, steps=stop)
    return private


RESUMED = ("slots, microbatches", "means, separated", "means, padded")


def resumed(name, folder):
    whole = interrupted(name, dropout=0.3)
    first = interrupted(name, dropout=0.3, stop=4)
    again = interrupted(name, dropout=0.3, state=first.state_dict())
    alone = torch.load(folder / f"{name}.pt", weights_only=True)
    return {
        "whole": flat(whole.module),
        "again": flat(again.module),
        "from one": flat(interrupted(name, state=alone).module),
    }


def worker(rank, folder, world):
    """What this rank finds, by what it does."""
    with meeting(rank, folder, world):
        work = {
            (what, mode, name): functools.partial(do, mode, **options)
            for what, do in (("run", run), ("sums", sums))
            for mode in MODES
            for name, options in CASES.items()
        }
        work |= {
            ("records", n): functools.partial(records, **options) for n, options in CASES.items()
        }
        work |= {("resumed", name): functools.partial(resumed, name, folder) for name in RESUMED}
        leave(work, rank, folder, world)
