"""The configuration of a plan is one that the recipes train with."""

import pytest

from dptrain.commands import main
from dptrain.configuration import build_scheme, build_strategy
from dptrain.planning import Question, compare, training_yaml
from dptrain.strategies import MomentumSGD
from recipes import plan
from recipes.config import load_config
from recipes.vision import VisionSettings

RUN = {"epsilon": 4.0, "delta": 1e-4, "dataset_size": 1000, "batch_size": 100, "epochs": 2}


@pytest.mark.parametrize(
    ("more", "accountant"),
    [
        pytest.param({"buffers": 1}, None, marks=pytest.mark.slow),
        ({"workload": MomentumSGD(momentum=0.9), "physical_batch_size": 32}, "poisson-pld"),
    ],
)
def test_every_row_is_loaded_as_it_was_planned(more, accountant, tmp_path):
    question = Question.of_run(**RUN, **{"max_bands": 2, "buffers": 0, "parameters": 1000, **more})
    for row in compare(question, accountant=accountant, timed=False, progress=False).rows:
        path = tmp_path / "plan.yaml"
        text = training_yaml(question, row, command="x", more=plan.training_entries(question))
        path.write_text(text, encoding="utf-8")
        loaded = load_config(VisionSettings, path)
        loaded.validate()
        assert (loaded.privacy.epsilon, loaded.privacy.delta) == (4.0, 1e-4)
        assert loaded.privacy.noise_multiplier is None  # training finds σ, with a proof
        assert loaded.steps == question.steps
        scheme = build_scheme(loaded.scheme, dataset_size=1000, steps=loaded.steps)
        assert scheme == row.mechanism.scheme
        bound = build_strategy(loaded.strategy).bind(loaded.steps)
        assert bound == row.mechanism.strategy
        found = loaded.build_accountant(row.mechanism)
        named = getattr(found, "name", found)
        assert named == row.accountant.name or (named is None and row.automatic)
        assert loaded.max_physical_batch_size == question.physical_batch_size
        assert loaded.optimizer.momentum == (0.9 if "workload" in more else 0.0)


WORDS = [
    "--epsilon", "4", "--delta", "1e-4", "--dataset-size", "1000", "--batch-size", "100",
    "--epochs", "2", "--max-bands", "2", "--buffers", "0", "--parameters", "1000", "--no-time",
    "--accountant", "poisson-pld", "--momentum", "0.5",
]  # fmt: skip


@pytest.mark.slow
def test_the_command_says_how_the_file_was_made_and_how_to_train(tmp_path, capsys):
    out = tmp_path / "run.yaml"
    assert plan.main([*WORDS, "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text.startswith("# python -m recipes.plan --epsilon 4 ")
    assert "python -m recipes.vision --config THIS" in text
    assert load_config(VisionSettings, out).optimizer.momentum == 0.5
    # The library's own command writes a configuration too, without a word of recipes.
    assert main(["plan", *WORDS, "--out", str(out)]) == 0
    assert "recipes" not in out.read_text(encoding="utf-8")
    load_config(VisionSettings, out).validate()
    capsys.readouterr()


def test_mistakes_are_one_line(capsys):
    assert plan.main([*WORDS[:-4], "--accountant", "poison"]) == 2
    assert capsys.readouterr().err.startswith("python -m recipes.plan: accountant='poison'")
