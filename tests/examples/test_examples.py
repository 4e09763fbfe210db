"""The programs of examples/ run to their end, on small files in the formats that they read."""

from __future__ import annotations

import csv
import importlib.util
import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_model

pytest.importorskip("sklearn")

from dptrain import Guarantee
from dptrain.reporting import facts_of_weights, key_facts
from recipes.data.cifar import CLASSES

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ("mnist", "cifar10", "nanogpt", "tabular", "users", "lightning_mnist")


def program(name):
    """An example, imported from its file."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def class_folders(folder, classes, mode, side, each):
    """Random images, ``train/CLASS/0.png`` and so on."""
    image = pytest.importorskip("PIL.Image")
    generator = random.Random(0)
    for part in ("train", "test"):
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(each):
                raw = generator.randbytes(side * side * len(mode.replace("L", "1")))
                picture = image.frombytes(mode, (side, side), raw)
                picture.save(folder / part / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return class_folders(
        tmp_path_factory.mktemp("mnist"), [str(digit) for digit in range(10)], "L", 28, 3
    )


def test_mnist(digits, tmp_path, capsys):
    command = [str(digits), "--epochs", "2", "-b", "10", "--sigma", "1.2", "-c", "0.5"]
    command += ["--delta", "1e-3", "--microbatches", "2", "--save", str(tmp_path / "out")]
    found = program("mnist").main(command)
    assert 0 <= found <= 1
    assert "all its 6 noisy updates (all of them have run)" in capsys.readouterr().out
    stated = json.loads((tmp_path / "out" / "privacy_report.json").read_text())
    guarantee = Guarantee.from_json(json.dumps(stated["guarantee"]))
    assert guarantee.delta == 1e-3
    weights = tmp_path / "out" / "model.safetensors"
    load_model(program("mnist").network(), weights)
    assert facts_of_weights(weights) == key_facts(guarantee)


def test_mnist_meets_a_target(digits, capsys):
    program("mnist").main(
        [str(digits), "--epochs", "1", "-b", "10", "--epsilon", "4", "--delta", "1e-3"]
    )
    said = re.search(r"\(ε = ([\d.]+), δ = 0.001\)", capsys.readouterr().out)
    assert said is not None
    assert 3.9 < float(said[1]) <= 4


@pytest.mark.slow
def test_cifar10_goes_on_where_it_was_left(tmp_path, capsys):
    data = class_folders(tmp_path / "cifar", CLASSES, "RGB", 32, 3)
    command = [str(data), "--epochs", "2", "-b", "6", "--bands", "2", "--sigma", "1.0"]
    command += ["--delta", "1e-3", "--max-physical-batch-size", "4"]
    command += ["--checkpoint", str(tmp_path / "run.pt")]
    cifar10 = program("cifar10")
    cifar10.main(command)
    assert "all its 10 noisy updates (all of them have run)" in capsys.readouterr().out
    assert torch.load(tmp_path / "run.pt", weights_only=True)["steps_executed"] == 10
    cifar10.main(command)  # of a run that is over nothing is left to do
    assert "all its 10 noisy updates (all of them have run)" in capsys.readouterr().out


def test_nanogpt(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be: that is the question.\n" * 40)
    command = [str(text), "--steps", "4", "-b", "20", "--context", "16", "--width", "16"]
    command += ["--layers", "1", "--heads", "2", "--bands", "2", "--sigma", "1.0"]
    said = program("nanogpt").main([*command, "--microbatches", "2"])
    assert len(said) == 201


def test_a_decoder_sees_no_later_letter():
    nanogpt = program("nanogpt")
    torch.manual_seed(0)
    model = nanogpt.Decoder(context=8, width=16, layers=2, heads=2)
    tokens = nanogpt.encoded("abcdefgh")[None]
    changed = tokens.clone()
    changed[0, 5] = nanogpt.encoded("z")[0]
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_tabular(capsys):
    found = program("tabular").main(["--epochs", "2", "--epsilon", "4", "--lr", "0.3", "1.0"])
    assert found > 0.5
    assert "public part: lr 0.3" in capsys.readouterr().out


def test_tabular_parts_have_no_row_twice():
    rows = [tuple(row.tolist()) for part in program("tabular").parts(0) for row in part.tensors[0]]
    assert len(rows) == 569
    assert len(set(rows)) == 569


@pytest.mark.slow
def test_users_are_fine_tuned_from_public_weights(tmp_path):
    generator = random.Random(0)
    for name in ("public", "private"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["user", "text", "label"])
            for number in range(120):
                label = generator.randrange(2)
                text = ("good fine", "bad poor")[label]
                users = f"u{number % 50}" if number % 5 else f"u{number % 50};v{number}"
                table.writerow([users, f"{text} thing {number}", label])
    users = program("users")
    common = ["--steps", "6", "-b", "8", "--sigma", "1.0", "--delta", "1e-3", "--min-sep", "2"]
    weights = str(tmp_path / "public.safetensors")
    users.main([str(tmp_path / "public.csv"), *common, "--save", weights])
    said = users.main([str(tmp_path / "private.csv"), *common, "-k", "2", "--weights", weights])
    assert "differentially private for each user" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_explains_itself(name):
    command = [sys.executable, "-m", f"examples.{name}", "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for option in ("--epsilon", "--sigma", "--delta", "-c"):
        assert option in ended.stdout


def test_every_program_is_tested_here():
    there = {path.stem for path in (ROOT / "examples").glob("[!_]*.py")}
    elsewhere = {"bert_classification", "lora_decoder"}  # tests/integrations
    assert there - elsewhere == set(PROGRAMS)


def test_lightning_mnist(digits, tmp_path, capsys):
    pytest.importorskip("lightning")
    command = [str(digits), "--epochs", "2", "-b", "10", "--sigma", "1.2", "--delta", "1e-3"]
    program("lightning_mnist").main([*command, "--microbatches", "2", "--out", str(tmp_path)])
    assert "all its 6 noisy updates (all of them have run)" in capsys.readouterr().out
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "dptrain_private_run" not in saved
