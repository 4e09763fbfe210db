"""What four processes do with a model of which each row of two has all, divided between them."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers import fully_sharded_runs as runs
from tests.helpers.distributed_refusals import error_of
from tests.helpers.worlds import leave, meeting

RANKS, ROW = 4, 2
CASES = ("conv, microbatches", "conv, joined", "conv, gdp filter", "tied")


def mesh_of(rows):
    """All ranks, in so many rows."""
    return init_device_mesh("cpu", (rows, RANKS // rows), mesh_dim_names=("replicas", "shards"))


def checkpoints(rank, folder, how):
    """A run that stops and goes on, by each kind of checkpoint, and one that does not stop."""
    private = runs.stopping(sharded=True, steps=runs.STOP, how=how)
    share, whole = private.state_dict(share=True), private.state_dict()
    private.save(folder / "saved")
    torch.save(share, folder / f"share_{rank}.pt")
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    shares = [torch.load(folder / f"share_{r}.pt", weights_only=True) for r in range(RANKS)]

    def ends(**given):
        return runs.flat(runs.stopping(sharded=True, **given).module)

    return {
        "never stopped": ends(how=how),
        "whole": ends(how=how, state=whole),
        "shares": ends(how=how, state=shares),
        "folder": ends(how=how, folder=folder / "saved"),
        "folder, in one row": ends(folder=folder / "saved"),
        "shares, in one row": ends(state=shares),
    }


def rows_differ(rank, mesh):
    """A model that each row has begun otherwise."""
    torch.manual_seed(rank // ROW)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    fully_shard(module, mesh=mesh)
    before = runs.flat(module)
    private = runs.wired(module)
    after = runs.flat(module)
    runs.train(private)
    return {"before": before, "after": after, "trained": runs.flat(module)}


def one_changed(rank, how):
    """A rank that changes its shard before the first step."""
    private = runs.build(sharded=True, how=how)
    if rank == RANKS - 1:
        with torch.no_grad():
            private.optimizer.params[0].to_local().add_(1e-4)
    return {"error": error_of(lambda: runs.train(private))}


def one_drifts(rank, folder, how):
    """A rank whose sum is slightly other than that of the rank which has the same shards."""
    path = folder / "ledger.jsonl"
    private = runs.build(sharded=True, how=how, ledger=path)
    before = runs.flat(private.module)
    add = private.optimizer.shards.add_noise

    def drifting(*given):
        private.optimizer.shards.sums[0].view(-1)[0] += 1e-4
        add(*given)

    if rank == RANKS - 1:
        private.optimizer.shards.add_noise = drifting
    error = error_of(lambda: runs.train(private))
    return {"error": error, "same": torch.equal(runs.flat(private.module), before)}


def sent(how):
    """Norm and size of what is summed over ranks, of examples with gradients of some 10^4 R."""
    options = {**runs.ONE, "noise_multiplier": 0.0, "how": how}
    private = runs.build(sharded=True, **options)
    lengths, kept = {}, {name: getattr(dist, name) for name in runs.ADDING if hasattr(dist, name)}
    kept["all_to_all_single"] = dist.all_to_all_single

    def noted(name):
        def call(*args, **kwargs):
            tensor = args[1] if name == "all_to_all_single" else args[0]
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                lengths.setdefault(name, []).append((float(tensor.norm()), tensor.numel()))
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, noted(name))
    try:
        for x, y in private.loader:
            private.optimizer.zero_grad()
            (1e3 * torch.nn.functional.cross_entropy(private.module(x), y)).backward()
            mine = len(private.loader.current.indices)
            private.optimizer.step()
    finally:
        for name, own in kept.items():
            setattr(dist, name, own)
    pieces = private.optimizer.shards.pieces
    return {
        "sent": lengths,
        "examples": mine,
        "longest": float(private.last_norms.max()),
        "shards": [sum(high - low for low, high in each) for each in pieces],
    }


def worker(rank, folder, world):
    """What this rank finds, by what it does."""
    with meeting(rank, folder, world):
        mesh = mesh_of(RANKS // ROW)
        how = {"mesh": mesh}
        work = {name: lambda name=name: runs.case(name, sharded=True, mesh=mesh) for name in CASES}
        work |= {
            "parts of a release": lambda: runs.parts_of_a_release(how=how),
            "one row": lambda: runs.parts_of_a_release(how={"mesh": mesh_of(1)}),
            "one column": lambda: runs.parts_of_a_release(how={"mesh": mesh_of(RANKS)}),
            "checkpoints": lambda: checkpoints(rank, folder, how),
            "rows differ": lambda: rows_differ(rank, mesh),
            "one changed": lambda: one_changed(rank, how),
            "one drifts": lambda: one_drifts(rank, folder, how),
            "sent": lambda: sent(how),
        }
        leave(work, rank, folder, world)
