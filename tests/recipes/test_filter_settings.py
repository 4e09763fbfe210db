"""The settings of an individual filter: mistakes end in one line, before a folder is made."""

from __future__ import annotations

import pytest

from dptrain.configuration.typed import members_of
from dptrain.individual import IndividualFilter
from recipes.runfolder import load_checkpoint
from tests.helpers.individual_recipe import run_individual

PLAIN = [
    "individual.type=GDPFilter",
    "individual.epsilon=2.75",
    "individual.delta=1e-5",
    "individual.start=3",
    "privacy.epsilon=null",
    "steps=8",
    "plots=false",
    "seed=1",
]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["individual.type=GDPFiltr"], "individual.type='GDPFiltr': did you mean GDPFilter"),
        (["individual.type=GDPOdometer"], "individual.type='GDPOdometer': "),
        (["individual.epsilon=null"], "needs individual.epsilon"),
        (["individual.epsilon=-1"], "epsilon"),
        (["individual.epsilon=many"], "target_epsilon='many' must be a number"),
        (["individual.target_epsilon=1"], "did you mean individual.epsilon?"),
        (["individual.color=red"], "GDPFilter has no field 'color'"),
        (["privacy.epsilon=1"], "privacy.epsilon=1.0 with individual.type=GDPFilter"),
        (["privacy.noise_multiplier=4"], "give exactly one (the noise follows from start)"),
        (["individual.start=null"], "give exactly one (the noise follows from start)"),
        (["individual.start=0"], "individual.start=0: a number of steps"),
        (["individual.start=9"], "individual.start=9: the run has 8 steps"),
        (["individual.max_steps=7"], "max_steps=7 is below the 8 steps"),
        (["privacy.delta=1e-6"], "privacy.delta=1e-06 and individual.delta=1e-05"),
        (["individual.report=perhaps"], "individual.report='perhaps': true or false"),
        (["individual.full_consumption=1"], "full_consumption=1 must be True or False"),
        (["--simulate", "2"], "simulate=2 with individual.type=GDPFilter"),
        (["scheme.epoch_length=2"], "a sampled step is not Gaussian"),
        (
            ["scheme.type=CyclicPoisson", "scheme.cycle=2", "scheme.epoch_length=4"],
            "full batches and Poisson sampling",
        ),
        (["strategy.type=BandMF", "strategy.bands=2"], "proven for independent noise only"),
    ],
)
def test_mistakes_end_in_one_line(config, tmp_path, capsys, options, message):
    assert run_individual(config, tmp_path / "run", *PLAIN, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not (tmp_path / "run").exists()


def test_without_a_type_nothing_may_be_set(tmp_path, config, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("individual: {type: null, epsilon: 1}\n")
    assert run_individual(path, tmp_path / "run", "steps=2") == 2
    assert "individual.epsilon=1 with individual.type=null" in capsys.readouterr().err
    # Overridden, the fields of the file's filter go with it.
    path.write_text("individual: {type: GDPFilter, epsilon: 1, start: 2}\nplots: false\n")
    options = ["individual.type=null", "steps=2", "privacy.epsilon=8"]
    assert run_individual(path, tmp_path / "run", *options) == 0
    assert "individual" not in load_checkpoint(tmp_path / "run")["run"]["private"]


def test_the_start_is_for_full_batches(config, tmp_path, capsys):
    if "RenyiFilter" not in members_of(IndividualFilter):
        pytest.skip("RenyiFilter is not there")
    options = [*PLAIN, "individual.type=RenyiFilter"]
    assert run_individual(config, tmp_path / "run", *options) == 2
    assert "the noise follows from start with full batches only" in capsys.readouterr().err
