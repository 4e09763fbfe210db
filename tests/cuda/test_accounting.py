"""The accountant's torch engine on a GPU: losses of its own draws, and δ within its bars."""

import math

import pytest
import torch

from dptrain import BandMF
from dptrain.accounting.min_sep import engine_torch
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.poisson import PoissonPLD
from tests.accounting.min_sep.moments.test_tilted import AS_MIN_SEP, KNOWN
from tests.accounting.min_sep.test_engine_compiled_replayed import LAWS, source, tensor_normals
from tests.accounting.min_sep.test_engine_torch_tilted import (
    check_held_losses,
    check_losses_of_given_copies,
    check_mean,
    needs_numba,
)
from tests.cuda.devices import needs_gpu


@pytest.mark.parametrize("name", ["warm", "odd block"])
def test_normals_of_the_engine(name, device):
    """Moments of the draws, six standard errors."""
    words = engine_torch._Words.seeded(source(9), device)
    z = tensor_normals(LAWS[name], words, torch.zeros(4000, dtype=torch.bool, device=device))
    count = z.size
    assert abs(z.mean()) < 6 / math.sqrt(count)
    assert abs((z**2).mean() - 1) < 6 * math.sqrt(2 / count)
    assert abs((z**4).mean() - 3) < 6 * math.sqrt(96 / count)


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
@needs_numba
@pytest.mark.parametrize("epsilon", [0.05, 2.0])
def test_delta_by_the_gpu_is_that_of_the_cpu(epsilon):
    """Of one copy and of several, as both engines see it: within six standard errors."""
    law = MinSepLaw(
        coefficients=BandMF(bands=3).bind(30).first_column(30)[:3],
        probability=0.2,
        min_sep=3,
        steps=30,
        warm_start=True,
    )
    found = []
    for asked in ("auto", "cuda"):
        terms = TiltedMinSep(MinSepRenyiCurve(law), 1.5, asked).remove(epsilon)
        drawn = terms.draw(source(13), 200_000)
        found.append((drawn.mean(), drawn.std() / math.sqrt(drawn.size)))
    (one, first), (other, second) = found
    assert abs(one - other) < 6 * math.hypot(first, second)
