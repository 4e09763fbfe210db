"""Certificates made by several processes: with a network, without one, interrupted."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.monte_carlo import MinSepMonteCarlo
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.partial_certificate import PartialCertificate
from dptrain.commands.certify import main
from dptrain.commands.certify_ranks import _attempt, _opened
from dptrain.commands.certify_request import read_mechanism
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep, Poisson, Shuffled
from dptrain.strategies import BandMF
from tests.helpers.stopping import hear_ctrl_c

ROOT = pathlib.Path(__file__).parents[2]
MECHANISM = MatrixMechanism(
    scheme=MinSep(probability=0.2, min_sep=4, steps=20, dataset_size=40),
    strategy=BandMF(bands=3, coefficients=(1.0, 0.6, 0.4)),
    noise_multiplier=1.0,
)
EPSILON, DELTA = 1.0, 0.002  # seven chunks of samples


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "mechanism.json"
    path.write_text(MECHANISM.to_json())
    return path


def arguments(file: pathlib.Path, out: pathlib.Path, *more: str) -> list[str]:
    target = ["--epsilon", str(EPSILON), "--delta", str(DELTA), "--no-progress"]
    return [str(file), *target, "--out", str(out), *more]


def single(directory: pathlib.Path) -> dict[str, Any]:
    """The certificate of calibrate in one process, seed 3, one thread."""
    accountant = MinSepMonteCarlo(seed=3, progress=False, threads=1, cache=directory)
    found = accountant.calibrate(MECHANISM, epsilon=EPSILON, delta=DELTA)
    assert found.certificate is not None
    return found.certificate


def only_file(directory: pathlib.Path) -> pathlib.Path:
    (path,) = directory.iterdir()
    return path


def test_one_process_makes_what_calibration_finds(
    tmp_path: pathlib.Path, file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    figures = tmp_path / "certificate.json"
    assert main(arguments(file, out, "--seed", "3", "--json", str(figures))) == 0
    said = capsys.readouterr().out
    assert str(only_file(out)) in said
    expected = single(tmp_path / "single")
    assert json.loads(figures.read_text()) == json.loads(json.dumps(expected))
    assert f"σ = {expected['noise_multiplier']:.6g}" in said
    # Another seed, and no time to simulate: what is found is the file.
    reader = MinSepMonteCarlo(seed=99, progress=False, cache=out, max_samples=10**6)
    found = reader.calibrate(MECHANISM, epsilon=EPSILON, delta=DELTA).certificate
    assert found == expected
    assert main(arguments(file, out, "--seed", "4")) == 0  # the one there is stays
    assert single(out) == expected


def test_shards_without_a_network_merge_to_the_same(
    tmp_path: pathlib.Path, file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = []
    for index in (1, 2, 3):
        out = tmp_path / f"part{index}"
        assert main(arguments(file, out, "--seed", "3", "--shard", f"{index}/3")) == 0
        parts.append(str(only_file(out)))
        assert main(arguments(file, out, "--seed", "3", "--shard", f"{index}/3")) == 0  # done
    done = tmp_path / "done"
    capsys.readouterr()

    def merged(*files: str) -> str:
        status = main(["--merge", *files, "--out", str(done)])
        caught = capsys.readouterr()
        assert (status == 0) == (caught.err == "")
        return caught.out + caught.err

    assert "of shards 2/3" in merged(parts[0], parts[2])
    assert "both contain chunks" in merged(parts[0], parts[1], parts[1])
    assert "no such file" in merged(parts[0], str(tmp_path / "none.json"))
    assert not done.exists()
    assert "σ = " in merged(*parts[::-1])
    assert single(done) == single(tmp_path / "single")
    assert "not a usable partial certificate" in merged(str(only_file(done)))


def test_what_shares_are_lost_or_corrupt_is_said_and_what_is_left_goes_on(
    file: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = []
    for index in (1, 2, 3, 4):
        out = tmp_path / f"part{index}"
        assert main(arguments(file, out, "--seed", "3", "--shard", f"{index}/4")) == 0
        parts.append(only_file(out))
    capsys.readouterr()
    done = tmp_path / "done"

    def refused(*files: pathlib.Path) -> str:
        assert main(["--merge", *map(str, files), "--out", str(done)]) == 2
        assert not done.exists()
        return capsys.readouterr().err

    assert "of shards 3/4" in refused(parts[0], parts[1], parts[3])
    sound = parts[2].read_text()
    place = sound.index('"done"')
    digit = next(i for i in range(place, len(sound)) if sound[i] in "12345678")
    parts[2].write_text(sound[:digit] + str(int(sound[digit]) + 1) + sound[digit + 1 :])
    said = refused(*parts)
    assert str(parts[2]) in said
    assert "its digest does not match its contents" in said
    parts[2].write_text(sound[: len(sound) // 2])
    assert str(parts[2]) in refused(*parts)
    # Processes with a network draw what a lost share held, and nothing else, again.
    done.mkdir()
    for part in (parts[0], parts[1], parts[3]):
        (done / part.name).write_bytes(part.read_bytes())
    assert main(arguments(file, done)) == 0
    assert single(done) == single(tmp_path / "single")


def test_an_interruption_before_any_verdict_promises_nothing(
    file: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dptrain.commands.certify.declare", interrupted)
    assert main(arguments(file, tmp_path / "out")) == 130
    assert "nothing was verified yet" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(
    file: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(file, file)) == 2
    assert f"--out {file}: cannot write there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--shard", "4/3"], "i/k"),
        (["--shard", "1/3"], "same --seed"),
        (["--device", "cuda"], "--device"),
        (["--accountant", "nobody"], "unknown"),
        (["--accountant", PoissonPLD.name], "needs no certificate"),
        (["--accountant", MinSepImportance.name], "certifies in one process"),
        (["--threads", "0"], "--threads 0"),
        (["--delta", "0"], "delta=0"),
        (["--delta", "nan"], "delta=nan"),
        (["--epsilon", "-1"], "epsilon=-1"),
        (["--seed", "-1"], "seed=-1"),
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
    assert "no accountant that simulates covers" in refused()
    assert main(["--out", str(tmp_path)]) == 2
    assert "mechanism: missing" in capsys.readouterr().err


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
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_on_a_network_make_the_certificate_of_one(
    tmp_path: pathlib.Path, file: pathlib.Path, processes: int
) -> None:
    out = tmp_path / "out"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    run = command(*torchrun, "-m", "dptrain.commands.certify", *arguments(file, out, "--seed", "3"))
    said, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    assert said.count("certificate: ") == 1  # the first process alone reports
    found = certificate_cache.read_certificate(only_file(out))
    assert found == single(tmp_path / "single")


def test_an_error_of_one_process_is_everybody_s() -> None:
    def fails() -> int:
        raise ValueError("no such thing")

    boxes = [_attempt(lambda: 1), _attempt(fails), _attempt(lambda: 3)]
    with pytest.raises(ValueError, match="process 1: no such thing"):
        _opened(boxes)
    assert _opened(boxes[::2]) == [1, 3]


@pytest.mark.slow
def test_ctrl_c_leaves_a_partial_certificate(tmp_path: pathlib.Path) -> None:
    # Long enough to be interrupted: a million samples a side, of 400 steps.
    scheme = Poisson(probability=0.2, steps=400, dataset_size=40)
    strategy = BandMF(bands=1, coefficients=(1.0,))
    m = MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=1.0)
    file, out = tmp_path / "mechanism.json", tmp_path / "out"
    file.write_text(m.to_json())
    run = command(
        "dptrain.commands.certify", *arguments(file, out, "--seed", "3", "--delta", "1e-4")
    )
    deadline = time.monotonic() + 60
    while not (out.exists() and any(out.glob("partial-*.json"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "the same command continues" in errors
    kept = PartialCertificate.load(only_file(out))
    assert kept.samples < kept.declaration.samples
    assert kept.declaration.seed == 3
