"""The example programs run as they stand, on their tiny models."""

from __future__ import annotations

import importlib.util
import pathlib

import peft
import pytest
import transformers

from tests.integrations.tiny import flat

pytest.importorskip("accelerate")

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def program(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_classifier_is_trained_evaluated_and_published(tmp_path, capsys):
    metrics = program("bert_classification").main(
        ["--output", str(tmp_path), "--rows", "400", "--epochs", "2", "--delta", "1e-3"]
    )
    assert {"eval_accuracy", "eval_loss"} <= set(metrics)
    published = tmp_path / "published"
    transformers.BertForSequenceClassification.from_pretrained(published)
    transformers.AutoTokenizer.from_pretrained(published)
    assert "for each training example" in capsys.readouterr().out


@pytest.mark.slow
def test_adapters_of_a_decoder_protect_users(tmp_path, capsys):
    example = program("lora_decoder")
    example.main(["--output", str(tmp_path), "--rows", "100", "--steps", "4"])
    _, plain = example.tiny()
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "published")
    assert flat(adapted).isfinite().all()
    assert "user" in capsys.readouterr().out
