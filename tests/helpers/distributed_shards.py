"""What two or four processes do in the tests of divided noise; each leaves what it found."""

import datetime
import logging
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import (
    BISR,
    BandMF,
    Gradients,
    Identity,
    JoinedOptimizer,
    NoiseOptions,
    PrivacyEngine,
    ScaledAdam,
)
from dptrain.distributed import Ranks
from dptrain.individual import GDPFilter
from dptrain.noise import shard_pieces
from dptrain.strategies import BLT, Dense, Tree
from tests.helpers.distributed_refusals import error_of
from tests.helpers.engine import everything_every_step, flat, images, separated, train, wire
from tests.helpers.worlds import leave, meeting

STEPS, STOP = 6, 3


def net(dtype=torch.float32):
    """With a vector, a matrix that is not stored in order, a scalar and a frozen layer."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(64, 9),
        nn.Linear(9, 3),
    ).to(dtype)
    module[4].weight.data = module[4].weight.data.t().contiguous().t()
    module[5].bias.requires_grad_(False)
    return module


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def groups(module):
    """Groups with rates and decays of their own, and a frozen parameter in one of them."""
    first, *rest = module.parameters()
    return torch.optim.AdamW(
        [{"params": [first], "lr": 0.01, "weight_decay": 0.0}, {"params": rest}],
        lr=0.05,
        weight_decay=0.1,
    )


def joined(module):
    matrices = [p for p in trained(module) if p.ndim == 2]
    others = [p for p in trained(module) if p.ndim != 2]
    return JoinedOptimizer(
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01)
    )


class Mine(torch.optim.SGD):
    """A user's own, of which nothing is known."""


class Entrywise(Mine):
    elementwise = True


def of_all(kind, **options):
    return lambda module: kind(module.parameters(), **options)


