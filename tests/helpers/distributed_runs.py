"""What two processes do in the tests of distributed runs; each leaves what it found in a file."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine, ScaledAdam
from dptrain.distributed.ranks import Ranks
from dptrain.individual import GDPFilter, RenyiFilter
from tests.helpers.distributed_refusals import error_of, refusals
from tests.helpers.engine import (
    everything_every_step,
    flat,
    images,
    make,
    put_together,
    separated,
    small_net,
    train,
    watch_releases,
)
from tests.helpers.worlds import leave, meeting

MODES = ["hooks", "functorch", "bookkeeping"]
STEPS = 5
FULL = everything_every_step(24, STEPS)
BUDGET = {"target_delta": 1e-3, "max_steps": STEPS}
CASES = {
    "minsep, BandMF, microbatches": {**separated(24, STEPS), "max_physical_batch_size": 2},
    "few rows": {"scheme": Poisson(probability=0.06, dataset_size=24, steps=STEPS)},
    "sum": {"scheme": FULL, "loss_reduction": "sum", "lr": 0.01},
    "padded": {
        "scheme": Poisson(probability=0.4, max_batch_size=7, dataset_size=24, steps=STEPS),
        "max_physical_batch_size": 3,
    },
    "not finite": {"scheme": FULL, "data": "broken"},
    "gdp filter": {
        "scheme": FULL,
        "individual": GDPFilter(target_epsilon=6.0, **BUDGET),
        "max_grad_norm": 3.0,
        "max_physical_batch_size": 5,
    },
}
RENYI = {
    "scheme": Poisson(probability=0.5, dataset_size=24, steps=STEPS),
    "individual": RenyiFilter(target_epsilon=3.0, personal_clipping=1.5, **BUDGET),
}


def broken_images():
    x, y = images().tensors
    x = x.clone()
    x[3], x[20] = float("nan"), float("inf")
    return TensorDataset(x, y)


def build(mode, data=None, **options):
    return make(small_net(), broken_images() if data == "broken" else images(), mode, **options)


def outcome(private):
    """What two ranks and one process have in common, up to rounding, of a run that is trained."""
    releases = watch_releases(private)
    train(private)
    state = private.state_dict()
    spending = state["private"].get("individual", {}).get("spending", {})
    return {
        "parameters": flat(private.module),
        "released": put_together(private, releases[-1]),
        "nonfinite": private.nonfinite_examples,
        "active": state["private"].get("individual", {}).get("active_counts"),
        "spending": {k: v for k, v in spending.items() if isinstance(v, torch.Tensor)},
        "steps": private.steps_executed,
    }


def run(mode, **options):
    return outcome(build(mode, **options))


def scaled():
    """An optimizer that scales gradients, whose scales are those of the whole batch."""
    net = small_net()
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=ScaledAdam(net.parameters(), lr=0.01, eps_scale=0.1),
        data=images(),
        scheme=FULL,
        noise_multiplier=0.5,
        max_grad_norm=5.0,
        seed=5,
        gradients=Gradients(mode="hooks"),
    )
    return outcome(private)


class Branches(nn.Module):
    """Rows with a positive first pixel take one branch, others the other one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right, self.neither = (nn.Linear(16, 3) for _ in range(3))

    def forward(self, x):
        rows = x.flatten(1)
        return self.left(rows) if bool((rows[:, 0] > 0).all()) else self.right(rows)


def halves():
    """All rows of the first rank take the left branch, those of the second the right one."""
    x, y = images().tensors
    x = x.clone()
    x[:, 0, 0, 0] = torch.where(torch.arange(24) < 12, 1.0, -1.0)
    return TensorDataset(x, y)


def branches(mode):
    """The sum that is released without noise, of a model that the probe would refuse.

    The batch chooses its layers: what is asked here is only what ranks do whose layers differ.
    """
    options = {"scheme": everything_every_step(24, 1), "noise_multiplier": 0.0, "probe": "off"}
    private = make(Branches(), halves(), mode, lr=0.0, **options)
    releases = watch_releases(private)
    train(private)
    return put_together(private, releases[-1]) * 24


def interrupted(mode, dropout, state=None, stop=None):
    """A run of ten steps, gone on with from ``state``, or left after ``stop`` steps."""
    private = make(
        small_net(dropout), images(), mode, max_physical_batch_size=3, **separated(24, 10)
    )
    if state is not None:
        private.load_state_dict(state)
    train(private, steps=stop)
    return private


