"""Certificates of σ against mechanisms with a known δ."""

from __future__ import annotations

import json
import math
import pathlib

import numpy as np
import pytest

from dptrain.accounting.losses import gaussian
from dptrain.accounting.min_sep.law import MinSepLaw
from dptrain.accounting.min_sep.losses import MinSepLosses
from dptrain.accounting.simulation.certificate import certify_noise
from dptrain.accounting.simulation.confidence import (
    Verdict,
    failure_probability,
    overall_delta,
    samples_needed,
)
from dptrain.accounting.simulation.declaration import STEP, declare_grid
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.core.json_value import digest
from tests.oracles.edited_json import edited, leaves, others
from tests.oracles.verdict_rows import verify_grid

# One step, always taken: N(1, σ²) against N(0, σ²), whose δ is known in closed form.
GAUSSIAN = MinSepLosses(
    MinSepLaw(coefficients=np.ones(1), probability=1.0, min_sep=1, steps=1, warm_start=False)
)
# One step, taken with p = .1: (1-p) N(0, σ²) + p N(1, σ²) against N(0, σ²).
SAMPLED = MinSepLosses(
    MinSepLaw(coefficients=np.ones(1), probability=0.1, min_sep=1, steps=1, warm_start=False)
)


def sigma_of(epsilon: float, delta: float) -> float:
    return 1.0 / gaussian.largest_mu(epsilon, delta)


def sampled_delta(epsilon: float, sigma: float) -> float:
    """δ of SAMPLED in the remove direction, the larger one: (P - e^ε Q)_+ = p (N - e^{ε'} Q)_+."""
    shifted = math.log1p(math.expm1(epsilon) / 0.1)
    return 0.1 * float(gaussian.delta(shifted, 1 / sigma))


def verdicts(sigmas: list[float], verdict: Verdict, seed: int = 1, epsilon: float = 1.0) -> list:
    return verify_grid(GAUSSIAN, sigmas, epsilon=epsilon, verdict=verdict, seed=seed)


def test_clear_cases_are_decided_rightly() -> None:
    verdict = overall_delta(0.01, 20_000)
    # δ = 3δ' is accepted, and δ = δ'/3 rejected, with probability below 1e-20 (Chernoff).
    bad, good, better = (sigma_of(1.0, 0.01 * k) for k in (3, 1 / 3, 1 / 5))
    rows = verdicts([bad, good, better], verdict)
    assert [row["accepted"] for row in rows] == [False, True, True]
    assert rows[0]["remove"]["accepted"] is False
    assert rows[0]["remove"]["samples"] < verdict.samples  # rejected early
    # Both directions read the same samples, and end with the first rejection in either.
    assert rows[0]["add"]["samples"] == rows[0]["remove"]["samples"]
    assert rows[0]["add"]["accepted"] is not True
    for row in rows[1:]:
        for direction in DIRECTIONS:
            # 6 sigma, with variance at most the mean (values in [0, 1]).
            true = float(gaussian.delta(1.0, 1 / row["noise_multiplier"]))
            assert abs(row[direction]["mean"] - true) < 6 * math.sqrt(true / verdict.samples)
            assert row[direction]["samples"] == verdict.samples


def test_a_larger_noise_that_is_rejected_rules_out_the_smaller() -> None:
    verdict = overall_delta(0.01, 20_000)
    good, bad = sigma_of(1.0, 0.003), sigma_of(1.0, 0.03)
    # verify_grid trusts the order it is given: here the "larger" entry is the bad one.
    rows = verdicts([good, bad], verdict)
    assert [row["accepted"] for row in rows] == [False, False]
    assert rows[0]["remove"]["accepted"] is None


def test_false_acceptance_stays_below_q() -> None:
    threshold, violated, samples = 0.05, 0.10, 60
    q = failure_probability(threshold, violated, samples)
    assert 0.3 < q < 0.45
    verdict = Verdict(samples, threshold, violated, q, 1.0)
    sigma = sigma_of(1.0, violated)  # largest μ is rounded down: δ is δ_v to 1e-9
    attempts = 400
    wrong = sum(verdicts([sigma], verdict, seed)[0]["accepted"] for seed in range(attempts))
    assert wrong <= attempts * q + 6 * math.sqrt(attempts * q * (1 - q))  # 6 sigma


