import dataclasses
import hashlib
import subprocess
import sys

import pytest

from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, BandMF, Identity

MECHANISMS = [
    MatrixMechanism(
        scheme=Poisson(probability=0.1, dataset_size=50, steps=7),
        strategy=Identity(),
        noise_multiplier=1.25,
    ),
    MatrixMechanism(
        scheme=MinSep.for_batch_size(batch_size=5, dataset_size=100, min_sep=4, steps=30),
        strategy=BandMF(bands=3),
        noise_multiplier=0.7,
    ),
    MatrixMechanism(
        scheme=BallsInBins(bins=6, epochs=3, dataset_size=60),
        strategy=BSR(bands=4),
        noise_multiplier=3,
    ),
]
IDS = [type(m.scheme).__name__ for m in MECHANISMS]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=IDS)
def test_json_round_trip_keeps_value_and_hash(mechanism):
    again = MatrixMechanism.from_json(mechanism.to_json())
    assert again == mechanism
    assert again.hash == mechanism.hash
    assert hash(again) == hash(mechanism)
    assert again.strategy == mechanism.strategy


def test_hash_is_sha256_of_the_documented_text():
    # Written out by hand: sorted keys, no spaces, shortest floats.
    text = (
        '{"format":1,"noise_multiplier":1.25,'
        '"scheme":{"dataset_size":50,"probability":0.1,"steps":7,"type":"Poisson"},'
        '"strategy":{"type":"Identity"}}'
    )
    assert MECHANISMS[0].hash == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.slow
def test_hash_is_the_same_in_another_process():
    code = (
        "import sys; from dptrain.mechanism import MatrixMechanism as M\n"
        "for text in sys.argv[1:]: m = M.from_json(text); print(m.hash, hash(m))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, *(mechanism.to_json() for mechanism in MECHANISMS)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "123"},
    ).stdout.splitlines()
    assert out == [f"{mechanism.hash} {hash(mechanism)}" for mechanism in MECHANISMS]


def test_any_change_changes_value_and_hash():
    base = MECHANISMS[1]
    others = [
        base.with_noise(0.7000000000000001),
        dataclasses.replace(base, strategy=BandMF(bands=4)),
        dataclasses.replace(base, strategy=BSR(bands=3)),
        dataclasses.replace(base, scheme=dataclasses.replace(base.scheme, warm_start=False)),
        dataclasses.replace(base, scheme=dataclasses.replace(base.scheme, dataset_size=101)),
    ]
    for other in others:
        assert other != base
        assert other.hash != base.hash


def test_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MECHANISMS[0].noise_multiplier = 2.0


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_bad_noise(sigma):
    with pytest.raises(ValueError, match="noise_multiplier"):
        MECHANISMS[0].with_noise(sigma)


def test_bad_types_and_fields():
    with pytest.raises(TypeError, match="scheme"):
        MatrixMechanism(scheme="poisson", strategy=Identity(), noise_multiplier=1.0)
    with pytest.raises(TypeError, match="strategy"):
        MatrixMechanism(scheme=MECHANISMS[0].scheme, strategy=None, noise_multiplier=1.0)
    value = MECHANISMS[0].to_dict()
    with pytest.raises(ValueError, match="format"):
        MatrixMechanism.from_dict({**value, "format": 99})
    with pytest.raises(ValueError, match="fields"):
        MatrixMechanism.from_dict({**value, "sigma": 1.0})
    with pytest.raises(ValueError, match="Possion"):
        MatrixMechanism.from_dict({**value, "scheme": {"type": "Possion"}})
    with pytest.raises(ValueError, match="prob"):
        MatrixMechanism.from_dict({**value, "scheme": {**value["scheme"], "prob": 0.1}})


@pytest.mark.parametrize("scale", [1e-170, 1e-31, 1e31, 1e160])
def test_coefficients_whose_squares_underflow_or_overflow_are_refused(scale):
    # ‖1e-170‖ computes as 0: every noise multiplier would seem to give ε = 0.
    strategy = BandMF(bands=2, coefficients=(scale, scale / 2))
    with pytest.raises(ValueError, match=r"BandMF: column 0 .* scale its coefficients"):
        dataclasses.replace(MECHANISMS[0], strategy=strategy)
    fine = BandMF(bands=2, coefficients=(1e20, 1e-200))
    assert dataclasses.replace(MECHANISMS[0], strategy=fine).steps == 7


def test_bands_beyond_the_run_are_refused():
    with pytest.raises(ValueError, match="bands"):
        dataclasses.replace(MECHANISMS[0], strategy=BandMF(bands=8))