optim = torch.optim
SLICED = {
    "SGD": of_all(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": of_all(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": of_all(optim.Adam, lr=torch.tensor(0.05), amsgrad=True),
    "groups": groups,
    "NAdam": of_all(optim.NAdam, lr=0.05),
    "RAdam": of_all(optim.RAdam, lr=0.05),
    "Adamax": of_all(optim.Adamax, lr=0.05),
    "Adagrad": of_all(optim.Adagrad, lr=0.05),
    "Adadelta": of_all(optim.Adadelta, lr=1.0),
    "RMSprop": of_all(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": of_all(optim.Rprop, lr=0.01),
    "ASGD": of_all(optim.ASGD, lr=0.1),
    "joined": joined,
    "declared": of_all(Entrywise, lr=0.1, momentum=0.9),
}
WHOLE = {
    "Adafactor": of_all(optim.Adafactor, lr=0.05),
    "unknown": of_all(Mine, lr=0.1, momentum=0.9),
    "ScaledAdam": of_all(ScaledAdam, lr=0.01, eps_scale=0.1),
}
OPTIMIZERS = {**SLICED, **WHOLE}
STRATEGIES = {
    "Identity": {"strategy": Identity()},
    "BandMF": {"strategy": BandMF(bands=3)},
    "BISR": {"strategy": BISR(inverse_bands=3)},
    "BLT": {"strategy": BLT(buffers=2, max_participations=2, min_sep=2)},
    "Tree": {"strategy": Tree()},
    "Dense": {"strategy": Dense(epochs=2)},
    "drawn again": {"strategy": BISR(inverse_bands=3), "noise": NoiseOptions(regenerate=True)},
    "bfloat16": {"strategy": BandMF(bands=3), "noise": NoiseOptions(dtype=torch.bfloat16)},
    "secure": {"strategy": BandMF(bands=3), "noise": NoiseOptions(secure=True), "seed": None},
}
PLANS = {
    **{f"with {name}": options for name, options in STRATEGIES.items() if name != "secure"},
    "microbatches": {**separated(24, STEPS), "max_physical_batch_size": 2},
    "views": {"gradients": Gradients(views=2), "max_grad_norm": 0.2},
    "gdp filter": {
        "individual": GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=STEPS),
        "max_grad_norm": 3.0,
        "max_physical_batch_size": 5,
    },
}


def build(optimizer="SGD", dtype=torch.float32, **options):
    module = net(dtype)
    data = images()
    if dtype is not torch.float32:
        data = TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    if options.get("gradients", Gradients()).views == 2:
        x, y = data.tensors
        data = TensorDataset(torch.stack([x, 0.5 * x.flip(-1)], dim=1), y)
    given = OPTIMIZERS[optimizer](module)
    options.setdefault("scheme", everything_every_step(24, STEPS))
    options.setdefault("seed", 5)
    options.setdefault("max_grad_norm", 1.0)
    mode = "hooks" if optimizer == "ScaledAdam" else "bookkeeping"
    return wire(
        module=module,
        optimizer=given,
        data=data,
        noise_multiplier=1.0,
        grad_sample_mode=mode,
        **options,
    )


FEW = {"SGD", "SGD fused", "groups", "joined", "Adafactor", "with BandMF", "with Tree", "views"}


def cases(world):
    """What is compared with one process: all of it on two ranks, some on four."""
    found = [("optimizer", name) for name in OPTIMIZERS] + [("plan", name) for name in PLANS]
    shards = [("shard", shard) for shard in ("all", "noise", "off")]
    return [*(case for case in found if world == 2 or case[1] in FEW), *shards, "double"]


def result(case):
    if case == "double":
        return outcome(build("groups", dtype=torch.float64))
    kind, name = case
    if kind == "optimizer":
        return outcome(build(name))
    return outcome(build(**PLANS[name]) if kind == "plan" else build("groups", shard=name))


def outcome(private):
    model, optimizer, loader = private
    for x, y in loader:
        if x.ndim == 5:  # two views of every example
            x, y = x.flatten(0, 1), y.repeat_interleave(2)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    state = private.state_dict()
    return {
        "parameters": flat(private.module),
        "optimizer": state["optimizer"],
        "active": state["private"].get("individual", {}).get("active_counts"),
    }


def bytes_of(tensors):
    """Of the memory behind tensors, each once."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())


def memory(shard):
    """Bytes of past noise and of the optimizer's state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 1001), nn.Linear(1001, 70))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        data=images(),
        scheme=everything_every_step(24, 20),
        strategy=BandMF(bands=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=1,
        noise=NoiseOptions(shard=shard),
    )
    train(private, steps=2)
    noise = private.optimizer.noise
    state = [
        value
        for held in optimizer.state.values()
        for value in held.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return {"noise": noise.buffer_bytes, "state": bytes_of(state)}


def resumed(folder, world, rank):
    """Goes on from what one process, two or four have saved; and saves itself."""
    found = {}
    for name in ("groups", "joined", "Adafactor"):
        plan = separated(24, STEPS)
        private = build(name, **plan)
        scheduler = private.register_scheduler(
            torch.optim.lr_scheduler.ExponentialLR(private.optimizer, 0.7)
        )
        train(private, steps=STOP, after_step=scheduler.step)
        torch.save(private.state_dict(share=True), folder / f"{name}_{world}_{rank}.pt")
        whole = private.state_dict()
        dist.barrier()
        for before in (1, 2, 4):
            paths = [folder / f"{name}_{before}_{r}.pt" for r in range(before)]
            if not all(path.is_file() for path in paths):
                continue
            shares = [torch.load(path, weights_only=True, mmap=True) for path in paths]
            found[name, before] = go_on(name, shares)
        found[name, "whole"] = go_on(name, whole)
        train(private, after_step=scheduler.step)
        found[name, "never stopped"] = flat(private.module)
        found[name, "one share"] = error_of(
            lambda name=name, plan=plan: build(name, **plan).load_state_dict(
                torch.load(folder / f"{name}_{world}_{rank}.pt", weights_only=True)
            )
        )
    return found


def go_on(name, state):
    private = build(name, **separated(24, STEPS))
    scheduler = private.register_scheduler(
        torch.optim.lr_scheduler.ExponentialLR(private.optimizer, 0.7)
    )
    private.load_state_dict(state)
    train(private, after_step=scheduler.step)
    return flat(private.module)


def repeated(folder, world):
    """A run that goes on from an older checkpoint repeats its steps bit for bit, or is refused."""
    path = folder / f"ledger_{world}.jsonl"
    first = build(ledger=path)
    train(first, steps=2)
    older = first.state_dict()
    train(first)
    dist.barrier()
    again = build(ledger=path)
    again.load_state_dict(older)
    train(again)
    other = build(ledger=path)
    other.load_state_dict(older)
    with torch.no_grad():
        for p in other.module.parameters():
            p.add_(0.1)
    return {
        "same": torch.equal(flat(first.module), flat(again.module)),
        "other": error_of(lambda: train(other)),
        "lines": len(path.read_text().splitlines()),
    }


def appears_to_work():
    """What a user sees of the optimizer, and what is refused."""
    found = {}
    private = build("groups")
    optimizer = private.optimizer.original_optimizer
    train(private, steps=2)
    found["held"] = {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in private.module.parameters()
    }
    found["grads"] = [p.grad is None for p in private.module.parameters()]
    saved = optimizer.state_dict()  # the user's own call: this rank's pieces
    optimizer.load_state_dict(saved)
    found["odd groups"] = error_of(
        lambda: optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})
    )
    train(private)
    found["reloaded"] = flat(private.module)
    found["hook"] = error_of(lambda: private.optimizer.attach_step_hook(print))
    found["all"] = error_of(lambda: build("Adafactor", shard="all"))
    private.detach()
    found["after"] = sum(len(held) for held in private.state_dict()["optimizer"]["state"].values())
    found["left"] = len(optimizer.state)
    return found


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def unreached(rank):
    """Only the second rank's rows reach one of two layers, and none a third one."""
    from tests.helpers.distributed_runs import Branches, halves

    kept = Kept()
    logging.getLogger("dptrain.clipping.unreached").addHandler(kept)
    private = wire(
        module=(module := Branches()),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data=halves(),
        scheme=everything_every_step(24, 2),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        grad_sample_mode="bookkeeping",
        probe="off",
        seed=1,
    )
    train(private)
    return kept.lines


