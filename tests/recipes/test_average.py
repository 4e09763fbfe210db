"""An average of released weights against its sum, alone and in a run that is stopped."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

from recipes.average import Average
from recipes.runfolder import WEIGHTS, RunFolder, load_checkpoint
from tests.helpers.tiny_vision import PLAIN, run, stopped_and_resumed


def _weighted(released: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    shares = [decay ** (len(released) - 1 - t) for t in range(len(released))]
    return {
        name: sum(
            share * weights[name].double() for share, weights in zip(shares, released, strict=True)
        )
        / sum(shares)
        for name in released[0]
    }


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.9999])
def test_it_is_the_weighted_mean_of_what_was_released(decay):
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    average, released = Average(model, decay), []
    for _ in range(40):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=draw))
        average.update(model)
        released.append(copy.deepcopy(model.state_dict()))
    for name, mean in _weighted(released, decay).items():
        # 40 roundings of numbers up to 4, one an update.
        assert torch.allclose(average.model.state_dict()[name].double(), mean, atol=40 * 4 * 2**-23)


def test_weights_that_are_tied_stay_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    average = Average(model, 0.9)
    average.update(model)
    assert average.model[1].weight is average.model[0].weight is not model[0].weight


AVERAGED = [*PLAIN, "optimizer.ema=0.7", "checkpoint_every=1"]


@pytest.fixture(scope="module")
def averaged(config, tmp_path_factory):
    """A run, and the weights after each of its six steps."""
    output, released = tmp_path_factory.mktemp("averaged") / "run", []
    save = RunFolder.save_checkpoint

    def noting(folder, state):
        if state["run"]["steps_executed"]:
            released.append(copy.deepcopy(state["run"]["module"]))
        save(folder, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save_checkpoint", noting)
        assert run(config, output, *AVERAGED) == 0
    assert len(released) == 6
    return output, released


@pytest.mark.slow
def test_the_model_of_a_run_is_the_mean_of_its_steps(averaged):
    output, released = averaged
    kept = safetensors.torch.load_file(output / WEIGHTS)
    for name, mean in _weighted(released, 0.7).items():
        assert torch.allclose(kept[name].double(), mean, atol=1e-6)
        assert not torch.allclose(kept[name], released[-1][name], atol=1e-6)


@pytest.mark.slow
def test_training_is_the_same_and_so_is_what_is_stated(config, averaged, tmp_path):
    output, released = averaged
    assert run(config, tmp_path / "run", *PLAIN) == 0
    plain = load_checkpoint(tmp_path / "run")["run"]
    assert all(torch.equal(plain["module"][name], last) for name, last in released[-1].items())
    assert plain["ledger"] == load_checkpoint(output)["run"]["ledger"]


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(config, averaged, tmp_path):
    stopped_and_resumed(config, tmp_path / "run", *AVERAGED)
    ours, theirs = (
        safetensors.torch.load_file(folder / WEIGHTS) for folder in (tmp_path / "run", averaged[0])
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert metrics == (averaged[0] / "metrics.jsonl").read_text()


def test_another_decay_is_refused_on_resume(config, averaged, capsys):
    assert run(config, averaged[0], "--resume", *AVERAGED, "optimizer.ema=null") == 2
    assert "optimizer.ema: the run has 0.7, now None" in capsys.readouterr().err


@pytest.mark.parametrize("decay", ["0", "1", "-0.1", "often"])
def test_what_is_no_decay_is_refused(config, tmp_path, capsys, decay):
    assert run(config, tmp_path / "run", *PLAIN, f"optimizer.ema={decay}") == 2
    assert "optimizer.ema" in capsys.readouterr().err
