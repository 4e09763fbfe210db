"""Digests of what must not change when modules move, are merged or are renamed.

    python -m scripts.digests --against main       # this tree and that revision: the usual command
    python -m scripts.digests --write before.json  # or keep them,
    python -m scripts.digests --compare before.json --only runs --only batches  # and look later

Final parameters of short runs, ε of every row of the support table, coefficients of strategies,
rows of noise, seeded batches, and what checkpoints, certificates and mechanisms serialize to: all
bit for bit. Floating-point kernels differ between processors and versions, so digests hold for one
machine and one set of packages; they are for comparing two trees there, not for keeping.

What is renamed is adapted here, names of cases stay: they are what two revisions have in common.
The exit status is 1 if a case differs, is missing or is new, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import dptrain
from dptrain import (
    BISR,
    BLT,
    BSR,
    Adjacency,
    AttributionGraph,
    Automatic,
    BallsInBins,
    BandInvMF,
    BandMF,
    ColumnNormalizedBandMF,
    CyclicPoisson,
    Dense,
    Flat,
    Gradients,
    Identity,
    LambdaCGD,
    Loading,
    MatrixMechanism,
    MinSep,
    NoiseOptions,
    PerGroup,
    PerLayer,
    PerUser,
    Poisson,
    PrivacyEngine,
    PrivateLoader,
    PrivateTraining,
    RandomAllocation,
    ScaledAdam,
    Shuffled,
    SquareRoot,
    Tree,
    TreeRestart,
    UserCyclic,
    UserFixed,
    UserMinSep,
    account,
    accountants_for,
    calibrate,
)
from dptrain.accounting import Accountant
from dptrain.individual import GDPFilter, GDPOdometer, RenyiFilter
from dptrain.noise import noise_stream
from dptrain.sampling import Scheme
from dptrain.strategies import DenseWorkload, MomentumSGD, Strategy

Case = Callable[[], str]
Digests = dict[str, dict[str, str]]

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = pathlib.Path("scripts", "digests.py")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
FAILED = "failed: "

EXAMPLES, STEPS, BINS, SEPARATION, BANDS, MANY_BANDS = 24, 8, 4, 3, 2, 6
DELTA = 1e-3


# What is digested, and how


def digest(*values: Any) -> str:
    """SHA-256 (hex) of tensors, arrays, numbers, texts and containers of them, by their bits."""
    text = json.dumps([plain(value) for value in values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """The value for JSON: tensors and arrays by dtype, shape and bits, floats in hex."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return ["tensor", str(value.dtype), list(value.shape), _sha(bits.tobytes())]
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        return ["array", str(array.dtype), list(np.shape(value)), _sha(array.tobytes())]
    if isinstance(value, bytes):
        return ["bytes", _sha(value)]
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {repr(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"value={value!r:.80} of type {type(value).__name__} has no digest")


def fields(value: Any) -> Any:
    """Names and types of a nested value, its format without its content."""
    if isinstance(value, Mapping):
        return {repr(key): fields(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *sorted({json.dumps(fields(item)) for item in value})]
    return type(value).__name__


def without(value: Any, *names: str) -> Any:
    """A nested mapping without the entries of these names, which are drawn anew every time."""
    if isinstance(value, Mapping):
        return {key: without(item, *names) for key, item in value.items() if key not in names}
    return value


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Schemes and strategies, small


@functools.cache
def graphs() -> dict[str, AttributionGraph]:
    """A graph in which some users have two examples of their own, and others share theirs."""
    half = EXAMPLES // 2
    shared = [(e // 2 % half, (e // 2 + 1) % half) for e in range(EXAMPLES)]
    return {
        "own": AttributionGraph.from_lists([[e // 2] for e in range(EXAMPLES)]),
        "shared": AttributionGraph.from_lists(shared),
    }


@functools.cache
def schemes(nominal: int | None = None) -> dict[str, Scheme]:
    """The rows of the support table; where ``nominal`` is given, those with N private."""
    run: dict[str, Any] = {"dataset_size": EXAMPLES, "steps": STEPS}
    cycle: dict[str, Any] = {"probability": 0.6, "cycle": SEPARATION, **run}
    cut = {"max_batch_size": 8}
    private = {
        "Poisson": Poisson(probability=0.25, nominal_size=nominal, **run),
        "TruncatedPoisson": Poisson(probability=0.25, nominal_size=nominal, **run, **cut),
        "CyclicPoisson": CyclicPoisson(nominal_size=nominal, **cycle),
        "CyclicPoisson, max_batch_size": CyclicPoisson(nominal_size=nominal, **cycle, **cut),
        "CyclicPoisson, assignment='independent'": CyclicPoisson(
            nominal_size=nominal, assignment="independent", **cycle
        ),
    }
    if nominal is not None:
        return private
    apart = {"probability": 0.4, "min_sep": SEPARATION}
    epochs = {"epochs": STEPS // BINS, "dataset_size": EXAMPLES}
    own, shared = graphs()["own"], graphs()["shared"]
    users = {"min_sep": SEPARATION, "steps": STEPS, "batch_size": 4}
    return {
        **private,
        "MinSep": MinSep(**apart, **run),
        "MinSep, cold start": MinSep(**apart, warm_start=False, **run),
        "TruncatedMinSep": MinSep(**apart, **run, **cut),
        "BallsInBins": BallsInBins(bins=BINS, **epochs),
        "RandomAllocation": RandomAllocation(steps_per_epoch=BINS, participations=1, **epochs),
        "RandomAllocation, participations > 1": RandomAllocation(
            steps_per_epoch=BINS, participations=2, **epochs
        ),
        "Shuffled": Shuffled(batch_size=EXAMPLES // BINS, **epochs),
        "Shuffled, one order": Shuffled(batch_size=EXAMPLES // BINS, reshuffle=False, **epochs),
        "UserMinSep, users share no example": UserMinSep(graph=own, probability=0.2, **users),
        "UserMinSep, shared examples": UserMinSep(graph=shared, probability=0.2, **users),
        "UserMinSep, exclusion='participation'": UserMinSep(
            graph=shared, probability=0.2, exclusion="participation", **users
        ),
        "UserCyclic": UserCyclic.for_batch_size(
            graph=shared,
            batch_size=users["batch_size"],
            cycle=2,
            steps=users["steps"],
            method="greedy",
        ),
        "UserCyclic, max_batch_size": UserCyclic.for_batch_size(
            graph=shared, batch_size=4, cycle=2, steps=STEPS, method="greedy", **cut
        ),
        "UserMinSep, min_sep=1": UserMinSep(
            graph=shared, probability=0.2, min_sep=1, steps=STEPS, batch_size=4
        ),
        "PerUser, users=Poisson": PerUser.for_batch_size(
            graph=own, batch_size=3, steps=STEPS, group_size=2
        ),
        "PerUser, users=MinSep": PerUser.for_batch_size(
            graph=own,
            batch_size=3,
            steps=STEPS,
            group_size=2,
            users={"type": "MinSep", "min_sep": SEPARATION},
        ),
        "UserFixed": UserFixed(graph=shared, max_participations=2, **users),
    }


def strategies(steps: int) -> dict[str, Strategy]:
    """Every family, with each of its objectives and workloads; not bound."""
    momentum = MomentumSGD(momentum=0.9, weight_decay=0.01)
    sums = DenseWorkload(entries=np.tri(steps) * np.linspace(1.0, 0.5, steps)[:, None])
    twice = {"max_participations": 2, "min_sep": steps // 2}
    return {
        "Identity": Identity(),
        "BSR": BSR(bands=3),
        "BSR, momentum and decay": BSR(bands=3, alpha=0.9, beta=0.5),
        "BandMF": BandMF(bands=3),
        "BandMF, largest error": BandMF(bands=3, objective="max"),
        "BandMF, momentum": BandMF(bands=3, workload=momentum),
        "BISR": BISR(inverse_bands=3),
        "LambdaCGD": LambdaCGD(cancellation=0.7),
        "BandInvMF": BandInvMF(inverse_bands=3, **twice),
        "BandInvMF, largest error": BandInvMF(inverse_bands=2, objective="max"),
        "BLT": BLT(buffers=2, **twice),
        "BLT, largest error": BLT(buffers=2, objective="max"),
        "SquareRoot": SquareRoot(),
        "Tree": Tree(),
        "TreeRestart": TreeRestart(height=3),
        "ColumnNormalizedBandMF": ColumnNormalizedBandMF(bands=3),
        "ColumnNormalizedBandMF, dense workload": ColumnNormalizedBandMF(bands=3, workload=sums),
        "Dense, epochs": Dense(epochs=2),
        "Dense, bands": Dense(bands=4),
        "Dense, negative entries": Dense(matrix=np.eye(steps) - 0.01 * np.tri(steps, k=-1)),
    }


# Strategies, noise, batches


def strategy_cases() -> dict[str, Case]:
    """Columns of C, columns of its inverse, and the sensitivity, at two sizes."""

    def case(strategy: Strategy, steps: int) -> str:
        bound = strategy.bind(steps)
        schedule = {"steps": steps, "max_participations": 2, "min_sep": 4}
        return digest(
            bound.columns(steps, np.arange(steps)),
            bound.solve(np.eye(bound.rows(steps))),
            float(bound.sensitivity(**schedule)),
            float(bound.rmse(steps)),
        )

    return {
        f"{name}, n = {steps}": functools.partial(case, strategy, steps)
        for steps in (STEPS, 30)
        for name, strategy in strategies(steps).items()
    }


def noise_cases() -> dict[str, Case]:
    """All rows of noise of a run, of every family and under every option."""

    def case(strategy: Strategy, options: dict[str, Any]) -> str:
        like = [torch.empty(3, 5), torch.empty(7, dtype=torch.float64)]
        stream = noise_stream(strategy.bind(STEPS), steps=STEPS, like=like, seed=11, **options)
        rows = [next(stream) for _ in range(STEPS - 1)]
        sums = [torch.linspace(-2, 3, 15).view(3, 5), torch.ones(7, dtype=torch.float64)]
        return digest(rows, stream.release(sums, 0.7))

    options: dict[str, dict[str, Any]] = {
        "secure": {"secure": True},
        "bfloat16": {"dtype": torch.bfloat16},
        "per parameter": {"per_parameter": True},
    }
    known = strategies(STEPS)
    cases = {name: functools.partial(case, strategy, {}) for name, strategy in known.items()}
    for words, option in options.items():
        for name in ("Identity", "BandMF", "BandInvMF", "BLT", "Tree", "Dense, epochs"):
            cases[f"{name}, {words}"] = functools.partial(case, known[name], option)
    again = {"regenerate": True}
    for name in ("BISR", "BandInvMF"):
        cases[f"{name}, drawn again"] = functools.partial(case, known[name], again)
    return cases


def batch_cases() -> dict[str, Case]:
    """Batches of two seeds, a stream that goes on, participations, and what a loader hands out."""

    def drawn(scheme: Scheme, seed: int) -> str:
        return digest([np.asarray(batch, np.int64) for batch in scheme.stream(seed)])

    def resumed(scheme: Scheme) -> str:
        first, second = scheme.stream(1), scheme.stream(2)
        for _ in range(STEPS // 2):
            next(first)
        second.load_state_dict(first.state_dict())
        return digest([np.asarray(batch, np.int64) for batch in second])

    def participations(scheme: Any) -> str:
        return digest(scheme.sample_participation(np.random.default_rng(5), 40))

    def loaded(scheme: Scheme, options: dict[str, Any]) -> str:
        loader = PrivateLoader(dataset=images(), scheme=scheme, seed=3, **options)
        return digest([list(batch) for batch in loader])

    def bounded(name: str, options: dict[str, Any]) -> str:
        found = graphs()[name].bound(1, seed=4, progress=False, **options)
        return digest(np.asarray(found.rows, np.int64))

    cases: dict[str, Case] = {}
    for name, scheme in schemes().items():
        for seed in (1, 2):
            cases[f"{name}, seed {seed}"] = functools.partial(drawn, scheme, seed)
        cases[f"{name}, resumed"] = functools.partial(resumed, scheme)
        if hasattr(scheme, "sample_participation"):
            cases[f"{name}, participations"] = functools.partial(participations, scheme)
        parts = {"max_physical_batch_size": 3}
        cases[f"{name}, loader"] = functools.partial(loaded, scheme, parts)
    for words, options in {
        "microbatches": {"microbatches": 2},
        "first of two ranks": {"rank": 0, "world_size": 2},
        "second of two ranks": {"rank": 1, "world_size": 2},
    }.items():
        cases[f"Poisson, loader, {words}"] = functools.partial(
            loaded, schemes()["Poisson"], options
        )
    cases["graph, bounded"] = functools.partial(bounded, "shared", {})
    return cases


# ε


def epsilon_cases() -> dict[str, Case]:
    """ε of every accountant for every row of the support table, and what is chosen by itself."""
    words = {
        "independent noise": Identity(),
        "bands ≤ b": BSR(bands=BANDS),
        "bands > b": BSR(bands=MANY_BANDS),
        "dense": SquareRoot(),
        "dense, negative entries": Dense(matrix=np.eye(STEPS) - 0.01 * np.tri(STEPS, k=-1)),
    }
    cases: dict[str, Case] = {}
    for adjacency in Adjacency:
        nominal = EXAMPLES if adjacency is Adjacency.ADD_REMOVE else None
        for name, scheme in schemes(nominal).items():
            for kind, strategy in words.items():
                if kind == "bands ≤ b" and scheme.min_sep < BANDS:
                    continue
                mechanism = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=2.0)
                start = f"{name}, {kind}, {adjacency.value}"
                cases |= _answers(start, mechanism, adjacency, name)
    return cases


def _answers(
    start: str, mechanism: MatrixMechanism, adjacency: Adjacency, scheme: str
) -> dict[str, Case]:
    found = accountants_for(mechanism, adjacency=adjacency)

    def answered(accountant: Accountant) -> str:
        settled = seeded(accountant)
        return settled.guarantee(mechanism.participants, delta=DELTA).epsilon.hex()

    def chosen() -> str:
        return account(mechanism, delta=DELTA, adjacency=adjacency).epsilon.hex()

    def calibrated() -> str:
        answer = calibrate(
            scheme=mechanism.scheme,
            strategy=mechanism.strategy,
            epsilon=4.0,
            delta=DELTA,
            adjacency=adjacency,
        )
        return answer.mechanism.noise_multiplier.hex()

    cases: dict[str, Case] = {
        f"{start}: {case_name(each.name, adjacency, scheme)}": functools.partial(
            answered, each.accountant
        )
        for each in found
        if each.refusal is None
    }
    automatic = [each.accountant for each in found if each.reason is None]
    if automatic and not any(hasattr(each, "seed") for each in automatic):
        cases[f"{start}: by itself"] = chosen
        cases[f"{start}: least noise"] = calibrated
    return cases


# Names of accountants in the names of cases, which are those that they had at first.
_NAMES = {
    "poisson-pld": "poisson PLD",
    "allocation-pld": "allocation PLD",
    "balls-in-bins-renyi": "balls-in-bins Rényi",
    "conditional-composition": "conditional composition",
    "mmcc": "MMCC",
    "revealed-draws": "revealed draws",
    "min-sep-renyi": "b-min-sep Rényi",
    "balls-in-bins-importance": "balls-in-bins importance sampling",
    "min-sep-importance": "b-min-sep importance sampling",
    "min-sep-any-matrix": "r-min-sep Monte Carlo",
}


# Names that accountants had at first for schemes in whose name the second word is.
_OF_SCHEMES = {
    ("poisson-pld", "CyclicPoisson"): "cyclic Poisson PLD",
    ("poisson-pld", "TruncatedPoisson"): "truncated Poisson PLD",
    ("user-poisson-pld", "UserCyclic"): "user-cyclic-pld",
    ("revealed-draws", "participation"): "revealed draws, any blocking",
}


def case_name(name: str, adjacency: Adjacency, scheme: str) -> str:
    """An accountant's name in the names of cases, for a scheme by the name of its cases."""
    relation = "" if adjacency is Adjacency.ZERO_OUT else f", {adjacency.value.replace('_', '-')}"
    for (whose, word), said in _OF_SCHEMES.items():
        if whose == name and word in scheme:
            return said + relation
    return _NAMES.get(name, name) + relation


def seeded(accountant: Any, **options: Any) -> Any:
    """An accountant that simulates with a fixed seed, on one thread; others as they are."""
    if not hasattr(accountant, "seed"):
        return accountant
    return dataclasses.replace(accountant, seed=17, threads=1, progress=False, **options)


# Runs


def images() -> TensorDataset:
    """Random images, with labels."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(EXAMPLES, 1, 4, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (EXAMPLES,), generator=generator))


def views() -> TensorDataset:
    """Two versions of every image."""
    x, y = images().tensors
    return TensorDataset(torch.stack([x, x.flip(-1)], dim=1), y)


def words() -> TensorDataset:
    """Random sequences of tokens, with labels."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randint(0, 11, (EXAMPLES, 5), generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (EXAMPLES,), generator=generator))


def convolutions() -> nn.Module:
    """A small net for images, with dropout."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(64, 3))


class Attention(nn.Module):
    """A small net for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of three classes."""
        embedded = self.embedding(x)
        attended, _ = self.attention(embedded, embedded, embedded, need_weights=False)
        return self.out(self.norm(embedded + attended).mean(dim=1))


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD as the examples use it."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# The group of options, and the field in it, that an option of a case is.
GROUPED = {
    "clipping": ("gradients", "clipping"),
    "loss_reduction": ("gradients", "loss"),
    "views": ("gradients", "views"),
    "noise_dtype": ("noise", "dtype"),
    "regenerate_noise": ("noise", "regenerate"),
    "max_physical_batch_size": ("loading", "max_physical_batch_size"),
    "microbatches": ("loading", "microbatches"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One short run; ``options`` are those of ``make_private`` and of its groups of options."""

    scheme: str | Scheme = "Poisson"
    strategy: str = "Identity"
    mode: str = "bookkeeping"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    net: Callable[[], nn.Module] = convolutions
    data: Callable[[], TensorDataset] = images
    optimizer: Callable[..., torch.optim.Optimizer] = momentum_sgd
    by_loader: bool = False
    accountant: str | None = "gaussian"  # it covers what others refuse, and states nothing here

    def wire(self) -> tuple[PrivateTraining, Any]:
        """The private run and a schedule of its learning rate, after the same start."""
        torch.manual_seed(0)
        module = self.net()
        optimizer = self.optimizer(module.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        options: dict[str, Any] = {"max_grad_norm": 1.0, "seed": 5, **self.options}
        if self.by_loader:
            loader = DataLoader(self.data(), batch_size=6)
            options |= {"data": loader, "epochs": 2}
        else:
            scheme = schemes()[self.scheme] if isinstance(self.scheme, str) else self.scheme
            strategy = strategies(scheme.steps)[self.strategy]
            options |= {"data": self.data(), "scheme": scheme, "strategy": strategy}
        if "target_epsilon" not in options:
            options.setdefault("noise_multiplier", 1.0)
        engine = PrivacyEngine(accountant=self.accountant, ledger=options.pop("ledger", None))
        groups: dict[str, dict[str, Any]] = {"gradients": {"mode": self.mode}, "noise": {}}
        groups["loading"] = {}
        for name in [name for name in options if name in GROUPED]:
            group, field = GROUPED[name]
            groups[group][field] = options.pop(name)
        private = engine.make_private(
            module=module,
            optimizer=optimizer,
            gradients=Gradients(**groups["gradients"]),
            noise=NoiseOptions(**groups["noise"]),
            loading=Loading(**groups["loading"]),
            **options,
        )
        private.register_scheduler(schedule)
        torch.manual_seed(99)
        return private, schedule

    def train(
        self, wired: tuple[PrivateTraining, Any], until: int | None = None
    ) -> PrivateTraining:
        """Go on until so many logical steps have run, or all."""
        private, schedule = wired
        module, optimizer, loader = private
        reduction, many = self.options.get("loss_reduction", "mean"), self.options.get("views", 1)
        stop = until or private.mechanism.steps
        while private.steps_executed < stop:  # a loader may end with every epoch
            for x, y in loader:
                if many > 1:
                    x, y = x.flatten(0, 1), y.repeat_interleave(many)
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x), y, reduction=reduction).backward()
                optimizer.step()
                schedule.step()
                if private.steps_executed == stop:
                    break
        private.end_early()
        return private

    def half(self) -> PrivateTraining:
        """The run after half of its steps."""
        return self.train(self.wire(), STEPS // 2)

    def whole(self) -> str:
        """Digest of the parameters that it ends with."""
        return digest(list(self.train(self.wire()).module.parameters()))

    def resumed(self) -> str:
        """The same, interrupted half-way."""
        file = io.BytesIO()
        torch.save(self.half().state_dict(), file)
        file.seek(0)
        second = self.wire()
        torch.manual_seed(12345)  # what the new process's generator holds does not matter
        second[0].load_state_dict(torch.load(file, weights_only=True))
        return digest(list(self.train(second).module.parameters()))


def runs() -> dict[str, Run]:
    """Every scheme, family of strategies, mode, style, filter and option at least once."""
    hooks, functorch = {"mode": "hooks"}, {"mode": "functorch"}
    parts = {"max_physical_batch_size": 3}
    everyone = Poisson(probability=1.0, dataset_size=EXAMPLES, steps=STEPS)
    head = PerGroup({"first": ["0.*", "1.*"], "last": ["5.*"]})
    budget = {"target_delta": DELTA, "max_steps": STEPS}
    adam = functools.partial(ScaledAdam, lr=0.01, eps_scale=0.1)
    one_more = EXAMPLES + 6
    nominal = Poisson(probability=0.25, dataset_size=EXAMPLES, steps=STEPS, nominal_size=one_more)
    found = {
        "Poisson, Identity, bookkeeping": Run(),
        "Poisson, Identity, hooks": Run(**hooks),
        "Poisson, Identity, functorch": Run(**functorch),
        "Poisson, N private": Run(
            scheme=nominal, accountant=None, options={"loss_reduction": "sum"}
        ),
        "TruncatedPoisson, BSR, hooks, parts": Run(
            scheme="TruncatedPoisson", strategy="BSR", options=parts, **hooks
        ),
        "TruncatedPoisson, Identity, bookkeeping, per layer": Run(
            scheme="TruncatedPoisson", options={"clipping": PerLayer()}
        ),
        "CyclicPoisson, BandMF, bookkeeping, parts": Run(
            scheme="CyclicPoisson", strategy="BandMF", options=parts
        ),
        "CyclicPoisson cut, BandMF for momentum, functorch": Run(
            scheme="CyclicPoisson, max_batch_size", strategy="BandMF, momentum", **functorch
        ),
        "CyclicPoisson independent, SquareRoot, hooks, automatic": Run(
            scheme="CyclicPoisson, assignment='independent'",
            strategy="SquareRoot",
            options={"clipping": Automatic()},
            **hooks,
        ),
        "MinSep, BandMF, bookkeeping": Run(scheme="MinSep", strategy="BandMF"),
        "MinSep, BandMF, hooks, parts": Run(
            scheme="MinSep", strategy="BandMF", options=parts, **hooks
        ),
        "MinSep, BLT, functorch, per group": Run(
            scheme="MinSep", strategy="BLT", options={"clipping": head}, **functorch
        ),
        "TruncatedMinSep, ColumnNormalizedBandMF, bookkeeping, automatic": Run(
            scheme="TruncatedMinSep",
            strategy="ColumnNormalizedBandMF",
            options={"clipping": Automatic()},
        ),
        "BallsInBins, BLT, bookkeeping, per group": Run(
            scheme="BallsInBins", strategy="BLT", options={"clipping": head}
        ),
        "BallsInBins, Dense, functorch, flat": Run(
            scheme="BallsInBins",
            strategy="Dense, epochs",
            options={"clipping": Flat()},
            **functorch,
        ),
        "RandomAllocation, BISR, hooks, per layer, drawn again": Run(
            scheme="RandomAllocation",
            strategy="BISR",
            options={"clipping": PerLayer(), "regenerate_noise": True},
            **hooks,
        ),
        "RandomAllocation twice, BandInvMF, bookkeeping, bfloat16": Run(
            scheme="RandomAllocation, participations > 1",
            strategy="BandInvMF",
            options={"noise_dtype": torch.bfloat16},
        ),
        "Shuffled, Tree, bookkeeping": Run(scheme="Shuffled", strategy="Tree"),
        "Shuffled, TreeRestart, hooks": Run(scheme="Shuffled", strategy="TreeRestart", **hooks),
        "UserMinSep own, BandMF, bookkeeping": Run(
            scheme="UserMinSep, users share no example", strategy="BandMF"
        ),
        "UserMinSep shared, BSR, hooks, parts": Run(
            scheme="UserMinSep, shared examples", strategy="BSR", options=parts, **hooks
        ),
        "UserMinSep participation, Identity, functorch": Run(
            scheme="UserMinSep, exclusion='participation'", **functorch
        ),
        "UserFixed, BandMF, bookkeeping": Run(scheme="UserFixed", strategy="BandMF"),
        "two microbatches": Run(options={"microbatches": 2}),
        "sum": Run(options={"loss_reduction": "sum"}),
        "two views": Run(options={"views": 2}, data=views),
        "attention": Run(net=Attention, data=words),
        "data loader": Run(by_loader=True),
        "calibrated": Run(options={"target_epsilon": 3.0, "target_delta": DELTA}, accountant=None),
        "ScaledAdam": Run(optimizer=adam, **hooks),
        "individual GDP filter": Run(
            scheme=everyone,
            options={"individual": GDPFilter(target_epsilon=8.0, **budget), "max_grad_norm": 3.0},
        ),
        "individual GDP odometer": Run(
            scheme=everyone,
            options={"individual": GDPOdometer(increments=(2.0, 1.0), **budget)},
            **hooks,
        ),
        "individual Rényi filter": Run(
            options={"individual": RenyiFilter(target_epsilon=4.0, **budget)}, **hooks
        ),
    }
    return found


TWO_PROCESSES = (
    "Poisson, Identity, bookkeeping",
    "TruncatedPoisson, BSR, hooks, parts",
    "MinSep, BLT, functorch, per group",
    "BallsInBins, BLT, bookkeeping, per group",
    "UserMinSep shared, BSR, hooks, parts",
    "individual GDP filter",
    "ScaledAdam",
)


def run_cases() -> dict[str, Case]:
    """Whole runs, interrupted ones, and those of two processes."""
    cases: dict[str, Case] = {}
    for name, run in runs().items():
        cases[f"{name}: whole"] = run.whole
        cases[f"{name}: resumed"] = run.resumed
    for name in TWO_PROCESSES:
        for how in ("whole", "resumed"):
            cases[f"{name}: {how}, two processes"] = functools.partial(_of_two, f"{name}: {how}")
    return cases


def _of_two(name: str) -> str:
    first, second = two_processes()
    return first[name] if first[name] == second[name] else f"{FAILED}the ranks differ"


@functools.cache
def two_processes() -> list[dict[str, str]]:
    """The findings of two processes that make the runs of ``TWO_PROCESSES`` together."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, args=(folder,), nprocs=2)
        files = [pathlib.Path(folder, f"{rank}.json") for rank in range(2)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _rank(rank: int, folder: str) -> None:
    with alone():
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
        )
        found = {}
        for name in TWO_PROCESSES:
            run = runs()[name]
            found[f"{name}: whole"] = _outcome(run.whole)
            found[f"{name}: resumed"] = _outcome(run.resumed)
        pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.destroy_process_group()


# Formats


def format_cases() -> dict[str, Case]:
    """The contents written to disk: names and types, and values."""

    def value(of: Any, how: str) -> str:
        return digest(getattr(of, how)())

    cases: dict[str, Case] = {}
    for name, scheme in schemes().items():
        cases[f"scheme {name}"] = functools.partial(value, scheme, "to_dict")
        cases[f"scheme {name}, published"] = functools.partial(value, scheme, "published")
    for name, strategy in strategies(STEPS).items():
        cases[f"strategy {name}"] = functools.partial(_bound_strategy, strategy)
    mechanism = separated()
    cases["mechanism"] = functools.partial(value, mechanism, "to_json")
    cases["mechanism, hash"] = lambda: mechanism.hash
    for name, run in runs().items():
        for option, held in run.options.items():
            if option in ("clipping", "individual"):
                cases[f"{option} of {name}"] = functools.partial(value, held, "to_dict")
    for what, how in {"fields": fields, "values": lambda state: state}.items():
        cases[f"checkpoint, {what}"] = functools.partial(
            _checkpoint, "MinSep, BandMF, bookkeeping", how
        )
        cases[f"checkpoint, individual filter, {what}"] = functools.partial(
            _checkpoint, "individual GDP filter", how
        )
        cases[f"ledger, {what}"] = functools.partial(_ledger, how)
        for name in ("r-min-sep Monte Carlo", "b-min-sep importance sampling"):
            cases[f"certificate, {name}, {what}"] = functools.partial(_certificate, name, how)
    cases["guarantee"] = lambda: digest(json.loads(guaranteed().guarantee().to_json()))
    cases["guarantee, text"] = lambda: digest(str(guaranteed().guarantee()))
    return cases


def separated() -> MatrixMechanism:
    """A mechanism that accountants simulate."""
    return MatrixMechanism(
        scheme=schemes()["MinSep"], strategy=BSR(bands=BANDS), noise_multiplier=2.0
    )


def _bound_strategy(strategy: Strategy) -> str:
    return digest(strategy.bind(STEPS).to_dict())


def guaranteed() -> PrivateTraining:
    """Half a run that states a guarantee."""
    return Run(options={"target_delta": DELTA}, accountant=None).half()


def _checkpoint(name: str, how: Callable[[Any], Any]) -> str:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - a checkpoint keeps the global generators
    state = runs()[name].half().state_dict()
    return digest(how(without(state, "ledger_run", "checksum")))


def _ledger(how: Callable[[Any], Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "ledger.jsonl")
        Run(options={"ledger": path}).half()
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return digest(how([without(line, "run") for line in lines]))


@functools.cache
def certificate_file(name: str) -> tuple[str, Any]:
    """Name and content of the file in which a simulating accountant keeps its verdicts."""
    mechanism = separated()
    members = [each.accountant for each in accountants_for(mechanism)]
    (accountant,) = (member for member in members if _NAMES.get(member.name) == name)
    with tempfile.TemporaryDirectory() as folder:
        seeded(accountant, cache=folder).calibrate(mechanism.participants, epsilon=2.0, delta=DELTA)
        (path,) = pathlib.Path(folder).glob("*.json")
        return path.name, json.loads(path.read_text(encoding="utf-8"))


def _certificate(name: str, how: Callable[[Any], Any]) -> str:
    file, content = certificate_file(name)
    return digest(file, how(content))


# Collecting and comparing

SECTIONS: dict[str, Callable[[], dict[str, Case]]] = {
    "batches": batch_cases,
    "strategies": strategy_cases,
    "noise": noise_cases,
    "formats": format_cases,
    "epsilon": epsilon_cases,
    "runs": run_cases,
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread, no warnings and no log: outcomes say what failed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)


def collect(sections: Sequence[str], *, progress: bool = True) -> Digests:
    """Digests of the sections, by case; of a case that fails, its error."""
    found: Digests = {}
    with alone():
        cases = {section: SECTIONS[section]() for section in sections}
        total = sum(map(len, cases.values()))
        with tqdm(total=total, unit="case", disable=not progress) as bar:
            for section, members in cases.items():
                bar.set_description(section)
                found[section] = {}
                for name, case in members.items():
                    found[section][name] = _outcome(case)
                    bar.update()
    return found


def _outcome(case: Case) -> str:
    try:
        return case()
    except Exception as error:
        return f"{FAILED}{type(error).__name__}: {str(error).strip():.200}"


def differences(before: Digests, after: Digests) -> list[str]:
    """A line for each case that differs, is missing or is new, or fails on both sides."""
    lines = []
    for section in sorted(before.keys() | after.keys()):
        old, new = before.get(section, {}), after.get(section, {})
        appeared: dict[str, list[str]] = {}
        for name in sorted(new.keys() - old.keys()):
            appeared.setdefault(new[name], []).append(name)
        for name in sorted(old.keys() | new.keys()):
            where = f"{section}: {name}"
            if name not in new:
                same = appeared.get(old[name], [])
                hint = f" (its digest is that of the new {same[0]!r})" if same else ""
                lines.append(f"missing  {where}{hint}")
            elif name not in old:
                lines.append(f"new      {where}")
            elif old[name] != new[name]:
                lines.append(f"differs  {where}: {old[name]:.60} is now {new[name]:.60}")
            elif new[name].startswith(FAILED):
                lines.append(f"fails    {where}: {new[name]}")
    return lines


def of_revision(revision: str, sections: Sequence[str]) -> Digests:
    """Digests of another revision of this repository, by the script that it has.

    Raises:
        ValueError: if there is no such revision, or it has no such script, or that fails.
    """
    git = ["git", "-C", str(ROOT)]
    with tempfile.TemporaryDirectory() as folder:
        tree, file = pathlib.Path(folder, "tree"), pathlib.Path(folder, "digests.json")
        _succeed(
            [*git, "worktree", "add", "--detach", str(tree), revision], f"--against {revision}"
        )
        try:
            if not (tree / SCRIPT).exists():
                raise ValueError(f"--against {revision}: that revision has no {SCRIPT}")
            print(f"{revision}:", file=sys.stderr)
            command = [sys.executable, "-m", "scripts.digests", "--write", str(file)]
            for section in sections:
                command += ["--only", section]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            # Failing cases end with status 1 and are written down all the same.
            status = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
            if not file.exists():
                raise ValueError(f"--against {revision}: its script ended with status {status}")
            return json.loads(file.read_text(encoding="utf-8"))
        finally:
            _succeed([*git, "worktree", "remove", "--force", str(tree)], "git worktree remove")


def _succeed(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{what}: {done.stderr.strip()}")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", type=pathlib.Path, metavar="FILE", help="keep the digests here")
    with_what = parser.add_mutually_exclusive_group()
    with_what.add_argument(
        "--compare", type=pathlib.Path, metavar="FILE", help="digests that --write kept"
    )
    with_what.add_argument("--against", metavar="REV", help="a revision, such as main")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS)
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Record digests of this tree, and compare them with a file's or another revision's."""
    options = _options(argv)
    sections = options.only or list(SECTIONS)
    home = pathlib.Path(dptrain.__file__).resolve().parents[1]
    if home != ROOT:
        print(f"dptrain was imported from {home}: set PYTHONPATH={ROOT}", file=sys.stderr)
        return 2
    before: Digests | None = None
    try:
        if options.against is not None:
            before = of_revision(options.against, sections)
        elif options.compare is not None:
            kept = json.loads(options.compare.read_text(encoding="utf-8"))
            before = {section: kept.get(section, {}) for section in sections}
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found = collect(sections)
    if options.write is not None:
        text = json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True)
        options.write.write_text(text + "\n", encoding="utf-8")
    counts = ", ".join(f"{len(cases)} of {section}" for section, cases in found.items())
    # Against itself only failures are left.
    lines = differences(found if before is None else before, found)
    for line in lines:
        print(line)
    compared = "" if before is None else f"; {len(lines)} differ, are missing, new or fail"
    failing = f"; {len(lines)} fail" if before is None and lines else ""
    print(f"{sum(map(len, found.values()))} digests ({counts}){compared}{failing}")
    return 1 if lines else 0


if __name__ == "__main__":
    if not ONE_THREAD.items() <= os.environ.items():
        _options(None)  # what is refused needs no second start
        # Libraries read these when they are loaded.
        os.execve(
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ONE_THREAD}
        )
    sys.exit(main())
