"""Every argument of what is public refuses what it cannot mean: one line with its name."""

from __future__ import annotations

import inspect
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dptrain
from dptrain.accounting import group_curve, last_iterate_curve, to_dp_event
from dptrain.clipping.base.styles import Automatic, PerGroup
from dptrain.individual import GDPFilter, RenyiFilter
from dptrain.noise import noise_stream
from dptrain.planning.question import Question
from dptrain.planning.strategy_table import compare_strategies
from dptrain.sampling.users.batch_size import probability_for_batch_size
from dptrain.strategies.momentum import MomentumSGD
from tests.helpers.bad_values import (
    DELTA,
    FLAG,
    FUNCTION,
    INF,
    INTEGER,
    NAME,
    NAN,
    NOT_NEGATIVE,
    NUMBERS,
    POSITIVE,
    PROBABILITY,
    SEED,
    STEPS,
    THING,
    Argument,
    Odd,
)

GRAPH = dptrain.AttributionGraph.from_lists([[i % 20] for i in range(100)])
MECHANISM = dptrain.MatrixMechanism(
    scheme=dptrain.Poisson(probability=0.1, dataset_size=100, steps=10),
    strategy=dptrain.Identity(),
    noise_multiplier=1.0,
)
DATA = TensorDataset(torch.zeros(100, 3), torch.zeros(100, dtype=torch.long))


def make_private(**options: Any) -> Any:
    """A run of a small model; what is not said is right."""
    module = options.pop("module", None) or nn.Linear(3, 2)
    parameters = (
        module.parameters() if isinstance(module, nn.Module) else [nn.Parameter(torch.ones(1))]
    )
    given: dict[str, Any] = {
        "module": module,
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
        "data": DATA,
        "scheme": MECHANISM.scheme,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    if "mechanism" in options:
        del given["scheme"], given["noise_multiplier"]
    if "epochs" in options:
        del given["scheme"]
        given["data"] = DataLoader(DATA, batch_size=10)
    if "target_epsilon" in options:
        del given["noise_multiplier"]
        given["target_delta"] = 1e-3
    engine = dptrain.PrivacyEngine(ledger=options.pop("ledger", None))
    return engine.make_private(**given | options)


SIZES = {"dataset_size": INTEGER, "steps": STEPS}
SCHEMES: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Argument]]] = [
    (
        dptrain.Poisson,
        {"probability": 0.1, "dataset_size": 100, "steps": 10},
        {"probability": PROBABILITY, **SIZES},
    ),
    (
        dptrain.Poisson.for_batch_size,
        {"batch_size": 10, "dataset_size": 100, "steps": 10},
        {"batch_size": POSITIVE.but(101), **SIZES},
    ),
    (
        dptrain.MinSep,
        {"probability": 0.1, "min_sep": 2, "dataset_size": 100, "steps": 10, "warm_start": True},
        {"probability": PROBABILITY, "min_sep": INTEGER, "warm_start": FLAG, **SIZES},
    ),
    (
        dptrain.MinSep.for_batch_size,
        {"batch_size": 10, "min_sep": 2, "dataset_size": 100, "steps": 10, "warm_start": True},
        {"batch_size": POSITIVE.but(51), "min_sep": INTEGER, "warm_start": FLAG, **SIZES},
    ),
    (
        dptrain.BallsInBins,
        {"bins": 5, "epochs": 2, "dataset_size": 100},
        {"bins": STEPS, "epochs": STEPS, "dataset_size": INTEGER},
    ),
    (
        dptrain.BallsInBins.for_batch_size,
        {"batch_size": 10, "epochs": 2, "dataset_size": 100},
        {
            "batch_size": POSITIVE.but(101),
            "epochs": STEPS.optional,
            "dataset_size": INTEGER,
        },
    ),
    (
        dptrain.Shuffled,
        {"batch_size": 10, "epochs": 2, "dataset_size": 100, "reshuffle": True},
        {"batch_size": INTEGER, "epochs": STEPS, "dataset_size": INTEGER, "reshuffle": FLAG},
    ),
    (
        dptrain.RandomAllocation,
        {"participations": 2, "dataset_size": 100, "steps_per_epoch": 10, "epochs": 1},
        {
            "participations": INTEGER.but(11),
            "dataset_size": INTEGER,
            "steps_per_epoch": STEPS,
            "epochs": STEPS,
        },
    ),
    (
        dptrain.RandomAllocation.for_batch_size,
        {"batch_size": 10, "participations": 2, "dataset_size": 100, "epochs": 1},
        {"batch_size": POSITIVE.but(101), "participations": INTEGER, "dataset_size": INTEGER},
    ),
    (
        dptrain.Poisson,
        {"probability": 0.1, "max_batch_size": 20, "dataset_size": 100, "steps": 10},
        {"probability": PROBABILITY, "max_batch_size": INTEGER.optional, **SIZES},
    ),
    (
        dptrain.MinSep,
        {
            "probability": 0.1,
            "min_sep": 2,
            "max_batch_size": 20,
            "dataset_size": 100,
            "steps": 10,
            "warm_start": True,
        },
        {
            "probability": PROBABILITY,
            "min_sep": INTEGER,
            "max_batch_size": INTEGER.optional,
            "warm_start": FLAG,
            **SIZES,
        },
    ),
    (
        dptrain.CyclicPoisson,
        {"probability": 0.5, "cycle": 2, "dataset_size": 100, "steps": 10, "max_batch_size": 40},
        {
            "probability": PROBABILITY,
            "cycle": INTEGER,
            "max_batch_size": INTEGER.optional,
            **SIZES,
        },
    ),
    (
        dptrain.CyclicPoisson.for_batch_size,
        {"batch_size": 10, "cycle": 2, "dataset_size": 100, "steps": 10},
        {"batch_size": POSITIVE.but(51), "cycle": INTEGER, **SIZES},
    ),
    (
        dptrain.UserFixed,
        {"graph": GRAPH, "batch_size": 5, "min_sep": 2, "steps": 10, "max_participations": 3},
        {
            "graph": THING,
            "batch_size": INTEGER,
            "min_sep": INTEGER,
            "steps": STEPS,
            "max_participations": INTEGER.optional,
        },
    ),
    (
        dptrain.UserMinSep.for_batch_size,
        {"graph": GRAPH, "batch_size": 5, "min_sep": 2, "steps": 10},
        {"graph": THING, "batch_size": POSITIVE, "min_sep": INTEGER, "steps": STEPS},
    ),
    (
        probability_for_batch_size,
        {"graph": GRAPH, "batch_size": 5.0, "min_sep": 2, "exclusion": "sampling", "seed": 0},
        {
            "graph": THING,
            "batch_size": POSITIVE,
            "min_sep": INTEGER,
            "exclusion": NAME,
            "method": NAME.optional,
            "relative_error": PROBABILITY.optional,
            "seed": SEED,
        },
    ),
]

