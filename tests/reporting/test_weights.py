"""Released weights: read back bit for bit, with the facts of their guarantee, or refused."""

from __future__ import annotations

import builtins
import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import nn

from dptrain import Identity, Poisson
from dptrain.reporting import KEY, facts_of_weights, key_facts, save_released, write_weights
from tests.helpers.engine import images, make, small_net, train

N, STEPS = 24, 6
SCHEME = Poisson(probability=0.5, dataset_size=N, steps=STEPS)


def private_run(mode="bookkeeping", **options):
    options = {"scheme": SCHEME, "strategy": Identity(), "target_delta": 0.01, **options}
    return make(small_net(), images(N), mode, **options)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("detached", [False, True])
def test_the_weights_are_the_trained_ones_under_their_own_names(mode, detached, tmp_path):
    private = private_run(mode)
    train(private)
    if detached:
        private.detach()
    path = tmp_path / "model.safetensors"
    guarantee = save_released(private, path)
    assert guarantee == private.guarantee()
    read = small_net()
    assert load_model(read, path) == (set(), [])
    for ours, theirs in zip(
        read.state_dict().values(), private.state_dict()["module"].values(), strict=True
    ):
        assert torch.equal(ours, theirs)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_the_facts_are_in_the_file_and_no_secret_is(tmp_path):
    private = private_run(seed=918273645)
    train(private)
    path = tmp_path / "model.safetensors"
    guarantee = save_released(private, path, delta=0.02)
    assert guarantee.delta == 0.02
    facts = facts_of_weights(path)
    assert facts == key_facts(guarantee)
    assert facts["epsilon"] == guarantee.epsilon
    assert (facts["steps_executed"], facts["steps_planned"]) == (STEPS, STEPS)
    assert facts["mechanism_hash"] == private.mechanism.hash
    assert not facts["is_estimate"]
    with safe_open(path, "pt") as file:
        assert set(file.metadata()) == {"format", KEY}
    assert b"918273645" not in path.read_bytes()


def test_no_protection_is_said_to_be_none(tmp_path):
    private = private_run(noise_multiplier=0.0)
    train(private)
    save_released(private, tmp_path / "model.safetensors")
    assert math.isinf(float(facts_of_weights(tmp_path / "model.safetensors")["epsilon"]))


def test_weights_that_are_not_what_the_run_released_are_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / "model.safetensors"
    private = private_run()
    train(private)
    module = private.detach()
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="trained or changed after"):
        save_released(private, path)
    with pytest.raises(TypeError, match="private"):
        save_released(module, path)
    without = private_run(target_delta=None)
    with pytest.raises(ValueError, match="delta"):
        save_released(without, path)
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_stays_where_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    write_weights(nn.Linear(2, 2), path)
    before = path.read_bytes()

    def fails(module, name, **more):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_model", fails)
    with pytest.raises(OSError, match="no space"):
        write_weights(nn.Linear(2, 2), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_weights_without_facts_have_none(tmp_path):
    write_weights(nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert facts_of_weights(tmp_path / "model.safetensors") is None


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    own = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("safetensors"):
            raise ImportError(f"No module named {name!r}")
        return own(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"dptrain\[safetensors\]"):
        write_weights(nn.Linear(2, 2), tmp_path / "model.safetensors")
    with pytest.raises(ImportError, match=r"dptrain\[safetensors\]"):
        facts_of_weights(tmp_path / "model.safetensors")


def test_facts_are_json(tmp_path):
    facts = key_facts(private_run().guarantee())
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    nothing = key_facts(private_run(noise_multiplier=0.0).guarantee())
    assert json.loads(json.dumps(nothing, allow_nan=False))["epsilon"] == "inf"
