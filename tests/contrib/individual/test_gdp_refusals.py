"""What a filter's theorem does not cover is refused before anything is wrapped or read."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from dptrain import Adjacency, Gradients, MatrixMechanism, Poisson
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.individual import GDPFilter, GDPOdometer
from dptrain.sampling import BallsInBins, MinSep
from dptrain.strategies import BISR, BLT, BSR, BandInvMF, BandMF, Dense, Identity, Tree
from tests.engine.test_engine_schemes import SCHEMES as OTHERS
from tests.helpers.engine import wire

N, STEPS = 24, 6
FULL = Poisson(probability=1.0, dataset_size=N, steps=STEPS)
GDP = GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=50)
ODOMETER = GDPOdometer(increments=(0.5, 0.5), target_delta=1e-3, max_steps=50)


class Unread:
    """A data set of known length whose examples must not be looked at."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        raise AssertionError("an example was read before the arguments were checked")


def attempt(error, message, **options):
    """``make_private`` refuses, and module, optimizer and data are as they were."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modules, attributes = list(model.modules()), {id(p): dir(p) for p in model.parameters()}
    arguments = {
        "module": model,
        "optimizer": optimizer,
        "criterion": nn.CrossEntropyLoss(),
        "data": Unread(),
        "scheme": FULL,
        "noise_multiplier": 2.0,
        "max_grad_norm": 1.0,
        "individual": GDP,
        **options,
    }
    if "mechanism" in options:
        del arguments["scheme"], arguments["noise_multiplier"]
    for mode in ("bookkeeping", "hooks", "functorch"):
        with pytest.raises(error, match=message):
            wire(gradients=Gradients(mode=mode), **arguments)
        assert list(model.modules()) == modules
        for layer in modules:
            assert not layer._forward_hooks
            assert not layer._backward_hooks

        assert {id(p): dir(p) for p in model.parameters()} == attributes


STRATEGIES = {
    "BandMF": lambda: BandMF(bands=3),
    "BLT": lambda: BLT(),
    "BSR": lambda: BSR(bands=3),
    "BISR": lambda: BISR(inverse_bands=3),
    "BandInvMF": lambda: BandInvMF(inverse_bands=2),
    "Tree": lambda: Tree(),
    "Dense": lambda: Dense(epochs=1),
}
SCHEMES = {
    **{name: scheme for name, scheme in OTHERS.items() if type(scheme) is not Poisson},
    "BallsInBins": BallsInBins(bins=3, epochs=2, dataset_size=N),
    "MinSep": MinSep.for_batch_size(batch_size=4, dataset_size=N, min_sep=2, steps=STEPS),
}


@pytest.mark.parametrize("individual", [GDP, ODOMETER])
@pytest.mark.parametrize("name", STRATEGIES)
def test_correlated_noise(name, individual):
    message = rf"{type(individual).__name__} with strategy={name}: .*use strategy=Identity\(\)"
    attempt(ValueError, message, strategy=STRATEGIES[name](), individual=individual)


@pytest.mark.parametrize("name", SCHEMES)
def test_other_schemes(name):
    kind = type(SCHEMES[name]).__name__
    message = rf"individual=GDPFilter with scheme={kind}: .*use scheme=Poisson\(probability=1"
    attempt(ValueError, message, scheme=SCHEMES[name])


@pytest.mark.parametrize("individual", [GDP, ODOMETER])
def test_batches_that_are_cut(individual):
    """Who is cut depends on who else is drawn, also where everybody is drawn."""
    scheme = Poisson(probability=1.0, dataset_size=N, steps=STEPS, max_batch_size=4)
    message = f"{type(individual).__name__} with max_batch_size=4: .*max_batch_size=None"
    attempt(ValueError, message, scheme=scheme, individual=individual)


def test_sampled_batches():
    scheme = Poisson(probability=0.25, dataset_size=N, steps=STEPS)
    message = r"GDPFilter with Poisson\(probability=0\.25\).*RenyiFilter.*probability=1"
    attempt(ValueError, message, scheme=scheme)
    message = r"GDPOdometer with Poisson\(probability=0\.25\)"
    attempt(ValueError, message, scheme=scheme, individual=ODOMETER)


def test_a_mechanism_is_looked_at_too():
    mechanism = MatrixMechanism(
        scheme=SCHEMES["MinSep"], strategy=BandMF(bands=2), noise_multiplier=1.0
    )
    attempt(ValueError, "strategy=BandMF", mechanism=mechanism)
    silent = MatrixMechanism(scheme=FULL, strategy=Identity(), noise_multiplier=0.0)
    attempt(ValueError, "noise_multiplier=0", mechanism=silent)


def test_no_noise():
    message = "noise_multiplier=0: without noise .* set noise_multiplier > 0"
    attempt(ValueError, message, noise_multiplier=0.0)


def test_replace_one():
    other = PoissonPLD(adjacency=Adjacency.REPLACE_ONE)
    attempt(ValueError, "replace_one", accountant=other)


def test_replace_one_in_the_statement():
    """Also where an accountant of another relation finds its way to the filter."""
    mechanism = MatrixMechanism(scheme=FULL, strategy=Identity(), noise_multiplier=2.0)
    planned = PoissonPLD(adjacency=Adjacency.REPLACE_ONE).guarantee(mechanism, delta=1e-3)
    with pytest.raises(ValueError, match=r"adjacency=replace_one: .*zero_out or add_remove"):
        GDP.state(planned, GDP.record(mechanism))


def test_more_steps_than_were_bounded():
    few = GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=STEPS - 1)
    attempt(ValueError, rf"max_steps={STEPS - 1} is below the {STEPS} steps", individual=few)


def test_two_targets():
    message = "target_epsilon=3.0 with individual=: .*noise_multiplier"
    attempt(
        ValueError,
        message,
        noise_multiplier=None,
        target_epsilon=3.0,
        target_delta=1e-3,
    )


def test_no_noise_level():
    message = "no noise level with individual=: .*Set noise_multiplier=.*or mechanism="
    attempt(ValueError, message, noise_multiplier=None)


@pytest.mark.parametrize("individual", [GDPFilter, "GDPFilter", 2.0, {"type": "GDPFilter"}])
def test_what_is_no_filter(individual):
    message = r"individual=.*must be a .*IndividualFilter, not .*GDPFilter\(target_epsilon"
    attempt(TypeError, message, individual=individual)


@pytest.mark.parametrize("steps", [None, math.inf])
def test_unbounded_steps(steps):
    with pytest.raises(ValueError, match=r"max_steps=.*fixed beforehand; set one"):
        GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=steps)


@pytest.mark.parametrize("steps", [0, -3, 2.5, 10.0, True, "10", math.nan])
def test_bad_numbers_of_steps(steps):
    with pytest.raises((TypeError, ValueError), match=r"max_steps=.* (an integer, not|at least 1)"):
        GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=steps)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_bad_epsilons(epsilon):
    with pytest.raises(ValueError, match="target_epsilon="):
        GDPFilter(target_epsilon=epsilon, target_delta=1e-3, max_steps=5)


@pytest.mark.parametrize("steps", [0, -1, 2.5, math.nan, "5", None, True])
def test_bad_numbers_of_full_norm_steps(steps):
    with pytest.raises(
        (TypeError, ValueError), match=r"full_norm_steps=.* (an integer, not|at least 1)"
    ):
        GDP.noise_multiplier(steps)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_bad_deltas(delta):
    with pytest.raises(ValueError, match="target_delta="):
        GDPFilter(target_epsilon=1.0, target_delta=delta, max_steps=5)


@pytest.mark.parametrize("field", ["target_epsilon", "target_delta"])
@pytest.mark.parametrize("value", ["1", None, True, torch.tensor([0.5])])
def test_values_of_another_type(field, value):
    fields = {"target_epsilon": 1.0, "target_delta": 1e-3, "max_steps": 5, field: value}
    with pytest.raises(TypeError, match=rf"GDPFilter: {field}="):
        GDPFilter(**fields)


def test_other_numbers_are_fine():
    individual = GDPFilter(
        target_epsilon=np.float32(2), target_delta=np.float64(1e-3), max_steps=np.int64(9)
    )
    assert individual == GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=9)
    with pytest.raises(TypeError, match="full_consumption=1"):
        GDPFilter(target_epsilon=2.0, target_delta=1e-3, max_steps=9, full_consumption=1)


def test_a_delta_that_protects_nobody_is_warned_of():
    loose = GDPFilter(target_epsilon=2.0, target_delta=0.5, max_steps=50)
    mechanism = MatrixMechanism(scheme=FULL, strategy=Identity(), noise_multiplier=2.0)
    with pytest.warns(UserWarning, match=r"delta=0\.5 is not below 1/N"):
        loose.record(mechanism)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GDP.record(mechanism)
