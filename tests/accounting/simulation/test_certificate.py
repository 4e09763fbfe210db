"""Certificates of σ against a mechanism with a known δ, and files that say something else."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import pytest

from dptrain.accounting import accountant_named, restate
from dptrain.accounting.losses import gaussian
from dptrain.accounting.simulation.certificate import STEP, declared_points
from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.core import Guarantee
from dptrain.core.json_value import digest
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep
from dptrain.strategies import Identity
from tests.oracles.edited_json import edited, leaves, others

# One step, taken with p = .1: (1-p) N(0, σ²) + p N(1, σ²) against N(0, σ²).
SAMPLED = MatrixMechanism(
    scheme=MinSep(probability=0.1, min_sep=1, steps=1, dataset_size=20),
    strategy=Identity(),
    noise_multiplier=1.0,
)


def sampled_delta(epsilon: float, sigma: float) -> float:
    """δ of SAMPLED in the remove direction, the larger one: (P - e^ε Q)_+ = p (N - e^{ε'} Q)_+."""
    shifted = math.log1p(math.expm1(epsilon) / 0.1)
    return 0.1 * float(gaussian.delta(shifted, 1 / sigma))


def calibrated(*, epsilon: float = 1.0, delta: float = 0.02, **options: object) -> Guarantee:
    who = MinSepAnyMatrix(**{"seed": 5, "threads": 2, "progress": False, **options})  # type: ignore[arg-type]
    return who.calibrate(SAMPLED, epsilon=epsilon, delta=delta)


def certify(**changes: object) -> dict:
    found = calibrated(**changes).certificate  # type: ignore[arg-type]
    assert found is not None
    return found


def test_certified_noise_is_sufficient_and_not_wasteful() -> None:
    certificate = certify()
    sigma = certificate["noise_multiplier"]
    # Insufficient with probability ≤ q.
    assert certificate["failure_probability"] == pytest.approx(2e-5)
    assert sampled_delta(1.0, sigma) <= certificate["violated"] < 0.02
    assert sampled_delta(1.0, sigma / STEP**6) > 0.7 * 0.02
    assert sigma < 0.9 * certificate["ceiling"]
    assert certificate["ceiling"] == pytest.approx(
        1.0 / gaussian.largest_mu(1.0, certificate["violated"]), rel=2e-3
    )
    assert certificate["delta_proved"] <= 0.02
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


def test_declared_points_begin_with_the_most_private() -> None:
    assert declared_points(9) == [7, 9]
    assert declared_points(2) == [2]
    assert declared_points(0) == []


def test_cache_returns_the_first_certificate(tmp_path: pathlib.Path) -> None:
    first = certify(cache=tmp_path / "new")
    assert certify(cache=tmp_path / "new", seed=77) == first
    assert certify(cache=tmp_path / "new", delta=0.03)["request"] != first["request"]
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize(
    "damage", ["text", "noise", "count", "mean", "request", "field", "remove", "add"]
)
def test_corrupt_cache_is_an_error_naming_the_file(tmp_path: pathlib.Path, damage: str) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    row = certificate["grid"][0]
    assert row["accepted"]
    if damage == "noise":
        certificate["noise_multiplier"] *= 0.99
    elif damage == "count":
        row["remove"]["samples"] -= 9
    elif damage == "mean":
        row["remove"]["mean"] = 0.021
    elif damage == "request":
        certificate["request"]["epsilon"] = 2.0
    elif damage == "field":
        del certificate["grid"]
    elif damage in row:
        row[damage] = None
    path.write_text("{" if damage == "text" else json.dumps(certificate))
    with pytest.raises(ValueError, match=r"corrupt certificate.*delete the file") as error:
        certify(cache=tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("changes", [{"epsilon": -1.0}, {"epsilon": math.inf}, {"delta": 0.0}])
def test_bad_targets_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        certify(**changes)


def _forged(path: pathlib.Path, value: dict) -> None:
    """A file with a digest that matches, as whoever edits it can write."""
    value = {key: item for key, item in value.items() if key != "digest"}
    path.write_text(json.dumps({**value, "digest": digest(value)}))


@pytest.mark.parametrize("changes", [{"ceiling": 0.009}, {"ceiling": 0.009, "violated": 0.9}])
def test_a_fresh_digest_does_not_lower_the_ceiling(tmp_path: pathlib.Path, changes: dict) -> None:
    certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_text())
    _forged(path, {**kept, **changes, "grid": [], "noise_multiplier": 0.009})
    with pytest.raises(ValueError, match="corrupt certificate"):
        certify(cache=tmp_path)


# What only the samples can tell: the means, and the seed and the number that they follow from.
TRUSTED = {"mean", "seed", "most", "digest"}


@pytest.mark.slow
def test_every_edit_of_what_can_be_computed_again_is_noticed(tmp_path: pathlib.Path) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    tried = 0
    for place, leaf in leaves(certificate):
        if TRUSTED & set(place):
            continue
        for other in others(leaf):
            if other == leaf and (place[0] != "grid" or type(other) is type(leaf)):
                continue  # 1 for true, where nothing but a comparison reads it
            if place[-1] == "samples" and isinstance(other, int) and abs(other - leaf) == 1:
                continue  # another machine's last digits round otherwise
            _forged(path, edited(certificate, place, other))
            with pytest.raises(ValueError, match="corrupt certificate"):
                certify(cache=tmp_path)
            tried += 1
    assert tried > 100


def test_recheck_draws_the_verdicts_again(tmp_path: pathlib.Path) -> None:
    certificate = certify(cache=tmp_path)
    (path,) = tmp_path.iterdir()
    assert certify(cache=tmp_path, recheck=True) == certificate
    # A forger's verdict: smaller means. Only its samples tell.
    forged = json.loads(json.dumps(certificate))
    for row in forged["grid"]:
        row["remove"]["mean"] /= 2
    _forged(path, forged)
    assert certify(cache=tmp_path)["noise_multiplier"] == certificate["noise_multiplier"]
    with pytest.raises(ValueError, match="its seed gives other verdicts at point"):
        certify(cache=tmp_path, recheck=True)


def test_a_certificate_is_read_by_its_own_most_samples(tmp_path: pathlib.Path) -> None:
    """Whoever allows fewer samples, or more, reads and draws again what another one made."""
    few = certify(max_samples=3500)
    assert few["most"] == 3500
    used = {row[side]["samples"] for row in few["grid"] for side in ("remove", "add")}
    assert max(used) == 3500  # the last look is where they end
    assert certify(max_samples=3500, cache=tmp_path) == few
    for most in (10, 3000, 10**9):
        assert certify(max_samples=most, cache=tmp_path) == few
        assert certify(max_samples=most, cache=tmp_path, recheck=True) == few
    assert restate(calibrated(max_samples=3500)).certificate == few
    (path,) = tmp_path.iterdir()
    for most in (0, 3500.0, "3500", None):
        _forged(path, {**few, "most": most})
        with pytest.raises(ValueError, match="corrupt certificate"):
            certify(cache=tmp_path)
    _forged(path, {**few, "most": 3501})
    with pytest.raises(ValueError, match="its seed gives other verdicts at point"):
        certify(cache=tmp_path, recheck=True)


def test_a_confidence_statement_is_made_again_with_its_own_most_samples() -> None:
    member = MinSepAnyMatrix(seed=5, threads=2, progress=False, max_samples=20_000)
    stated = member.guarantee(SAMPLED, delta=0.02)
    assert stated.certificate is not None
    assert stated.certificate["most"] == 20_000
    assert restate(stated) == stated


def former(request: dict) -> dict:
    """A certificate as the simulation without weights wrote them at first."""
    return {"request": {**request, "method": 3, "samples": 5350, "threshold": 0.01}, "grid": []}


def test_a_certificate_of_the_first_format_is_no_answer_and_no_silence(tmp_path) -> None:
    found = calibrated()
    assert found.certificate is not None
    old = former(found.certificate["request"])
    path = tmp_path / f"certificate-{digest(old['request'])}.json"
    path.write_text(json.dumps(old))
    with pytest.raises(ValueError, match=r"no longer has.*delete it") as error:
        calibrated(cache=tmp_path)
    assert str(path) in str(error.value)
    calibrated(cache=tmp_path, epsilon=1.1)  # another question
    path.unlink()
    calibrated(cache=tmp_path)
    for certificate in (old, {"threshold": 0.01, "samples": 3000, "seed": "1"}):
        stated = dataclasses.replace(found, certificate=certificate)
        with pytest.raises(ValueError, match="verify it with the version that made it"):
            restate(stated)
    assert restate(found) == found


def test_a_certificate_of_an_earlier_version_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    """Version 2 of often cut b-min-sep sampling named an engine in its law, and now none."""
    found = calibrated()
    assert found.certificate is not None
    request = dict(found.certificate["request"])
    request["method"] = {**request["method"], "version": 2}
    request["law"] = {**request["law"], "engine": "numpy"}
    old = {**found.certificate, "request": request, "method": request["method"]}
    path = tmp_path / f"certificate-{digest(request)}.json"
    _forged(path, old)
    with pytest.raises(ValueError, match=r"no longer has.*delete it") as error:
        calibrated(cache=tmp_path)
    assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="verify it with the version that made it"):
        restate(dataclasses.replace(found, certificate=old))


def test_names_of_accountants_without_weights_find_who_answers_now() -> None:
    """What they stated is refused by its certificate."""
    for gone, now in (
        ("min-sep-monte-carlo", "min-sep-importance"),
        ("truncated-min-sep-monte-carlo", "min-sep-importance"),
        ("balls-in-bins-monte-carlo", "balls-in-bins-importance"),
        ("allocation-monte-carlo", "allocation-importance"),
        ("user-min-sep-monte-carlo", "user-min-sep-importance"),
        ("exposed-steps", "user-min-sep-importance"),
        ("exposed-steps-importance", "user-min-sep-importance"),
    ):
        assert accountant_named(gone).name == now
