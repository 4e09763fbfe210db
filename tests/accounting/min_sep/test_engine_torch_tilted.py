"""Weighted samples of b-min-sep sampling on a torch device; the CPU stands in for a GPU."""

from __future__ import annotations

import functools
import importlib.util
import math

import numpy as np
import pytest
import torch

from dptrain.accounting.min_sep import MinSepImportance, engine_torch
from dptrain.accounting.min_sep import engine_compiled as compiled
from dptrain.accounting.min_sep import law as laws
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.importance_terms import TiltedMinSep
from dptrain.accounting.min_sep.pair import MinSepLaw
from dptrain.accounting.min_sep.recursion import log_ratio
from dptrain.accounting.poisson import PoissonPLD
from tests.accounting.min_sep import test_min_sep_bounds as bounds
from tests.accounting.min_sep.moments.test_tilted import AS_MIN_SEP, KNOWN, LONG, SIGMA
from tests.accounting.min_sep.test_engine_compiled_held_direction import held
from tests.accounting.min_sep.test_engine_compiled_replayed import (
    LAWS,
    dense,
    make_law,
    source,
    tensor_normals,
)

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")
WITHOUT_GPU = r"engine='cuda': torch finds no CUDA device; use engine='auto'"


def on_cpu(law: MinSepLaw, sigma: float) -> TiltedMinSep:
    return TiltedMinSep(MinSepRenyiCurve(law), sigma, "cuda", device="cpu")


def some_copies(law: MinSepLaw, order: int, size: int) -> np.ndarray:
    """Counts of copies that take part, shape (n, size): gaps of b or more, often at one step."""
    rng, counts = np.random.default_rng(order), np.zeros((law.steps, size))
    for lane in range(size):
        for _ in range(order):
            at = int(rng.integers(0, law.min_sep))
            while at < law.steps:
                counts[at, lane] += 1.0
                at += law.min_sep + int(rng.integers(0, 2))
    return counts


