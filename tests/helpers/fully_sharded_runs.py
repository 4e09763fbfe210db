"""What two or four processes do with a model that ``fully_shard`` divided; each leaves a file."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from dptrain import (
    BandMF,
    Gradients,
    JoinedOptimizer,
    NoiseOptions,
    PerLayer,
    Poisson,
)
from dptrain.individual import GDPFilter
from tests.helpers.distributed_refusals import error_of
from tests.helpers.distributed_runs import broken_images
from tests.helpers.distributed_users import averaged
from tests.helpers.engine import (
    everything_every_step,
    images,
    separated,
    wire,
)
from tests.helpers.worlds import leave, meeting

STEPS, STOP = 4, 2
optim = torch.optim


def conv():
    """With shards of no rows (biases of 3 on four ranks), a number of one entry, a frozen layer."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.GroupNorm(1, 5),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(80, 9),
        nn.Linear(9, 3),
    )
    module[4].bias.requires_grad_(False)
    return module


class Block(nn.Module):
    def __init__(self, width, heads, again):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.again = heads, again

    def forward(self, x):
        return checkpoint(self._run, x, use_reentrant=False) if self.again else self._run(x)

    def _run(self, x):
        rows, length, _ = x.shape
        parts = self.attend(self.before(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(nn.functional.gelu(self.widen(self.after(x))))


class Decoder(nn.Module):
    """Of the kind of GPT-2; a mean over the tokens that are none to fill up with."""

    def __init__(self, *, tied=False, again=False, width=12, vocabulary=29):
        super().__init__()
        torch.manual_seed(1)
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 3, again) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x)
        counts = (ids > 0).unsqueeze(-1)  # the ranks fill up to lengths of their own
        return (self.head(self.norm(x)) * counts).sum(1) / counts.sum(1)


class Texts(Dataset):
    """Of several lengths, so that the ranks' batches have other shapes."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(1, 29, (4 + index % 5,), generator=generator)
        return ids, int(ids.sum()) % 29


def padded(examples):
    longest = max(len(ids) for ids, _ in examples)
    rows = torch.zeros(len(examples), longest, dtype=torch.long)
    for row, (ids, _) in zip(rows, examples, strict=True):
        row[: len(ids)] = ids
    return rows, torch.tensor([label for _, label in examples])


MODELS = {
    "conv": conv,
    "decoder": Decoder,
    "tied": lambda: Decoder(tied=True),
    "checkpointed": lambda: Decoder(again=True),
}


def divided(module, **how):
    """As torchtitan does: each block, then the model."""
    layers = module.blocks if isinstance(module, Decoder) else ([module[0], module[1]], module[4])
    for layer in layers:
        fully_shard(layer, **how)
    return fully_shard(module, **how)


def groups(module):
    first, *rest = module.parameters()
    return optim.AdamW(
        [{"params": [first], "lr": 0.01, "weight_decay": 0.0}, {"params": rest}],
        lr=0.02,
        weight_decay=0.1,
    )


def joined(module):
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim == 2]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim != 2]
    return JoinedOptimizer(optim.SGD(matrices, lr=0.1, momentum=0.9), optim.Adam(others, lr=0.01))


OPTIMIZERS = {
    "AdamW": groups,
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "joined": joined,
    "plain": lambda m: optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.0),
}
BANDED = {"strategy": BandMF(bands=3)}
CASES = {
    "conv": {},
    "conv, microbatches": {**separated(24, STEPS), "max_physical_batch_size": 2},
    "conv, few rows": {"scheme": Poisson(probability=0.06, dataset_size=24, steps=STEPS)},
    "conv, joined": {"optimizer": "joined", **BANDED, "max_physical_batch_size": 5},
    "conv, layers": {"optimizer": "SGD", "gradients": Gradients(clipping=PerLayer())},
    "conv, sum": {"loss_reduction": "sum", "optimizer": "SGD"},
    "conv, users": {"scheme": averaged(group_size=3), "max_physical_batch_size": 4},
    "conv, gdp filter": {
        "individual": GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=STEPS),
        "max_grad_norm": 3.0,
        "max_physical_batch_size": 5,
    },
    "conv, not finite": {"data": "broken"},
    "conv, scaled loss": {"scaled": True, "max_physical_batch_size": 5},
    "decoder": {**BANDED, "max_physical_batch_size": 3},
    "decoder, MinSep": {**separated(24, STEPS), "optimizer": "SGD"},
    "tied": {"optimizer": "SGD"},
    "checkpointed": {"max_physical_batch_size": 5},
    "decoder, kept whole": {"how": {"reshard_after_forward": False}, "optimizer": "SGD"},
}
FOUR = ("conv, microbatches", "conv, few rows", "decoder")


def data_of(module, data=None):
    if data == "broken":
        return broken_images()
    return DataLoader(Texts(), collate_fn=padded) if isinstance(module, Decoder) else images()


def build(name="conv", *, sharded=False, optimizer="AdamW", how=None, data=None, **options):
    module = MODELS[name]()
    if sharded:
        divided(module, **(how or {}))
    options.setdefault("scheme", everything_every_step(24, STEPS))
    options.setdefault("seed", 5)
    options.setdefault("max_grad_norm", 0.5)
    options.setdefault("noise_multiplier", 1.0)
    return wire(
        module=module,
        optimizer=OPTIMIZERS[optimizer](module),
        data=data_of(module, data),
        **options,
    )


def train(private, steps=None, scaled=False):
    model, optimizer, loader = private
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    criterion = nn.CrossEntropyLoss(reduction=optimizer.loss_reduction)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(criterion(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model(x)  # after which the outermost layers are whole
        if private.steps_executed == steps:
            break


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def flat(module):
    return torch.cat([whole(p).detach().flatten() for p in module.parameters()])


def whole_release(private):
    """A list that gets every step's release, whole and on all ranks, as a vector."""
    found, shards = [], private.optimizer.shards
    parameters = list(private.optimizer.params)

    def note(optimizer, *_):
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if shards is None:
            found.append(torch.cat([g.flatten() for g in held if g is not None]))
            return
        whole = [torch.empty(p.shape) for p in parameters]
        own = [torch.zeros(0) if p.grad is None else p.grad for p in shards.sliced.parameters]
        private.optimizer.shared.ranks.gather_pieces(own, whole, shards.pieces)
        found.append(torch.cat([t.flatten() for t in whole]))

    private.optimizer.register_step_pre_hook(note)
    return found