STRATEGIES: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Argument]]] = [
    (dptrain.Identity().bind, {"steps": 5}, {"steps": STEPS}),
    (
        dptrain.BandMF,
        {"bands": 2, "objective": "mean", "overlap": 0.5, "overlap_decay": 0.9},
        {
            "bands": INTEGER,
            "objective": NAME,
            "workload": THING,
            "coefficients": NUMBERS.optional,
            "overlap": NOT_NEGATIVE.but(1.5),
            "overlap_decay": PROBABILITY,
        },
    ),
    (dptrain.BandMF(bands=2).bind, {"steps": 5}, {"steps": STEPS}),
    (
        dptrain.BSR,
        {"bands": 2, "alpha": 1.0, "beta": 0.5},
        {"bands": INTEGER, "alpha": PROBABILITY, "beta": NOT_NEGATIVE.but(1.0)},
    ),
    (dptrain.BSR(bands=2).bind, {"steps": 5}, {"steps": STEPS}),
    (
        dptrain.BISR,
        {"inverse_bands": 2, "alpha": 1.0, "beta": 0.5},
        {"inverse_bands": INTEGER, "alpha": PROBABILITY, "beta": NOT_NEGATIVE.but(1.0)},
    ),
    (dptrain.BISR(inverse_bands=2).bind, {"steps": 5}, {"steps": STEPS}),
    (dptrain.LambdaCGD, {"cancellation": 0.5}, {"cancellation": NOT_NEGATIVE.but(1.0)}),
    (dptrain.LambdaCGD(cancellation=0.5).bind, {"steps": 5}, {"steps": STEPS}),
    (
        dptrain.BandInvMF,
        {"inverse_bands": 2, "max_participations": 2, "min_sep": 2, "objective": "mean"},
        {
            "inverse_bands": INTEGER,
            "max_participations": INTEGER,
            "min_sep": INTEGER.optional,
            "objective": NAME,
            "workload": THING,
            "coefficients": NUMBERS.optional,
        },
    ),
    (
        dptrain.BLT,
        {"buffers": 2, "max_participations": 2, "min_sep": 2, "objective": "mean"},
        {
            "buffers": INTEGER.but(1000, 10**12),
            "max_participations": INTEGER,
            "min_sep": INTEGER.optional,
            "objective": NAME,
        },
    ),
    (
        dptrain.BLT,
        {"buffers": 1, "theta": (0.5,), "omega": (0.25,)},
        {"theta": NUMBERS.optional, "omega": NUMBERS.optional},
    ),
    (
        dptrain.ColumnNormalizedBandMF,
        {"bands": 2},
        {"bands": INTEGER, "workload": THING},
    ),
    (dptrain.Dense, {"epochs": 2}, {"epochs": INTEGER.optional, "workload": THING}),
    (dptrain.Tree().bind, {"steps": 5}, {"steps": STEPS}),
    (dptrain.SquareRoot().bind, {"steps": 5}, {"steps": STEPS}),
    (dptrain.TreeRestart, {"height": 2}, {"height": INTEGER}),
    (
        MomentumSGD,
        {"momentum": 0.9, "weight_decay": 0.1, "learning_rates": 1.0},
        {
            "momentum": NOT_NEGATIVE.but(1.0),
            "weight_decay": NOT_NEGATIVE,
            "learning_rates": Argument((None, "1", True, [True], ["1"]), (NAN, INF, -1.0, 0.0, [])),
        },
    ),
    (
        compare_strategies,
        {
            "steps": 8,
            "epochs": 2,
            "bands": (2,),
            "timed": False,
            "parameters": 10,
            "progress": False,
        },
        {
            "steps": STEPS,
            "epochs": INTEGER.but(9).optional,
            "parameters": INTEGER,
            "workload": THING,
            "timed": FLAG,
            "dense": FLAG,
            "bands": Argument((None, 5, "2", [None], ["2"], [1.5]), ([0], [-1], [9])),
        },
    ),
]