def certify(**changes: object) -> dict:
    arguments = dict(epsilon=1.0, delta=0.02, seed=5, threads=2, progress=False)
    return certify_noise(SAMPLED, **{**arguments, **changes})  # type: ignore[arg-type]


def test_certified_noise_is_sufficient_and_not_wasteful() -> None:
    certificate = certify()
    sigma = certificate["noise_multiplier"]
    # Insufficient with probability ≤ q.
    assert certificate["failure_probability"] < 1e-3
    assert sampled_delta(1.0, sigma) <= certificate["violated"] < 0.02
    # At 1.01^6 times this σ, δ would be below .7 δ', which is rejected with probability
    # exp(-s·KL(δ'‖.7δ')) < 2e-3; the seed is fixed.
    assert sampled_delta(1.0, sigma / STEP**6) > 0.7 * 0.01
    assert sigma < 0.9 * certificate["ceiling"]["noise_multiplier"]
    assert certificate["ceiling"]["noise_multiplier"] == sigma_of(1.0, certificate["violated"])
    assert certificate["delta_proved"] <= 0.02
    assert certificate["request"]["samples"] == samples_needed(0.02).samples
    assert certificate["seed"] == "5"


def test_a_certificate_of_several_attempts_counts_them_and_answers_one(tmp_path) -> None:
    found = certify(attempts=3, cache=tmp_path)
    q, violated = found["failure_probability"], found["violated"]
    assert violated + 3 * q * (1 - violated) <= found["delta_proved"] <= 0.02
    assert sampled_delta(1.0, found["noise_multiplier"]) <= violated
    assert found["request"]["attempts"] == 3
    # Fewer attempts for the same purpose are counted as well; more are not.
    assert certify(cache=tmp_path, seed=None) == found
    assert certify(attempts=2, cache=tmp_path, seed=None) == found
    assert certify(attempts=4, cache=tmp_path)["request"]["attempts"] == 4
    # One that was made for a single attempt is no answer to several.
    (other := tmp_path / "other").mkdir()
    certify(cache=other)
    assert "attempts" not in certify(cache=other)["request"]
    assert certify(attempts=2, cache=other)["request"]["attempts"] == 2


def test_certificate_is_json_and_independent_of_threads() -> None:
    one, many = certify(threads=1), certify(threads=3)
    assert json.loads(json.dumps(one, allow_nan=False)) == one == many
    assert certify(seed=6)["grid"] != one["grid"]
    fresh = {certify(seed=None)["seed"] for _ in range(2)}
    assert len(fresh) == 2


def test_the_estimate_and_the_verification_share_no_stream() -> None:
    from dptrain.accounting.simulation import declaration as module

    assert module.ESTIMATE != module.VERIFY
    states = {
        tuple(np.random.SeedSequence([9, *key], spawn_key=(0,)).generate_state(4))
        for key in [(0, 0), (0, 1), (0, 2), (0, 199), (1,), (2,), (3,)]
    }
    assert len(states) == 7


def test_declared_grid_is_powers_below_the_ceiling() -> None:
    grid = declare_grid(2.0, 2.05)
    assert grid == sorted(grid)
    assert all(STEP**k < 2.05 for k in grid)
    assert abs(STEP ** grid[1] / 2.0 - 1) < 0.006
    assert declare_grid(2.0, 1.0) == []