def outcome(private, scaled=False):
    releases = whole_release(private)
    train(private, scaled=scaled)
    state = private.state_dict()
    return {
        "parameters": flat(private.module),
        "releases": releases,
        "optimizer": state["optimizer"],
        "active": state["private"].get("individual", {}).get("active_counts"),
        "steps": private.steps_executed,
        "not finite": private.nonfinite_examples,
        "mechanism": private.mechanism.hash,
    }


def cases(world):
    """All of it on two ranks, some on four."""
    return list(CASES) if world == 2 else list(FOUR)


def case(name, *, sharded, mesh=None):
    options = dict(CASES[name])
    scaled = options.pop("scaled", False)
    if mesh is not None:
        options["how"] = {**options.get("how", {}), "mesh": mesh}
    return outcome(build(name.split(",")[0], sharded=sharded, **options), scaled)


SMALL = 0.01  # R, of which all gradients are longer
ONE = {"scheme": everything_every_step(24, 1), "max_grad_norm": SMALL, "optimizer": "plain"}


def one_release(**options):
    private = build(**{"sharded": True, **ONE, **options})
    releases = whole_release(private)
    train(private)
    return private, releases[0] * 24


def parts_of_a_release(**options):
    private, noisy = one_release(**options)
    return {
        "with noise": noisy,
        "without noise": one_release(noise_multiplier=0.0, **options)[1],
        "strategy": private.mechanism.strategy,
        "seed": private.optimizer.noise.normals.seed,
    }


def without_noise(rank, world):
    """What is released if the last rank that has rows of all layers leaves its noise out."""
    _, right = one_release()
    private = build(sharded=True, **ONE)
    releases, shards = whole_release(private), private.optimizer.shards
    add = shards.add_noise
    if rank == 1:
        shards.add_noise = lambda given, rows, deviation, scales: add(given, rows, 0.0, scales)
    train(private)
    entries = []
    for p, (low, high) in zip(private.optimizer.params, shards.pieces[1], strict=True):
        own = torch.zeros(p.numel(), dtype=torch.bool)
        own[low:high] = True
        entries.append(own)
    return {"right": right, "left out": releases[0] * 24, "its entries": torch.cat(entries)}


