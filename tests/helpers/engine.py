"""A small model, its data, and private runs with them; what a run releases."""

import dataclasses

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dptrain import BandMF, Gradients, Loading, MinSep, NoiseOptions, Poisson, PrivacyEngine

MODES = ["bookkeeping", "hooks", "functorch"]


def small_net(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(4 * 16, 3),
    )


def images(size=24):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, 1, 4, 4, generator=generator)
    y = torch.randint(0, 3, (size,), generator=generator)
    return TensorDataset(x, y)


def everything_every_step(size, steps):
    return Poisson(probability=1.0, dataset_size=size, steps=steps)


def separated(size, steps, bands=3):
    return {
        "scheme": MinSep.for_batch_size(
            batch_size=size / 6, dataset_size=size, min_sep=4, steps=steps
        ),
        "strategy": BandMF(bands=bands),
    }


GROUPED = {
    "gradients": (
        Gradients,
        {"grad_sample_mode": "mode", "criterion": "loss", "loss_reduction": "loss"}
        | {name: name for name in ("clipping", "views", "probe", "buffers")},
    ),
    "noise": (
        NoiseOptions,
        {"secure": "secure", "noise_dtype": "dtype", "regenerate_noise": "regenerate"}
        | {"shard": "shard", "noise_folder": "folder"},
    ),
    "loading": (
        Loading,
        {n: n for n in ("max_physical_batch_size", "microbatches", "steps_per_epoch")},
    ),
}


def wire(**options):
    """A private run; options may come by themselves, and a group of them in addition."""
    engine = {n: options.pop(n) for n in ("accountant", "ledger", "distributed") if n in options}
    fetching = {n: options.pop(n) for n in ("collate_fn", "num_workers") if n in options}
    if fetching:
        options["data"] = DataLoader(options["data"], **fetching)
    for group, (kind, names) in GROUPED.items():
        stated = {names[name]: options.pop(name) for name in list(options) if name in names}
        options[group] = dataclasses.replace(options.get(group, kind()), **stated)
    scheduler = options.pop("lr_scheduler", None)
    private = PrivacyEngine(**engine).make_private(**options)
    if scheduler is not None:
        private.register_scheduler(scheduler)
    return private


def make(module, data, mode="hooks", lr=0.1, momentum=0.9, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    options.setdefault("max_grad_norm", 1.0)
    options.setdefault("seed", 5)
    if "mechanism" not in options:
        options.setdefault("noise_multiplier", 1.0)
    return wire(module=module, optimizer=optimizer, data=data, grad_sample_mode=mode, **options)


def train(private, batches=None, steps=None, after_step=lambda: None):
    """The user's loop; stops after so many batches, or when so many logical steps have run."""
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss(reduction=optimizer.loss_reduction)
    for count, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        after_step()
        if count == batches or private.steps_executed == steps:
            break


def watch_releases(private):
    """A list that gets what the wrapped optimizer finds at every step: all, or a rank's slice."""
    found = []

    def note(optimizer, *_):
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        found.append(torch.cat([torch.zeros(0), *(g.flatten() for g in held if g is not None)]))

    private.optimizer.register_step_pre_hook(note)
    return found


def put_together(private, release):
    """All of a release, of the slices of all ranks; every rank has to ask."""
    shards = private.optimizer.shards
    if shards is None or shards.sliced is None:
        return release
    columns, _ = private.optimizer.shared.ranks.gather(release.double().numpy()[None])
    return torch.from_numpy(columns[0]).to(release.dtype)


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def reference_sum(module, data, rows, max_grad_norm):
    """Σ clip(g_i, R) by one autograd call per example; rows that are not finite count nothing."""
    total = torch.zeros_like(flat(module))
    for row in rows:
        x, y = data[row]
        loss = nn.functional.cross_entropy(module(x[None]), y[None])
        grads = torch.autograd.grad(loss, list(module.parameters()))
        gradient = torch.cat([g.flatten() for g in grads])
        norm = gradient.norm()
        if torch.isfinite(norm):
            total += gradient * min(1.0, max_grad_norm / float(norm))
    return total


def released(private, scale):
    """What the last step released, times ``scale``."""
    return torch.cat([p.grad.flatten() for p in private.optimizer.params]) * scale
