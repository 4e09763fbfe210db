"""Certificates made by several processes, and interrupted."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.accounting.simulation import SimulatedAccountant
from dptrain.commands.certify import main, read_mechanism
from dptrain.contrib.accountants.any_matrix import MinSepAnyMatrix
from dptrain.core import Guarantee
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Shuffled
from dptrain.strategies import BandMF, SquareRoot
from tests.helpers.stopping import hear_ctrl_c

ROOT = pathlib.Path(__file__).parents[2]
MECHANISM = MatrixMechanism(
    scheme=MinSep(probability=0.2, min_sep=4, steps=20, dataset_size=40),
    strategy=BandMF(bands=3, coefficients=(1.0, 0.6, 0.4)),
    noise_multiplier=1.0,
)
EPSILON, DELTA = 1.0, 0.002


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "mechanism.json"
    path.write_text(MECHANISM.to_json())
    return path


def arguments(file: pathlib.Path, out: pathlib.Path, *more: str) -> list[str]:
    target = ["--epsilon", str(EPSILON), "--delta", str(DELTA), "--no-progress"]
    return [str(file), *target, "--out", str(out), *more]


def single(directory: pathlib.Path, accountant: type[SimulatedAccountant]) -> Guarantee:
    """What calibrate finds in one process, seed 3, one thread."""
    made = accountant(seed=3, progress=False, threads=1, cache=directory)
    return made.calibrate(MECHANISM, epsilon=EPSILON, delta=DELTA)


def test_one_process_makes_what_calibration_finds(
    tmp_path: pathlib.Path, file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    figures = tmp_path / "certificate.json"
    assert main(arguments(file, out, "--seed", "3", "--json", str(figures))) == 0
    said = capsys.readouterr().out
    assert str(out) in said
    expected = single(tmp_path / "single", MinSepImportance)
    assert json.loads(figures.read_text()) == json.loads(json.dumps(expected.certificate))
    assert f"σ = {expected.noise_multiplier:.6g}" in said
    assert main(arguments(file, out, "--seed", "4")) == 0  # the one there is stays
    assert single(out, MinSepImportance) == expected


def test_a_folder_that_cannot_be_written_is_named(
    file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(file, file)) == 2
    assert f"--out {file}: cannot write there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--accountant", MinSepAnyMatrix.name, "--device", "cuda"], "--device"),
        (["--accountant", "nobody"], "unknown"),
        (["--accountant", "gaussian"], "needs no certificate"),
        (["--accountant", PoissonPLD.name], "does not cover"),
        (["--threads", "0"], "--threads 0"),
        (["--delta", "0"], "delta=0"),
        (["--delta", "nan"], "delta=nan"),
        (["--epsilon", "-1"], "epsilon=-1"),
        (["--seed", "-1"], "seed=-1"),
        (["--max-samples", "0"], "max_samples=0"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: pathlib.Path,
    file: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    assert main(arguments(file, tmp_path / "out", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_bad_mechanisms_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mechanism.json"

    def refused() -> str:
        assert main(arguments(path, tmp_path / "out")) == 2
        return capsys.readouterr().err

    assert "no such file" in refused()
    path.write_text("{}")
    assert "not a mechanism" in refused()
    scheme = Shuffled(batch_size=4, dataset_size=40, epochs=2)
    strategy = BandMF(bands=1, coefficients=(1.0,))
    m = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    path.write_text(m.to_json())
    assert "does not simulate" in refused()


def test_mechanisms_in_yaml_without_noise(tmp_path: pathlib.Path) -> None:
    yaml = pytest.importorskip("yaml")
    value = MECHANISM.to_dict()
    path = tmp_path / "mechanism.yaml"
    path.write_text(yaml.safe_dump({key: value[key] for key in ("scheme", "strategy")}))
    assert read_mechanism(path) == MECHANISM


def command(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )


@pytest.mark.slow
def test_two_runs_at_once_make_one_certificate(tmp_path: pathlib.Path, file: pathlib.Path) -> None:
    out = tmp_path / "out"
    runs = [
        command("dptrain.commands.certify", *arguments(file, out, "--seed", seed, "--json", name))
        for seed, name in (("3", str(tmp_path / "3.json")), ("4", str(tmp_path / "4.json")))
    ]
    for run in runs:
        _, errors = run.communicate(timeout=240)
        assert run.returncode == 0, errors
    made = [json.loads((tmp_path / name).read_text()) for name in ("3.json", "4.json")]
    assert made[0] == made[1]
    (kept,) = out.iterdir()
    assert kept.name.startswith("certificate-")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("accountant", [MinSepImportance, MinSepAnyMatrix])
def test_processes_on_a_network_make_the_certificate_of_one(
    tmp_path: pathlib.Path,
    file: pathlib.Path,
    processes: int,
    accountant: type[SimulatedAccountant],
) -> None:
    out = tmp_path / "out"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    asked = arguments(file, out, "--seed", "3", "--accountant", accountant.name)
    run = command(*torchrun, "-m", "dptrain.commands.certify", *asked)
    said, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    assert said.count("certificate in ") == 1  # the first process alone reports
    (kept,) = out.iterdir()
    assert single(out, accountant) == single(tmp_path / "single", accountant)
    assert list(out.iterdir()) == [kept]


@pytest.mark.slow
def test_an_error_of_one_process_is_everybody_s(tmp_path: pathlib.Path, file: pathlib.Path) -> None:
    out = tmp_path / "out"
    single(out, MinSepImportance)
    (kept,) = out.iterdir()
    kept.write_text("{")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = command(*torchrun, "-m", "dptrain.commands.certify", *arguments(file, out))
    _, errors = run.communicate(timeout=240)
    assert run.returncode != 0
    assert errors.count("corrupt certificate") == 2


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_drawn(tmp_path: pathlib.Path) -> None:
    # Long enough to be interrupted.
    scheme = MinSep(probability=0.2, min_sep=2, steps=100, dataset_size=40)
    m = MatrixMechanism(scheme=scheme, strategy=SquareRoot(), noise_multiplier=1.0)
    file, out = tmp_path / "mechanism.json", tmp_path / "out"
    file.write_text(m.to_json())
    name = ["--accountant", MinSepAnyMatrix.name]
    run = command(
        "dptrain.commands.certify", *arguments(file, out, "--seed", "3", "--delta", "1e-5", *name)
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and any(out.glob("partial-*"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "the same call continues" in errors
    (kept,) = out.iterdir()
    assert '"seed": "3"' in kept.read_text()