def test_cache_returns_the_first_certificate(tmp_path: pathlib.Path) -> None:
    first = certify(cache=tmp_path / "new")
    assert certify(cache=tmp_path / "new", seed=77) == first
    assert certify(cache=tmp_path / "new", delta=0.03)["request"] != first["request"]
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize("damage", ["text", "noise", "count", "mean", "request", "field"])
def test_corrupt_cache_is_an_error_naming_the_file(tmp_path: pathlib.Path, damage: str) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    row = certificate["grid"][-1]
    assert row["accepted"]
    if damage == "noise":
        certificate["noise_multiplier"] *= 0.99
    elif damage == "count":
        row["add"]["samples"] -= 1
    elif damage == "mean":
        row["add"]["mean"] = 0.011
    elif damage == "request":
        certificate["request"]["epsilon"] = 2.0
    elif damage == "field":
        del certificate["grid"]
    path.write_text("{" if damage == "text" else json.dumps(certificate))
    with pytest.raises(ValueError, match=r"corrupt certificate.*delete the file") as error:
        certify(cache=tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("changes", [{"epsilon": -1.0}, {"epsilon": math.inf}, {"delta": 0.0}])
def test_bad_targets_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        certify(**changes)


def test_a_lowered_ceiling_is_an_error(tmp_path: pathlib.Path) -> None:
    certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    # Consistent in itself: the ceiling needs no verdicts.
    lower = {"ceiling": {**kept["ceiling"], "noise_multiplier": 0.1}, "noise_multiplier": 0.1}
    path.write_text(json.dumps({**kept, **lower, "grid": []}))
    with pytest.raises(ValueError, match=r"corrupt certificate.*digest"):
        certify(cache=tmp_path)


def _forged(path: pathlib.Path, value: dict) -> None:
    """A file with a digest that matches, as whoever edits it can write."""
    value = {key: item for key, item in value.items() if key != "digest"}
    path.write_text(json.dumps({**value, "digest": digest(value)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"ceiling": {"noise_multiplier": 0.009, "shown_by": "unamplified Gaussian mechanism"}},
        {"ceiling": {"noise_multiplier": 0.009, "shown_by": "unamplified Gaussian mechanism"},
         "violated": 0.9},
        {"estimate": 0.009},
    ],
)  # fmt: skip
def test_a_fresh_digest_does_not_lower_the_ceiling(tmp_path: pathlib.Path, changes: dict) -> None:
    certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    _forged(path, {**kept, **changes, "grid": [], "noise_multiplier": 0.009})
    with pytest.raises(ValueError, match="corrupt certificate"):
        certify(cache=tmp_path)


def test_a_fresh_digest_moves_no_point_of_the_grid(tmp_path: pathlib.Path) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    for rename in (False, True):
        forged = json.loads(json.dumps(certificate))
        row = forged["grid"][-1]
        row["noise_multiplier"] = forged["noise_multiplier"] = 0.009
        if rename:
            row["exponent"] = round(math.log(0.009) / math.log(STEP))
        forged["grid"] = [row]
        _forged(path, forged)
        with pytest.raises(ValueError, match="corrupt certificate"):
            certify(cache=tmp_path)


# What only the samples can tell, and what is a record.
TRUSTED = {"mean", "versions", "seed", "digest", "estimate"}


def test_every_edit_of_what_can_be_computed_again_is_noticed(tmp_path: pathlib.Path) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    tried = 0
    for place, leaf in leaves(certificate):
        row = certificate["grid"][place[1]] if place[0] == "grid" else None
        verdict = row is not None and (place[-1] == "mean" or not row["accepted"])
        if TRUSTED & set(place) or (verdict and place[-1] not in ("exponent", "noise_multiplier")):
            continue
        for other in others(leaf):
            if other == leaf and type(other) is type(leaf):
                continue
            _forged(path, edited(certificate, place, other))
            with pytest.raises(ValueError, match="corrupt certificate"):
                certify(cache=tmp_path)
            tried += 1
    assert tried > 100


def test_recheck_draws_the_verdicts_again(tmp_path: pathlib.Path) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    assert certify(cache=tmp_path, recheck=True) == certificate
    # A forger's verdict: the first rejected σ passes. Only its samples tell.
    forged = json.loads(json.dumps(certificate))
    row = next(row for row in reversed(forged["grid"]) if not row["accepted"])
    row["accepted"], forged["noise_multiplier"] = True, row["noise_multiplier"]
    passed = {"mean": 1e-3, "samples": forged["request"]["samples"], "accepted": True}
    row["remove"] = row["add"] = passed
    _forged(path, forged)
    assert certify(cache=tmp_path)["noise_multiplier"] < certificate["noise_multiplier"]
    with pytest.raises(ValueError, match="its seed gives other verdicts at exponent"):
        certify(cache=tmp_path, recheck=True)
    _forged(path, {**certificate, "versions": {"numpy": "0.1", "torch": "0.2"}})
    with pytest.raises(ValueError, match="cannot be drawn again"):
        certify(cache=tmp_path, recheck=True)
