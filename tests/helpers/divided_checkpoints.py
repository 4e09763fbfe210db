"""What processes save in folders, and load, of models that ``fully_shard`` divided.

Each leaves a file of what it found. A run saves after some steps, or goes on from what this or
another number of ranks saved.
"""

import io
import shutil
import stat
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dptrain import BandMF
from dptrain.distributed import Ranks
from dptrain.individual import GDPFilter
from tests.helpers.distributed_refusals import error_of
from tests.helpers.engine import separated
from tests.helpers.fully_sharded_runs import BANDED, STEPS, STOP, build, flat, optim, train
from tests.helpers.worlds import leave, meeting

CASES = {
    "conv": {**separated(24, STEPS), "max_physical_batch_size": 2},
    "conv, joined": {"optimizer": "joined", **BANDED},
    "conv, gdp filter": {
        "individual": GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=STEPS),
        "max_grad_norm": 3.0,
    },
    "tied": {"optimizer": "SGD", "strategy": BandMF(bands=2)},
}


def made(name, *, sharded, **options):
    private = build(name.split(",")[0], sharded=sharded, **{**CASES[name], **options})
    scheduler = private.register_scheduler(optim.lr_scheduler.ExponentialLR(private.optimizer, 0.7))
    return private, scheduler


def trained(name, *, sharded, folder=None, steps=STEPS, **options):
    """A run to its end, or for some steps, from a folder if there is one."""
    private, scheduler = made(name, sharded=sharded, **options)
    if folder is not None:
        private.load(folder)
    for _ in range(steps - private.steps_executed):
        train(private, steps=private.steps_executed + 1)
        scheduler.step()
    return private


def path_of(folder, name, world):
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}_{world}"


def outcome(private):
    state = private.state_dict()
    return {
        "parameters": flat(private.module),
        "optimizer": state["optimizer"],
        "noise": [n["buffers"] for n in noises(state)],
        "loader": state["private"]["loader"],
        "schedulers": state["schedulers"],
        "ledger": state["ledger"],
        "individual": state["private"].get("individual"),
    }


def noises(state):
    held = state["private"]["noise"]
    return held if isinstance(held, list) else [held]


def saved(folder, name, world):
    """By this process, or by all ranks."""
    private = trained(name, sharded=world > 1, steps=STOP)
    private.save(path_of(folder, name, world))
    return private


class Gathering:
    """Has what gives a rank more than its part be an error."""

    names = ("gather_pieces", "shares")

    def __enter__(self):
        self.kept = {name: getattr(Ranks, name) for name in self.names}
        for name in self.names:
            setattr(Ranks, name, self.refuse)

    def __exit__(self, *_):
        for name, own in self.kept.items():
            setattr(Ranks, name, own)

    @staticmethod
    def refuse(*_):
        raise AssertionError("a rank is given more than its part")


def resumed(folder, name, world):
    """From every number of ranks that has saved, this one last; and a run that never stopped."""
    private = trained(name, sharded=True, steps=STOP)
    with Gathering():
        private.save(path_of(folder, name, world))
    found = {"never stopped": outcome(trained(name, sharded=True))}
    for before in (1, 2, 4):
        if (path := path_of(folder, name, before)).exists():
            found[before] = outcome(trained(name, sharded=True, folder=path))
    return found


def modes(folder, world):
    path = path_of(folder, "conv", world)
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in (path, *path.iterdir())}


def changed(path, source, name, how):
    """A copy of a checkpoint with a file of it written over."""
    shutil.copytree(source, path)
    file = path / name
    file.write_bytes(how(file.read_bytes()))
    return path


def refusals(rank, folder):
    """What both ranks are told, and whether the run is as it was."""
    name, good = "conv", path_of(folder, "conv", 2)
    further = trained(name, sharded=True, steps=STOP + 1)
    further.save(folder / "further")
    work = {
        "exists": lambda: further.save(good),
        "missing": lambda: further.load(folder / "nowhere"),
        "another each": lambda: further.save(folder / f"of {rank}"),
        "no path": lambda: further.load(3),
        "mechanism": lambda: made(name, sharded=True, noise_multiplier=2.0)[0].load(good),
        "settings": lambda: made(name, sharded=True, max_grad_norm=0.25)[0].load(good),
        "schedulers": lambda: build(name, sharded=True, **CASES[name]).load(good),
        "model": lambda: made("tied", sharded=True, **same_mechanism())[0].load(good),
        "ledger": lambda: strange_ledger(folder, good),
        "whole model": lambda: made(name, sharded=False)[0].save(folder / "no"),
        "detached": lambda: detached(good),
    }
    if rank == 0:
        # One rank's part, of a later step of the same run: the newest, as after a copy by hand.
        changed(folder / "mixed", good, "__1_0.distcp", lambda _: part(folder / "further"))
        for entry in ("module.4.weight", "optimizer.0.5.exp_avg", "noise", "rest"):
            flipped(folder / f"flipped {entry}", good, entry)
    dist.barrier()
    for entry in ("module.4.weight", "optimizer.0.5.exp_avg", "noise", "rest"):
        work[f"flipped {entry}"] = lambda entry=entry: made(name, sharded=True)[0].load(
            folder / f"flipped {entry}"
        )
    work["mixed"] = lambda: made(name, sharded=True)[0].load(folder / "mixed")
    return {name: error_of(do) for name, do in work.items()}


def part(path):
    return (path / "__1_0.distcp").read_bytes()


def flipped(path, source, entry):
    """A copy with one bit of the numbers of a tensor changed, and the sum of its file set right."""
    shutil.copytree(source, path)
    metadata = dcp.FileSystemReader(path).read_metadata()
    index, where = next(
        (index, found)
        for index, found in metadata.storage_data.items()
        if index.fqn.startswith(f"run.{entry}")
    )
    file = path / where.relative_path
    data = bytearray(file.read_bytes())
    piece = bytes(data[where.offset : where.offset + where.length])
    held = torch.load(io.BytesIO(piece), weights_only=True)
    held.view(-1).view(torch.uint8)[0] ^= 1
    out = io.BytesIO()
    torch.save(held, out)
    assert len(out.getvalue()) == where.length, index
    data[where.offset : where.offset + where.length] = out.getvalue()
    file.write_bytes(bytes(data))


def same_mechanism():
    return {"scheme": CASES["conv"]["scheme"], "strategy": CASES["conv"]["strategy"], "data": None}


def strange_ledger(folder, good):
    path = folder / "strange.jsonl"
    other = build("conv", sharded=True, ledger=path, seed=77, **CASES["conv"])
    train(other, steps=1)
    dist.barrier()
    again, _ = made("conv", sharded=True, ledger=path)
    again.load(good)


def detached(good):
    private, _ = made("conv", sharded=True)
    private.detach()
    private.load(good)


def worker(rank, folder, world):
    """What this rank finds, by what it does."""
    warnings.filterwarnings("error", module="torch.distributed.checkpoint")
    with meeting(rank, folder, world):
        work = {name: lambda name=name: resumed(folder, name, world) for name in CASES}
        work |= {"modes": lambda: modes(folder, world)}
        if world == 2:
            work["refusals"] = lambda: refusals(rank, folder)
        leave(work, rank, folder, world)
