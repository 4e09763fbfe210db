"""``--simulate``: the same signal-to-noise ratio at a fraction of the cost, and no guarantee."""

from __future__ import annotations

import json

import pytest

from dptrain.mechanism import MatrixMechanism
from recipes.runfolder import load_checkpoint
from recipes.vision import main

TINY = [
    "data.image_size=8",
    "model.channels=[4]",
    "model.groups=2",
    "model.hidden=4",
    "scheme.type=Poisson",
    "scheme.batch_size=40",
    "steps=3",
    "strategy.type=Identity",
    "plots=false",
]
FIXED = [*TINY, "privacy.epsilon=null", "privacy.noise_multiplier=2"]


def _main(config, output, *arguments):
    return main(["--config", str(config), "--output", str(output), *arguments])


def _mechanism(output):
    return MatrixMechanism.from_dict(load_checkpoint(output)["run"]["mechanism"])


def test_batch_and_noise_are_divided_by_the_same_factor(config, tmp_path, capsys):
    assert _main(config, tmp_path / "run", "--simulate", "4", *FIXED) == 0
    mechanism = _mechanism(tmp_path / "run")
    assert mechanism.noise_multiplier == 0.5
    assert mechanism.scheme.expected_batch_size == pytest.approx(10)
    assert mechanism.scheme.steps == 3
    out = capsys.readouterr().out
    assert "NOT PRIVATE" in out
    assert "differentially private" not in out
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "NOT_PRIVATE.md" in names
    assert not any(name.startswith("privacy_report") for name in names)
    assert "NOT PRIVATE" in (tmp_path / "run" / "NOT_PRIVATE.md").read_text()


@pytest.mark.slow
def test_the_full_run_is_calibrated_and_named(config, tmp_path, capsys):
    """σ of the simulation is that of the full run over the factor."""
    target = [*TINY, "privacy.epsilon=4", "privacy.delta=1e-4"]
    assert _main(config, tmp_path / "full", *target) == 0
    assert _main(config, tmp_path / "small", *target, "--simulate", "2") == 0
    full, small = _mechanism(tmp_path / "full"), _mechanism(tmp_path / "small")
    assert small.noise_multiplier == pytest.approx(full.noise_multiplier / 2, rel=1e-12)
    facts = load_checkpoint(tmp_path / "small")["simulation"]
    assert facts["noise_multiplier"] == pytest.approx(full.noise_multiplier)
    assert facts["expected_batch_size"] == pytest.approx(40)
    assert facts["epsilon"] <= 4
    mark = (tmp_path / "small" / "NOT_PRIVATE.md").read_text()
    assert json.loads(mark.partition("```json")[2].partition("```")[0]) == facts


def test_resuming_a_simulation_stays_one(config, tmp_path, capsys):
    assert _main(config, tmp_path / "run", "--simulate", "4", *FIXED) == 0
    capsys.readouterr()
    assert _main(config, tmp_path / "run", "--simulate", "4", "--resume", *FIXED) == 0
    assert "NOT PRIVATE" in capsys.readouterr().out
    assert _main(config, tmp_path / "run", "--resume", *FIXED) == 2
    assert "simulate: the run has 4.0, now None" in capsys.readouterr().err


def test_a_private_run_leaves_no_mark_of_an_old_simulation(config, tmp_path, capsys):
    assert _main(config, tmp_path / "run", "--simulate", "4", *FIXED) == 0
    assert _main(config, tmp_path / "run", "overwrite=true", *FIXED) == 0
    assert not (tmp_path / "run" / "NOT_PRIVATE.md").exists()
    assert "differentially private" in capsys.readouterr().out


@pytest.mark.parametrize("factor", ["0.5", "0", "-1", "nan", "inf"])
def test_impossible_factors(config, tmp_path, capsys, factor):
    assert _main(config, tmp_path / "run", "--simulate", factor, *FIXED) == 2
    assert "simulate=" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
