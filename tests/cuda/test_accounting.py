"""The accountant's torch engine on a GPU: losses of its own draws, and δ within its bars."""

import math

import numpy as np
import pytest

from dptrain import BandMF, MatrixMechanism, MinSep
from dptrain.accounting.min_sep import engine_compiled, engine_torch
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.min_sep_losses import MinSepLosses, log_ratio
from dptrain.accounting.min_sep.renyi import MinSepRenyiCurve
from dptrain.accounting.poisson import PoissonPLD
from dptrain.accounting.simulation.simulation import DIRECTIONS
from tests.accounting.min_sep.test_min_sep_engines import LAWS, dense, replayed_tensors, source
from tests.accounting.min_sep.test_tilted_device import (
    check_held_losses,
    check_losses_of_given_copies,
    check_mean,
    needs_numba,
)
from tests.accounting.min_sep.test_tilted_draws import AS_MIN_SEP, KNOWN
from tests.cuda.devices import needs_gpu


@pytest.mark.parametrize("name", sorted(LAWS))
def test_losses_are_those_of_the_draws(name, device):
    """In float64, by the recursion of the reference on a dense matrix times the same draws."""
    law, size, sigmas = LAWS[name], 70, [0.02, 0.3, 1.0, 3.0]
    x, z = replayed_tensors(law, 5, size, device)
    losses = engine_torch.sample(law, sigmas, DIRECTIONS, source(5), size, device=device)
    for index, sigma in enumerate(sigmas):
        remove = log_ratio(law, sigma, dense(law) @ x + sigma * z)
        add = -log_ratio(law, sigma, sigma * z)
        bound = engine_compiled.rounding_bound(law, sigma)
        for got, exact in ((losses[0, index], remove), (losses[1, index], add)):
            reference = 1e-15 * law.steps * (1.0 + abs(exact))
            assert (got >= exact - reference).all()
            assert (got <= exact + 2.0 * bound + reference).all()


@pytest.mark.parametrize("name", ["warm", "odd block"])
def test_normals_of_the_engine(name, device):
    """Moments of the draws, six standard errors; and participations at their distance."""
    law, size = LAWS[name], 4000
    x, z = replayed_tensors(law, 9, size, device)
    count = z.size
    assert abs(z.mean()) < 6 / math.sqrt(count)
    assert abs((z**2).mean() - 1) < 6 * math.sqrt(2 / count)
    assert abs((z**4).mean() - 3) < 6 * math.sqrt(96 / count)
    for lane in range(100):
        assert (np.diff(np.flatnonzero(x[:, lane])) >= law.min_sep).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_mean_ratios_are_one(direction, device):
    """E[exp(-loss)] = 1 in either direction, whatever draws; six standard errors."""
    law, size = LAWS["cold"], 20_000
    losses = engine_torch.sample(law, [3.0], (direction,), source(11), size, device=device)
    ratios = np.exp(-losses[0, 0])
    assert abs(ratios.mean() - 1) < 6 * ratios.std() / math.sqrt(size) + 1e-6


@pytest.mark.parametrize("sigma", [0.05, 1.0])
@pytest.mark.parametrize("name", sorted(LAWS))
def test_weighted_losses_are_those_of_given_copies_and_noise(name, sigma, device):
    """Several copies, some at one step, and the normals of the engine's own words."""
    check_losses_of_given_copies(LAWS[name], sigma, 3, device)


@pytest.mark.parametrize("name", ["warm", "many bands"])
def test_losses_where_a_direction_is_held(name, device):
    """By the rows of the compiled engine on the normals of the engine's own words."""
    check_held_losses(LAWS[name], device)


@needs_numba
@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_weighted_terms_average_to_a_known_delta(epsilon, device):
    """Six standard errors, in both directions: participations by compiled code."""
    known = PoissonPLD().profile(KNOWN, [epsilon, 6.5])
    tilted = TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2, "cuda", device=device)
    check_mean(tilted.remove(epsilon), known.remove[0], 0.05)
    if epsilon < AS_MIN_SEP.add_limit:
        check_mean(tilted.add(epsilon), known.add[0], 0.05)


@needs_gpu
def test_a_guarantee_by_the_gpu_is_that_of_the_cpu():
    """δ of a program, as both engines see it: the difference is within six standard errors."""
    scheme = MinSep(probability=0.2, min_sep=3, dataset_size=1000, steps=30)
    mechanism = MatrixMechanism(scheme=scheme, strategy=BandMF(bands=3), noise_multiplier=1.5)
    strategy = mechanism.strategy.bind(30)
    law = MinSepLaw(
        coefficients=strategy.first_column(30)[:3],
        probability=0.2,
        min_sep=3,
        steps=30,
        warm_start=scheme.warm_start,
    )
    size, found = 200_000, []
    for engine in ("numpy", "cuda"):
        losses = MinSepLosses(law, engine=engine).draw([1.5], "remove", source(13), size)
        terms = np.maximum(-np.expm1(1.0 - losses[0]), 0.0)
        found.append((terms.mean(), terms.std() / math.sqrt(size)))
    (one, first), (other, second) = found
    assert abs(one - other) < 6 * math.hypot(first, second)