def terms(world):
    """For each rank, tensors of numbers of very different sizes and of either sign."""
    made = torch.Generator().manual_seed(5)
    shapes = ((3, 1000), (17,), (), (4097,))

    def one(shape):
        scale = 10 ** (8 * torch.rand(shape, generator=made) - 4)
        return torch.randn(shape, generator=made) * scale

    return [[one(shape) for shape in shapes] for _ in range(world)]


def sums(rank, world):
    """This rank's pieces of the sums of everybody's, and all of these, which are whole."""
    ranks, mine = Ranks.of(True), terms(world)[rank]
    pieces = [shard_pieces(mine, rank=r, world=world) for r in range(world)]
    own = ranks.scatter_sums(mine, mine, pieces)
    whole = ranks.sum([t.clone() for t in mine], mine)
    return {"pieces": own, "places": pieces[rank], "whole": whole}


def worker(rank, folder, world):
    """What this rank finds, by what it does."""
    with meeting(rank, folder, world):
        work = {case: lambda case=case: result(case) for case in cases(world)}
        work |= {("memory", shard): lambda shard=shard: memory(shard) for shard in ("auto", "off")}
        work |= {
            "resumed": lambda: resumed(folder, world, rank),
            "repeated": lambda: repeated(folder, world),
            "appears": appears_to_work,
            "unreached": lambda: unreached(rank),
            "sums": lambda: sums(rank, world),
        }
        leave(work, rank, folder, world)


def dies(rank, folder):
    """The second process ends without a word in the middle of the third step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/dying",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=30),
    )
    private = build()
    train(private, steps=2)
    before = private.steps_executed
    if rank == 1:
        reduce = private.optimizer.shards.add_noise
        private.optimizer.shards.add_noise = lambda *args: (reduce(*args), os._exit(0))
    error = error_of(lambda: train(private))
    (folder / f"died_{rank}.txt").write_text(f"{before} {private.steps_executed} {error}")
    os._exit(0)  # without waiting for the other at the end
