"""``privacy.noise_folder``: the same run, past noise in a file that nobody else can read."""

import errno
import os
import stat

import pytest
import torch

from recipes import vision
from recipes.config import load_config
from recipes.runfolder import load_checkpoint
from tests.helpers.nameless import nameless_files
from tests.helpers.stopping import stop_at
from tests.helpers.tiny_vision import TINY, run

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="the system takes no room beforehand"
)

CORRELATED = [
    *TINY,
    "scheme.type=CyclicPoisson",
    "scheme.cycle=3",
    "strategy.type=BandMF",
    "strategy.bands=3",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=1",
    "plots=false",
    "seed=3",
]


class Crash(Exception):
    """What no one catches."""


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "private"
    found.mkdir(mode=0o700)
    return found


@pytest.mark.slow
def test_a_run_with_a_folder_that_crashes_and_goes_on_is_the_run_in_memory(
    config, tmp_path, folder, monkeypatch
):
    """With a folder, then with another, then with none: every release is the same bits."""
    assert run(config, tmp_path / "memory", *CORRELATED) == 0
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    found = []

    def crash():
        here = nameless_files(place)
        assert here
        found.extend(os.fstat(file) for file in here.values())
        assert list(place.iterdir()) == []  # the file has no name
        raise Crash

    for place, step, words in ((folder, 3, []), (other, 5, ["--resume"])):
        with monkeypatch.context() as patch:
            stop_at(patch, step, crash)
            how = [*words, f"privacy.noise_folder={place}"]
            with pytest.raises(Crash):
                run(config, tmp_path / "run", *CORRELATED, *how)
    assert run(config, tmp_path / "run", "--resume", *CORRELATED) == 0
    for file in found:
        assert stat.S_IMODE(file.st_mode) == 0o600
        assert file.st_nlink == 0
        assert file.st_uid == os.geteuid()
    one, two = (load_checkpoint(tmp_path / name)["run"] for name in ("memory", "run"))
    assert one["ledger"] == two["ledger"]
    assert len(one["ledger"]) == 6
    for name, values in one["module"].items():
        assert torch.equal(values, two["module"][name])


def test_the_folder_is_named_nowhere_that_is_published(config, tmp_path, folder):
    output = tmp_path / "run"
    assert run(config, output, *CORRELATED, f"privacy.noise_folder={folder}") == 0
    own = str(folder).encode()
    published = [p for p in output.rglob("*") if p.is_file() and p.name != "checkpoint.pt"]
    assert {"config.yaml", "privacy_report.json", "summary.txt"} <= {p.name for p in published}
    assert [p.name for p in published if own in p.read_bytes()] == []
    assert list(folder.iterdir()) == []


def of_everyone(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o700)
    folder.chmod(0o755)
    return [f"privacy.noise_folder={folder}"], "has mode 0755, which gives others access"


def missing(tmp_path):
    return [f"privacy.noise_folder={tmp_path}/none"], f"folder='{tmp_path}/none' cannot be opened"


def a_file(tmp_path):
    (tmp_path / "file").touch(mode=0o700)
    return [f"privacy.noise_folder={tmp_path}/file"], "not a directory"


def a_number(tmp_path):
    return ["privacy.noise_folder=3"], "privacy.noise_folder=3: it should be text"


def drawn_again(tmp_path):
    words = [f"privacy.noise_folder={tmp_path}", "privacy.regenerate_noise=true"]
    return words, "noise that is generated again has no buffers"


def of_another_device(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    words = [f"privacy.noise_folder={folder}", "device=meta"]
    return words, "on the CPU only; set it to null, or device to cpu"


@pytest.mark.parametrize(
    "mistake", [of_everyone, missing, a_file, a_number, drawn_again, of_another_device]
)
def test_a_folder_that_cannot_hold_it_is_refused_before_data_are_read(
    config, tmp_path, capsys, mistake
):
    """The data are not there either, which would be the first thing to be said."""
    words, message = mistake(tmp_path)
    data = ["data.name=cifar10", f"data.root={tmp_path}/no-data"]
    assert run(config, tmp_path / "run", *CORRELATED, *data) == 2
    assert "no-data" in capsys.readouterr().err
    assert run(config, tmp_path / "run", *CORRELATED, *data, *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "privacy" in error
    assert message.lower() in error.lower()
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_refused_in_one_line_and_spares_the_old_run(
    config, tmp_path, folder, monkeypatch, capsys
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run(config, tmp_path / "run", *CORRELATED) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    capsys.readouterr()
    monkeypatch.setattr(os, "posix_fallocate", full)
    how = [f"privacy.noise_folder={folder}", "overwrite=true"]
    assert run(config, tmp_path / "run", *CORRELATED, *how) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: folder='{folder}': past noise takes ")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before


def test_a_tilde_is_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    settings = load_config(
        vision.VisionSettings, None, ["steps=20", f"privacy.noise_folder=~/{folder.name}"]
    )
    settings.validate()
    assert settings.build_noise().folder == str(folder)