def in_half():
    """Without noise, by parameters that are cast to bfloat16 as they are gathered."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    private, release = one_release(noise_multiplier=0.0, how={"mp_policy": policy})
    kinds = {p.dtype for p in private.optimizer.params}
    wholes = private.optimizer.shards.module.whole_of(private.optimizer.params)
    return {
        "release": release,
        "kept in": kinds == {torch.float32},
        "computed in": {p.dtype for p in wholes} == {torch.bfloat16},
    }


ADDING = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce", "all_to_all")
ADDING += ("reduce_scatter_single",)


def sent(rank):
    """What a rank gives the others in a step whose examples have large gradients."""
    private = build(sharded=True, **{**ONE, "noise_multiplier": 0.0}, max_physical_batch_size=4)
    lengths, counts, calls, longest = [], [], [], 0.0
    kept = {
        name: getattr(dist, name) for name in (*ADDING, "all_to_all_single") if hasattr(dist, name)
    }

    def noted(name):
        def call(*args, **kwargs):
            if name == "all_to_all_single":
                lengths.append(float(args[1].norm()))
            elif next(a for a in args if isinstance(a, torch.Tensor)).is_floating_point():
                calls.append(name)
            return kept[name](*args, **kwargs)

        return call

    for name in kept:
        setattr(dist, name, noted(name))
    left = []
    try:
        model, optimizer, loader = private
        for x, y in loader:
            optimizer.zero_grad()
            (1e3 * nn.functional.cross_entropy(model(x), y)).backward()
            each = [
                *model.parameters(),
                *private.optimizer.shards.module.whole_of(private.optimizer.params),
            ]
            left += [tuple(p.shape) for p in each if p.grad is not None]
            counts.append(len(loader.current.indices))
            optimizer.step()
            longest = max(longest, float(private.last_norms.max()))
    finally:
        for name, own in kept.items():
            setattr(dist, name, own)
    return {
        "sums": lengths,
        "examples": counts,
        "microbatches": len(counts),
        "other calls": calls,
        "gradients": left,
        "longest gradient": longest,
    }


def bytes_of(tensors):
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())


def kept_of(private):
    """Bytes of past noise and of the optimizer's state."""
    noise = private.optimizer.noise
    state = [
        value
        for held in private.optimizer.original_optimizer.state.values()
        for value in held.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return {"noise": noise.buffer_bytes, "optimizer": bytes_of(state)}


def memory():
    found = {}
    for sharded in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 1000), nn.Linear(1000, 64))
        if sharded:
            fully_shard(module)
        private = wire(
            module=module,
            optimizer=optim.AdamW(module.parameters(), lr=0.01),
            data=images(),
            scheme=everything_every_step(24, 9),
            strategy=BandMF(bands=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=1,
            noise=NoiseOptions(shard="auto" if sharded else "off"),
        )
        train(private, steps=2)
        if sharded:
            found |= kept_of(private)
        else:
            found["whole"] = kept_of(private)
    return found


def stopping(*, sharded, state=None, steps=None, how=None, folder=None):
    """A run with dropped-out rates, gone on with from a state, or left after some steps."""
    private = build(
        "conv", sharded=sharded, how=how, **{**separated(24, STEPS), "max_physical_batch_size": 2}
    )
    scheduler = private.register_scheduler(optim.lr_scheduler.ExponentialLR(private.optimizer, 0.7))
    if state is not None:
        private.load_state_dict(state)
    if folder is not None:
        private.load(folder)
    for _ in range((steps or STEPS) - private.steps_executed):
        train(private, steps=private.steps_executed + 1)
        scheduler.step()
    return private


def saved(folder):
    """What one process leaves for ranks to go on from."""
    torch.save(stopping(sharded=False, steps=STOP).state_dict(), folder / "share_1_0.pt")


def go_on(state, *, sharded):
    return flat(stopping(sharded=sharded, state=state).module)


def resumed(rank, folder, world):
    private = stopping(sharded=True, steps=STOP)
    torch.save(private.state_dict(share=True), folder / f"share_{world}_{rank}.pt")
    state = private.state_dict()
    if rank == 0:
        torch.save(state, folder / f"whole_{world}.pt")
    dist.barrier()
    found = {}
    for before in (1, 2, 4):
        paths = [folder / f"share_{before}_{r}.pt" for r in range(before)]
        if all(path.is_file() for path in paths):
            shares = [torch.load(path, weights_only=True, mmap=True) for path in paths]
            found[before] = go_on(shares, sharded=True)
    found["whole"] = go_on(state, sharded=True)
    found["never stopped"] = flat(stopping(sharded=True).module)
    own = torch.load(folder / f"share_{world}_{rank}.pt", weights_only=True)
    found["one share"] = error_of(lambda: stopping(sharded=True, state=own))
    return found


def repeated(folder, world):
    """A run that goes on from an older checkpoint repeats its steps bit for bit, or is refused."""
    path = folder / f"ledger_{world}.jsonl"
    first = build(sharded=True, ledger=path)
    train(first, steps=2)
    older = first.state_dict()
    train(first)
    dist.barrier()
    again = build(sharded=True, ledger=path)
    again.load_state_dict(older)
    train(again)
    other = build(sharded=True, ledger=path)
    other.load_state_dict(older)
    with torch.no_grad():
        for p in other.module.parameters():
            p.to_local().add_(0.1)
    return {
        "same": torch.equal(flat(first.module), flat(again.module)),
        "other": error_of(lambda: train(other)),
    }


def wired(module, *, data=None, optimizer=None, **options):
    options.setdefault("scheme", everything_every_step(24, STEPS))
    return wire(
        module=module,
        optimizer=optimizer
        or optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1),
        data=data or images(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=5,
        **options,
    )


def refusals(rank, world):
    """What a rank is told of each way to divide a model that no private run knows."""

    def flat_net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 4))

    def no_root():
        module = flat_net()
        fully_shard(module[1])
        return wired(module)

    def ignored():
        module = flat_net()
        return wired(fully_shard(module, ignored_params={module[2].weight}))

    def before():
        module = flat_net()
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        return wired(fully_shard(module), optimizer=optimizer)

    def lstm():
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LSTM(8, 4))
        return wired(fully_shard(module))

    def compiled():
        module = fully_shard(flat_net())
        module.compile()
        return wired(module)

    def halves():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        return wired(fully_shard(flat_net(), mesh=mesh))

    def other_meshes():
        module = flat_net()
        fully_shard(module[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
        return wired(fully_shard(module, mesh=init_device_mesh("cpu", (4,))))

    def by_columns():
        def place(p):
            return Shard(1) if p.ndim == 2 else None

        return wired(fully_shard(flat_net(), shard_placement_fn=place))

    def adafactor():
        module = fully_shard(flat_net())
        return wired(module, optimizer=optim.Adafactor(module.parameters(), lr=0.1))

    work = {
        "placement": by_columns,
        "offload": lambda: wired(
            fully_shard(flat_net(), offload_policy=CPUOffloadPolicy(pin_memory=False))
        ),
        "each for itself": lambda: wired(fully_shard(flat_net()), distributed=False),
        "hooks": lambda: wired(fully_shard(flat_net()), grad_sample_mode="hooks"),
        "no root": no_root,
        "ignored": ignored,
        "optimizer before": before,
        "off": lambda: wired(fully_shard(flat_net()), shard="off"),
        "Adafactor": adafactor,
        "LSTM": lstm,
    }
    if world == 4:
        work = {"other meshes": other_meshes, "half the ranks": halves}
    else:
        work["compiled"] = compiled
    return {name: error_of(do) for name, do in work.items()}


def past_the_layers():
    """The last layer is whole after a forward pass, the one before it is in shards."""
    found, grads = {}, []
    for layer in (4, 5):
        private = build(sharded=True)
        model, _, loader = private

        def penalized(model=model, loader=loader, layer=layer):
            x, y = next(iter(loader))
            loss = nn.functional.cross_entropy(model(x), y)
            (loss + whole(model[layer].weight).square().sum()).backward()

        found[layer] = error_of(penalized)
        each = [*model.parameters(), *private.optimizer.params]
        grads += [tuple(p.shape) for p in each if p.grad is not None]
    return {**found, "grads": grads}


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.inner(x.flatten(1))
        return self.outer(hidden - hidden.mean(0))


def mixed():
    module = Mixing()
    fully_shard(module.inner)
    return {"error": error_of(lambda: train(wired(fully_shard(module))))}


def one_fails(rank):
    """The second rank's look at the module ends in an error."""
    private = build(sharded=True)
    if rank == 1:

        def odd(*_):
            raise RuntimeError("odd")

        private._attached.probe._looked = odd
    return {"error": error_of(lambda: train(private))}


def detached(rank):
    private = build(sharded=True)
    train(private, steps=1)
    module = private.detach()
    data = images()
    x, y = (t[rank * 12 : rank * 12 + 12] for t in data.tensors)
    nn.functional.cross_entropy(module(x), y).backward()
    trained = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.cat([whole(p.grad).flatten() for p in trained])
    twin = conv()
    with torch.no_grad():
        for p, q in zip(twin.parameters(), module.parameters(), strict=True):
            p.copy_(whole(q))
    nn.functional.cross_entropy(twin(data.tensors[0]), data.tensors[1]).backward()
    return {
        "gradients": gradients,
        "expected": torch.cat([p.grad.flatten() for p in twin.parameters() if p.requires_grad]),
        "hooks": sum(len(p._post_accumulate_grad_hooks or ()) for p in trained),
    }


def worker(rank, folder, world):
    """What this rank finds, by what it does."""
    with meeting(rank, folder, world):
        work = {name: lambda name=name: case(name, sharded=True) for name in cases(world)}
        work |= {
            "parts of a release": parts_of_a_release,
            "a shard without noise": lambda: without_noise(rank, world),
            "sent": lambda: sent(rank),
            "in half": in_half,
            "memory": memory,
            "resumed": lambda: resumed(rank, folder, world),
            "repeated": lambda: repeated(folder, world),
            "refusals": lambda: refusals(rank, world),
        }
        if world == 2:
            work |= {
                "past the layers": past_the_layers,
                "mixed": mixed,
                "one rank fails": lambda: one_fails(rank),
                "detached": lambda: detached(rank),
            }
        leave(work, rank, folder, world)