def events(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each participation by itself, in no order."""
    found = [(t, lane) for t, lane in np.argwhere(counts > 0) for _ in range(int(counts[t, lane]))]
    times, lanes = np.random.default_rng(1).permutation(np.array(found, dtype=np.int64)).T
    return times, lanes


def check_losses_of_given_copies(law: MinSepLaw, sigma: float, order: int, device: str) -> None:
    counts = some_copies(law, order, 70)
    assert counts.max() > 1
    check_losses(law, sigma, order, counts, device)


def check_losses(law: MinSepLaw, sigma: float, order: int, counts: np.ndarray, device: str) -> None:
    size = counts.shape[1]
    losses = engine_torch.tilted_losses(
        law, sigma, *events(counts), source(5), size, copies=order, device=device
    )
    words = engine_torch._Words.seeded(source(5), device)
    z = tensor_normals(law, words, torch.zeros(size, dtype=torch.bool, device=device))
    exact = log_ratio(law, sigma, dense(law) @ counts + sigma * z)
    reference = 1e-15 * law.steps * (1.0 + np.abs(exact))
    bound = compiled.rounding_bound(law, sigma, copies=order)
    assert (np.abs(losses - exact) <= bound + reference).all()


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("name", sorted(LAWS))
def test_losses_are_those_of_given_copies_and_noise(name: str, order: int) -> None:
    # σ from where only the logarithmic recursion is safe.
    for sigma in (0.05, 0.3, 1.0, 3.0):
        check_losses_of_given_copies(LAWS[name], sigma, order, "cpu")
    assert compiled.rounding_bound(LAWS[name], 1.0, copies=order) < 1e-7


def test_as_many_copies_as_would_overflow_a_recursion_made_for_one() -> None:
    # One copy of exponents of 12/σ + 2.5/σ² = 68 leaves three rows between two renewals of the
    # scale; three rows of 30 copies, 30/σ² = 333 each, exceed what float64 holds, e^709.
    law = make_law([1.0], 0.4, 1, 30)
    assert compiled.interval(law, 0.3) == 3
    check_losses(law, 0.3, 30, np.full((30, 5), 30.0), "cpu")


def test_nobody_may_have_taken_part() -> None:
    law, none = LAWS["warm"], np.empty(0, dtype=np.int64)
    losses = engine_torch.tilted_losses(law, 1.0, none, none, source(5), 20, copies=2, device="cpu")
    words = engine_torch._Words.seeded(source(5), "cpu")
    z = tensor_normals(law, words, torch.zeros(20, dtype=torch.bool))
    np.testing.assert_allclose(losses, log_ratio(law, 1.0, z), atol=1e-10)


def check_held_losses(law: MinSepLaw, device: str) -> None:
    unit = np.linspace(0.5, 2.0, law.steps)
    unit /= np.linalg.norm(unit)
    along = np.linspace(-6.0, 6.0, 70)
    losses = engine_torch.losses_along(law, SIGMA, unit, source(5), along, device=device)
    words = engine_torch._Words.seeded(source(5), device)
    free = tensor_normals(law, words, torch.zeros(70, dtype=torch.bool, device=device))
    z = held(free, unit, along)
    np.testing.assert_allclose(unit @ z, along, atol=1e-12)
    exact = -log_ratio(law, SIGMA, SIGMA * z)
    bound = compiled.rounding_bound(law, SIGMA, held=compiled.held_error(unit))
    reference = 1e-15 * law.steps * (1.0 + np.abs(exact))
    assert (losses >= exact - reference).all()
    assert (losses <= exact + 2.0 * bound + reference).all()


@pytest.mark.parametrize("name", ["warm", "odd block", "many bands", "shorter than its bands"])
def test_held_losses_are_those_of_the_noise(name: str) -> None:
    check_held_losses(LAWS[name], "cpu")


def test_what_lies_outside_of_the_proof_counts_as_a_loss_of_infinity() -> None:
    law = LAWS["warm"]
    unit = np.zeros(law.steps)
    unit[0] = 1.0
    along = np.array([0.0, 1.01 * compiled.LARGEST_HELD])
    losses = engine_torch.losses_along(law, SIGMA, unit, source(1), along, device="cpu")
    assert np.isfinite(losses[0])
    assert losses[1] == math.inf


def check_mean(terms, known: float, precise: float) -> None:
    """Mean of 40,960 terms: six standard errors, and the grid of the exact accountant."""
    rng = np.random.default_rng(7)
    drawn = np.concatenate([terms.draw(rng, 8192) for _ in range(5)])
    assert drawn.min() >= 0.0
    assert drawn.max() <= terms.ceiling * (1 + 1e-9)
    assert terms.ceiling >= known
    error = drawn.std() / math.sqrt(drawn.size)
    assert error < precise * known
    assert abs(drawn.mean() - known) <= 6 * error + 1e-4 * known


@pytest.mark.sample(every=3)
@needs_numba
@pytest.mark.parametrize("epsilon", [1.0, 6.0])
def test_terms_average_to_a_known_delta_and_stay_below_their_ceiling(epsilon: float) -> None:
    known = PoissonPLD().profile(KNOWN, [epsilon])
    check_mean(on_cpu(AS_MIN_SEP, 1.2).remove(epsilon), known.remove[0], 0.05)


def test_terms_of_the_add_direction_average_to_a_known_delta() -> None:
    known = PoissonPLD().profile(KNOWN, [0.5])
    check_mean(on_cpu(AS_MIN_SEP, 1.2).add(0.5), known.add[0], 0.05)


@needs_numba
@pytest.mark.parametrize("engine", ["auto", "cuda"])
@pytest.mark.parametrize(("epsilon", "many"), [(0.5, False), (6.0, True)])
def test_terms_of_one_and_of_many_copies_average_to_a_known_delta(engine, epsilon, many) -> None:
    known = PoissonPLD().profile(bounds.KNOWN, [epsilon])
    tilted = TiltedMinSep(MinSepRenyiCurve(bounds.AS_MIN_SEP), 1.2, engine, device="cpu")
    if not many:
        tilted._orders = []  # as if none were affordable
    order = tilted._best_order(epsilon)[0]
    assert order > 4 if many else order == 1
    check_mean(tilted.remove(epsilon), known.remove[0], 0.05)


@needs_numba
def test_compiled_code_and_tensors_draw_from_one_law() -> None:
    law, means = LONG["settled"], []
    for tilted in (TiltedMinSep(MinSepRenyiCurve(law), 1.5), on_cpu(law, 1.5)):
        terms = tilted.remove(3.0)
        drawn = np.concatenate([terms.draw(np.random.default_rng(i), 2048) for i in range(4)])
        means.append((terms.ceiling, drawn.mean(), drawn.var() / drawn.size))
    (ceiling, one, a), (same, two, b) = means
    assert ceiling == same
    assert abs(one - two) <= 6 * math.sqrt(a + b)


@needs_numba
def test_spoiled_samples_count_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = np.array([math.nan, 0.1])
    monkeypatch.setattr(engine_torch, "tilted_losses", lambda *_, **__: spoiled)
    terms = on_cpu(AS_MIN_SEP, 1.2).remove(1.0)
    drawn = terms.draw(np.random.default_rng(1), 2)
    assert drawn[0] == terms.ceiling
    assert drawn[1] < terms.ceiling


@pytest.mark.slow
@needs_numba
def test_a_certificate_names_the_engine_and_is_read_without_a_gpu(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accountant = MinSepImportance(engine="cuda", seed=1, progress=False, cache=tmp_path)
    with monkeypatch.context() as patch:
        stand_in = functools.partial(TiltedMinSep, device="cpu")
        patch.setattr(laws, "TiltedMinSep", stand_in)
        found = accountant.calibrate(bounds.mechanism(), epsilon=1.0, delta=1e-5)
    assert found.certificate["law"]["engine"] == "cuda"
    assert any(row["remove"]["samples"] for row in found.certificate["grid"])

    def nothing(*_: object) -> None:
        raise AssertionError("something is drawn")

    monkeypatch.setattr(engine_torch, "check_device", nothing)
    assert accountant.calibrate(bounds.mechanism(), epsilon=1.0, delta=1e-5) == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_drawing_without_a_gpu_is_refused_and_nothing_before() -> None:
    accountant = MinSepImportance(engine="cuda", progress=False)
    with pytest.raises(ValueError, match=WITHOUT_GPU):
        accountant.guarantee(bounds.mechanism(), delta=1e-6)
    rng = np.random.default_rng(1)
    for law in (AS_MIN_SEP, bounds.AS_MIN_SEP):
        tilted = TiltedMinSep(MinSepRenyiCurve(law), 1.2, "cuda")
        for terms in (tilted.remove(6.0), tilted.add(0.5), tilted.remove(1.0)):
            assert 0.0 < terms.ceiling <= 1.0
            with pytest.raises(ValueError, match=WITHOUT_GPU):
                terms.draw(rng, 8)


@pytest.mark.parametrize("engine", ["auto", "cuda"])
def test_samples_without_numba_are_refused(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even to read a certificate, whose terms would seem to have other ceilings."""
    monkeypatch.setattr(compiled, "available", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"dptrain\[fast\].*min-sep-renyi"):
        TiltedMinSep(MinSepRenyiCurve(AS_MIN_SEP), 1.2, engine, device="cpu")
