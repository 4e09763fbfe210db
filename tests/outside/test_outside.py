"""A package of somebody else's trains, accounts, resumes, and is written by name.

Every test is a process that imports the package, as its user's would.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from dptrain.core import Guarantee

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]


def python(*words: str) -> str:
    """What a process prints that finds dptrain and the package."""
    paths = [str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *words],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_imports_faces_only():
    """``dptrain`` and its rooms: what their ``__init__`` exports may be relied on."""
    for path in sorted(HERE.glob("**/*.py")):
        if path.name.startswith("test_"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [n.name for n in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name and name.split(".")[0] == "dptrain":
                    assert (ROOT / name.replace(".", "/") / "__init__.py").exists(), (path, name)


@pytest.mark.slow
def test_it_fulfils_every_contract():
    said = python("-m", "pytest", "-p", "no:cacheprovider", str(HERE / "contracts.py"))
    assert " passed" in said
    assert "failed" not in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes leave: one that trains, and one that resumes its checkpoint."""
    path = tmp_path_factory.mktemp("run")
    for mode in ("train", "resume"):
        python(str(HERE / "run.py"), mode, str(path))
    return path


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_in_another_process(folder):
    whole, resumed = (torch.load(folder / f"{name}.pt") for name in ("whole", "resumed"))
    assert len(whole) == 5  # weights and biases of two layers, and the shift
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_its_accountant_answers_by_default(folder):
    shown = Guarantee.from_json((folder / "whole.json").read_text(encoding="utf-8"))
    assert shown.accountant == "stranger-cohort"
    assert shown.scheme["type"] == "Cohort"
    assert shown.strategy["type"] == "Fading"
    assert shown.epsilon <= 2.0
    assert shown.epsilon > 1.99  # calibrated tightly
    again = Guarantee.from_json((folder / "resumed.json").read_text(encoding="utf-8"))
    assert (again.epsilon, again.mechanism_hash) == (shown.epsilon, shown.mechanism_hash)


CONFIGURATION = """
scheme: {type: Cohort, batch_size: 50}
strategy: {type: Fading, ratio: 0.5}
steps: 8
privacy: {epsilon: 2.0, delta: 0.001}
"""

COMMANDS = """
import json, sys
from dptrain.commands import main
for words in json.loads(sys.argv[1]):
    print("exit", main(words), flush=True)
    print("----", flush=True)
"""


@pytest.mark.slow
def test_the_command_line_takes_its_names_once_it_is_imported(tmp_path):
    config, out = tmp_path / "run.yaml", tmp_path / "mechanism.json"
    config.write_text(CONFIGURATION, encoding="utf-8")
    words = ["account", "--scheme", "Cohort", "batch_size=50", "--strategy", "Fading", "ratio=0.5"]
    words += ["--dataset-size", "200", "--steps", "8", "--delta", "1e-3", "--noise-multiplier", "5"]
    ours = ["--import", "stranger_dp"]
    commands = [
        words,
        ["--import", "stranger_pd", *words],
        [*ours, *words],
        ["calibrate", "--config", str(config), "--dataset-size", "200", "--out", str(out)],
        ["strategies", "--steps", "12", "--no-time"],
    ]
    said = python("-c", COMMANDS, json.dumps(commands))
    before, misspelt, account, calibrate, table, _ = said.split("----\n")
    assert "scheme.type='Cohort': choose one of" in before
    assert "dptrain: --import stranger_pd: No module named 'stranger_pd'\n" in misspelt
    assert before.endswith("exit 2\n")
    assert misspelt.endswith("exit 2\n")
    assert "stranger-cohort" in account
    assert "stranger-cohort" in calibrate
    assert "Fading" in table
    stated = json.loads(out.read_text(encoding="utf-8"))
    assert (stated["scheme"]["type"], stated["strategy"]["type"]) == ("Cohort", "Fading")