ACCOUNTING: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Argument]]] = [
    (
        dptrain.MatrixMechanism,
        {"scheme": MECHANISM.scheme, "strategy": MECHANISM.strategy, "noise_multiplier": 1.0},
        {"scheme": THING, "strategy": THING, "noise_multiplier": NOT_NEGATIVE},
    ),
    (
        dptrain.account,
        {"mechanism": MECHANISM, "delta": 1e-3},
        {
            "mechanism": THING,
            "delta": DELTA.optional,
            "accountant": NAME.optional,
            "adjacency": THING.optional,
        },
    ),
    (dptrain.account, {"mechanism": MECHANISM, "epsilon": 1.0}, {"epsilon": POSITIVE.optional}),
    (
        dptrain.profile,
        {"mechanism": MECHANISM, "epsilon": [0.5, 1.0]},
        {
            "mechanism": THING,
            "epsilon": Argument(
                (True, "1", ["1"], [True], [None], [[1], [1, 2]]), ([], [-1], [NAN])
            ),
            "accountant": NAME.optional,
        },
    ),
    (
        dptrain.calibrate,
        {
            "scheme": MECHANISM.scheme,
            "strategy": MECHANISM.strategy,
            "epsilon": 1.0,
            "delta": 1e-3,
            "accountant": "gaussian",
        },
        {
            "scheme": THING,
            "strategy": THING,
            "epsilon": POSITIVE,
            "delta": DELTA,
            "accountant": NAME.optional,
            "adjacency": THING.optional,
        },
    ),
    (
        dptrain.accountants_for,
        {"mechanism": MECHANISM},
        {"mechanism": THING, "adjacency": THING.optional},
    ),
    (
        group_curve,
        {"mechanism": MECHANISM, "group_size": 2},
        {"mechanism": THING, "group_size": INTEGER.but(101)},
    ),
    (
        last_iterate_curve,
        {"mechanism": MECHANISM, "group_size": 2},
        {"mechanism": THING, "group_size": INTEGER},
    ),
    (to_dp_event, {"mechanism": MECHANISM}, {"mechanism": THING, "adjacency": THING.optional}),
    (
        Question,
        {
            "epsilon": 1.0,
            "delta": 1e-3,
            "dataset_size": 100,
            "batch_size": 10,
            "steps": 10,
            "max_bands": 2,
            "buffers": 2,
            "parameters": 10,
            "physical_batch_size": 5,
            "memory": 1e6,
            "fixed_size": False,
        },
        {
            "epsilon": POSITIVE,
            "delta": DELTA,
            "dataset_size": INTEGER,
            "batch_size": POSITIVE.but(101),
            "steps": STEPS,
            "max_bands": INTEGER.but(11),
            "buffers": Argument(INTEGER.types, (-1,)),
            "parameters": INTEGER,
            "physical_batch_size": INTEGER.optional,
            "memory": NOT_NEGATIVE.optional,
            "fixed_size": FLAG,
            "workload": THING,
        },
    ),
    (
        Question.of_run,
        {"epsilon": 1.0, "delta": 1e-3, "dataset_size": 100, "batch_size": 10, "epochs": 2.0},
        {"epochs": POSITIVE.but(1e12).optional, "dataset_size": INTEGER, "batch_size": POSITIVE},
    ),
]