def resumed(rank, folder, mode):
    whole = interrupted(mode, dropout=0.3)
    first = interrupted(mode, dropout=0.3, stop=4)
    state = first.state_dict()
    if rank == 1:  # any rank's will do
        torch.save(state, folder / f"two_{mode}.pt")
    dist.barrier()
    state = torch.load(folder / f"two_{mode}.pt", weights_only=True)
    again = interrupted(mode, dropout=0.3, state=state)
    plain = interrupted(mode, dropout=0.0, stop=4)
    from_one = torch.load(folder / f"one_{mode}.pt", weights_only=True)
    return {
        "whole": flat(whole.module),
        "again": flat(again.module),
        "plain": plain.state_dict(),
        "from one": flat(interrupted(mode, dropout=0.0, state=from_one).module),
    }


def ledger(rank, folder):
    """The file, and what is said of a repeat with other noise."""
    path = folder / "ledger.jsonl"
    first = build("hooks", scheme=FULL, ledger=path)
    train(first)
    dist.barrier()
    lines = path.read_text().splitlines()
    again = build("hooks", scheme=FULL, ledger=path)  # bit for bit the same
    train(again)
    other = build("hooks", scheme=FULL, ledger=path, seed=6)
    error = error_of(lambda: train(other))
    dist.barrier()
    full = build("hooks", scheme=FULL, ledger=folder / "full.jsonl")
    before = flat(full.module)
    if rank == 0:
        (folder / "full.jsonl").unlink()
        (folder / "full.jsonl").mkdir()  # as good as a disk that is full
    lost = error_of(lambda: train(full))
    return {
        "lost": lost,
        "unchanged": torch.equal(before, flat(full.module)),
        "digests": first.optimizer.ledger.digests,
        "lines": len(lines),
        "after": path.read_text().splitlines() == lines,
        "error": error,
    }


def start(rank):
    """Parameters and buffers after the run is made by ranks that begin with their own."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    nn.init.constant_(net[1].weight, float(rank))
    net.register_buffer("flag", torch.tensor(rank == 0))
    net.register_buffer("count", torch.tensor([rank, 7]))
    make(net, images(), scheme=FULL)
    return {k: v.clone() for k, v in net.state_dict().items()}


def calibrated():
    private = make(
        small_net(),
        images(),
        scheme=FULL,
        noise_multiplier=None,
        target_epsilon=3.0,
        target_delta=1e-3,
        seed=None,
    )
    train(private)
    return {
        "hash": private.mechanism.hash,
        "guarantee": private.guarantee().to_json(),
        "parameters": flat(private.module),
        "seed": private.state_dict()["private"]["loader"]["seed"],
    }


def wrapped(rank):
    """DistributedDataParallel around the module."""
    errors, ends = {}, {}
    for mode in MODES:
        module = DistributedDataParallel(small_net())

        def go(module=module, mode=mode):
            private = make(module, images(), mode, scheme=FULL)
            train(private)
            ends[mode] = flat(private.module)

        errors[mode] = error_of(go)
    return errors, ends


def alone(rank):
    """Each rank for itself, with its own seed."""
    private = make(small_net(), images(), scheme=FULL, seed=rank, distributed=False)
    train(private)
    return flat(private.module)


def exchanges(rank):
    """What the ranks give each other."""
    ranks = Ranks.of(None)
    columns = np.arange(2.0 * (rank + 1)).reshape(2, rank + 1) + 10 * rank
    together, own = ranks.gather(columns, 3)
    many = [torch.full((3, 1), float(i + rank)) for i in range(2000)]
    big = torch.arange(1 << 23, dtype=torch.float32) * (rank + 1)
    odd = torch.ones(5, 4, dtype=torch.float64).t()[1:] * (rank + 1)
    sums = ranks.sum([*many, None if rank else big, odd], [*many, big, odd])
    return {
        "together": together,
        "own": np.array_equal(together[:, own], columns),
        "many": all(bool((s == 2 * i + 1).all()) for i, s in enumerate(sums[:2000])),
        "big": torch.equal(sums[2000], torch.arange(1 << 23, dtype=torch.float32)),
        "odd": odd.clone(),
        "first": ranks.from_first(lambda: rank + 40),
    }


def worker(rank, folder, world):
    """What this rank finds, by what it does."""
    with meeting(rank, folder, world):
        work = {
            ("case", mode, name): lambda mode=mode, options=options: run(mode, **options)
            for mode in MODES
            for name, options in CASES.items()
        }
        work |= {("branches", mode): lambda mode=mode: branches(mode) for mode in MODES}
        work |= {("resumed", mode): lambda mode=mode: resumed(rank, folder, mode) for mode in MODES}
        work |= {
            "renyi": lambda: run("hooks", **RENYI),
            "scaled": scaled,
            "exchanges": lambda: exchanges(rank),
            "start": lambda: start(rank),
            "calibrated": calibrated,
            "alone": lambda: alone(rank),
            "wrapped": lambda: wrapped(rank),
            "ledger": lambda: ledger(rank, folder),
            "refusals": lambda: refusals(rank, folder),
        }
        leave(work, rank, folder, world)