_TARGET = {"target_epsilon": 1.0, "target_delta": 1e-3, "max_steps": 10}
_TARGET_ARGUMENTS = {"target_epsilon": POSITIVE, "target_delta": DELTA}
TRAINING: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Argument]]] = [
    (
        GDPFilter,
        {**_TARGET, "full_consumption": False},
        {
            **_TARGET_ARGUMENTS,
            "max_steps": Argument(STEPS.types[1:-1], STEPS.values),
            "full_consumption": FLAG,
        },
    ),
    (
        RenyiFilter,
        {**_TARGET, "personal_clipping": 2.0},
        {**_TARGET_ARGUMENTS, "personal_clipping": POSITIVE.but(0.5).optional},
    ),
    (GDPFilter(**_TARGET).noise_multiplier, {"full_norm_steps": 3}, {"full_norm_steps": STEPS}),
    (Automatic, {"gamma": 0.01}, {"gamma": POSITIVE.but(1e-9)}),
    (
        PerGroup,
        {"groups": {"all": ("*",)}, "shares": {"all": 1.0}},
        {
            "groups": Argument(
                (None, 5, "all", [], {"a": 5}, {"a": "x"}), ({}, {"a": ()}, {"a": (5,)})
            ),
            "shares": Argument(
                (5, "all", [], {"all": True}, {"all": "1"}), ({}, {"all": 0.0}, {"all": NAN})
            ),
        },
    ),
    (
        dptrain.ScaledAdam,
        {"params": [nn.Parameter(torch.ones(1))], "eps_scale": 1e-3},
        {"eps_scale": POSITIVE.but(1e-320)},
    ),
    (
        noise_stream,
        {"strategy": dptrain.Identity(), "steps": 3, "like": [torch.ones(2)], "seed": 0},
        {
            "strategy": THING,
            "steps": STEPS,
            "like": Argument((None, 5, True, ["x"], [None], [5])),
            "seed": SEED.but(2**128),
            "secure": FLAG,
            "regenerate": FLAG,
            "per_parameter": FLAG,
            "dtype": THING,
            "shard": Argument(
                (5, True, "x", (1,), (0, 1, 2), (0.5, 2), ("0", 2)), ((2, 2), (-1, 2))
            ),
        },
    ),
    (
        dptrain.PrivateLoader,
        {"dataset": DATA, "scheme": MECHANISM.scheme, "seed": 0},
        {
            "dataset": Argument(
                (), (None, 5, True, 1.5, Odd(), [], "x")
            ),  # has no length, or another
            "scheme": THING,
            "seed": SEED,
            "max_physical_batch_size": INTEGER.optional,
            "steps_per_epoch": INTEGER.optional,
            "num_workers": Argument(INTEGER.types, (-1,)),
            "collate_fn": FUNCTION,
            "worker_init_fn": FUNCTION,
            "pin_memory": FLAG,
            "persistent_workers": FLAG,
            "timeout": NOT_NEGATIVE,
            "rank": SEED,
            "world_size": INTEGER,
        },
    ),
    (
        dptrain.PrivateLoader.from_data_loader,
        {"data_loader": DataLoader(DATA, batch_size=10), "scheme": MECHANISM.scheme, "seed": 0},
        {"data_loader": THING, "scheme": THING},
    ),
    (
        make_private,
        {"noise_multiplier": 1.0},
        {
            "module": Argument((5, "x", [1], int)),
            "optimizer": THING,
            "data": Argument((5, 1.5, Odd())),
            "scheme": THING.optional,
            "strategy": THING.optional,
            "noise_multiplier": NOT_NEGATIVE.optional,
            "target_delta": DELTA.but(0.5, 0.01).optional,
            "max_grad_norm": POSITIVE,
            "seed": SEED.optional,
            "individual": THING.optional,
            "gradients": THING,
            "noise": THING,
            "loading": THING,
        },
    ),
    (
        dptrain.PrivacyEngine,
        {},
        {
            "accountant": Argument(NAME.types).optional,
            "ledger": Argument((True, 5, 1.5, [], Odd())),
            "distributed": Argument(FLAG.types[1:]),
        },
    ),
    (
        dptrain.Gradients,
        {},
        {
            "mode": NAME.optional,
            "clipping": THING,
            "loss": NAME,
            "views": INTEGER,
            "probe": NAME,
            "buffers": Argument((5, 1.5, True, b"x", [5], Odd()), ("running_mean",)),
        },
    ),
    (
        dptrain.NoiseOptions,
        {},
        {
            "secure": FLAG,
            "dtype": Argument((None, 5, "float32", Odd()), (torch.float16, torch.int32)),
            "regenerate": FLAG,
            "shard": NAME,
        },
    ),
    (
        dptrain.Loading,
        {},
        {
            "max_physical_batch_size": INTEGER.optional,
            "microbatches": INTEGER.optional,
            "steps_per_epoch": INTEGER.optional,
        },
    ),
    (
        make_private,
        {"target_epsilon": 1.0},
        {"target_epsilon": POSITIVE.optional, "target_delta": DELTA.optional},
    ),
    (make_private, {"mechanism": MECHANISM}, {"mechanism": THING.optional}),
    (make_private, {"epochs": 2}, {"epochs": INTEGER.but(10**12).optional}),
]


def cases() -> list[Any]:
    """(callable, right arguments, argument, its kind) of every row."""
    found = []
    for call, right, arguments in (*SCHEMES, *STRATEGIES, *ACCOUNTING, *TRAINING):
        name = getattr(call, "__qualname__", repr(call))
        owner = getattr(call, "__self__", None)
        if owner is not None and not inspect.isclass(owner):
            name = f"{type(owner).__name__}.{call.__name__}"
        for argument, kind in arguments.items():
            label = f"{name}({argument})"
            found.append(pytest.param(call, right, argument, kind, id=label))
    return found


def refusal(call: Callable[..., Any], right: dict[str, Any], argument: str, value: Any) -> Any:
    """What came out: the exception, or the result."""
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call(**{**right, argument: value})
        except Exception as error:
            result = error
    took = time.monotonic() - started
    assert took < 5, f"{argument}={value!r} took {took:.0f} s"
    return result


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(("call", "right", "argument", "kind"), cases())
def test_bad_values_are_refused_in_one_line_that_names_them(
    call: Callable[..., Any], right: dict[str, Any], argument: str, kind: Argument
) -> None:
    call(**right)
    wrong = []
    for expected, values in ((TypeError, kind.types), (ValueError, kind.values)):
        for value in values:
            found = refusal(call, right, argument, value)
            text = str(found)
            fine = (
                type(found) is expected
                and re.search(rf"\b{argument}\b", text)
                and "\n" not in text
                and len(text) < 1200
            )
            if not fine:
                shown = f"{type(found).__name__}: {text[:200]}"
                wrong.append(f"{argument}={value!r:.60}: {expected.__name__} expected, got {shown}")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.sample(every=5)
@pytest.mark.parametrize(
    ("call", "right", "argument", "kind"),
    [case for case in cases() if case.values[3].respell and case.values[2] in case.values[1]],
)
def test_numbers_of_numpy_and_torch_are_numbers(
    call: Callable[..., Any], right: dict[str, Any], argument: str, kind: Argument
) -> None:
    plain = call(**right)
    for respell in kind.respell:
        found = call(**{**right, argument: respell(right[argument])})
        if hasattr(type(plain), "__dataclass_fields__") and not isinstance(
            plain, dptrain.Guarantee
        ):
            mine, theirs = getattr(found, argument, None), getattr(plain, argument, None)
            assert mine == theirs
            assert type(mine) is type(theirs), respell
