"""A recipe that is killed before its run has begun leaves the old run or none, and starts again."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from recipes.runfolder import CHECKPOINT, CONFIG, LEDGER, METRICS, RunFolder
from tests.helpers.tiny_vision import PLAIN, run

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "shutil.rmtree"}
KILLED = 9


def killed_at(number, work):
    """Run ``work`` in a process that dies before its so-manieth change of files; did it?"""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event, _):
            nonlocal seen
            seen += event in CHANGES
            if seen == number:
                os._exit(KILLED)

        sys.addaudithook(count)
        work()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def write_run(path, text):
    """In the recipe's order; the checkpoint is the last and appears at once."""
    path.mkdir(exist_ok=True)
    for name in (LEDGER, CONFIG, METRICS):
        (path / name).write_text(text)
    (path / "tensorboard").mkdir()
    (path / "tensorboard" / "events").write_text(text)
    (path / f"{CHECKPOINT}.tmp").write_text(text)
    (path / f"{CHECKPOINT}.tmp").rename(path / CHECKPOINT)


def contents(path):
    if not path.exists():
        return {}
    found = (p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): p.read_text() for p in found}


@pytest.mark.slow
@pytest.mark.parametrize("before", [pytest.param("nothing", marks=pytest.mark.slow), "a run"])
def test_killed_anywhere_the_old_run_comes_back_or_the_new_one_is_there(tmp_path, before):
    path, whole = tmp_path / "run", {}
    for text in ("old", "new"):
        write_run(tmp_path / text, text)
        whole[text] = contents(tmp_path / text) | {"mine.txt": "not a run's"}
    whole["none"] = {"mine.txt": "not a run's"}

    def fresh():
        shutil.rmtree(path, ignore_errors=True)
        if before == "a run":
            write_run(path, "old")
        path.mkdir(exist_ok=True)
        (path / "mine.txt").write_text("not a run's")

    def start():
        with RunFolder.claim(path, overwrite=True):
            write_run(path, "new")

    number, ends = 0, []
    died = True
    while died:
        number += 1
        again, recovering = number % 9, True
        while recovering:  # also killed while it is put right, here and there
            fresh()
            died = killed_at(number, start)
            again += 9
            recovering = killed_at(again, lambda: RunFolder.recover(path))
            RunFolder.recover(path)
            found = contents(path)
            assert found in (whole["none" if before == "nothing" else "old"], whole["new"])
            assert {p.name for p in path.iterdir()} <= {*whole["new"], "tensorboard"}
            ends.append(found == whole["new"])
        assert ends[-1] >= ends[0]
    assert not ends[0]
    assert ends[-1]
    assert ends == sorted(ends)  # once it has begun it has begun
    assert number > 10


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """What is on the disk when the recipe dies while it writes its first checkpoint."""

    def leave(config, output, *arguments):
        left = tmp_path / "left"

        def die(self, state):
            (self.path / f"{CHECKPOINT}.tmp").write_text("half of it")
            shutil.copytree(self.path, left)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "save_checkpoint", die)
            run(config, output, *PLAIN, *arguments)
        assert (left / LEDGER).exists()
        assert not (left / CHECKPOINT).exists()
        return left

    return leave


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path


def test_killed_before_the_first_checkpoint_it_starts_again(config, tmp_path, killed, capsys):
    left = killed(config, tmp_path / "run")
    capsys.readouterr()
    assert run(config, left, "--resume", *PLAIN) == 2
    assert "nothing to resume; start without --resume" in capsys.readouterr().err
    assert run(config, left, *PLAIN) == 0
    assert not [p.name for p in left.iterdir() if p.name.endswith(".tmp") or "-" in p.name]


@pytest.mark.slow
def test_killed_while_it_replaces_a_run_that_run_goes_on(config, tmp_path, killed):
    assert run(config, tmp_path / "run", *PLAIN) == 0
    report = (tmp_path / "run" / "privacy_report.md").read_text()
    left = killed(config, tmp_path / "run", "overwrite=true", "steps=5")
    assert run(config, left, "--resume", *PLAIN) == 0
    assert (left / "privacy_report.md").read_text() == report
    left.rename(tmp_path / "first")
    left = killed(config, tmp_path / "run", "overwrite=true", "steps=5")
    assert run(config, left, "overwrite=true", "steps=5", *PLAIN) == 0
    assert not list(left.glob("replaced-*"))


def test_without_its_checkpoint_both_ways_say_the_same(config, tmp_path, capsys):
    assert run(config, tmp_path / "run", *PLAIN) == 0
    (tmp_path / "run" / CHECKPOINT).unlink()
    capsys.readouterr()
    for arguments in ([], ["--resume"]):
        assert run(config, tmp_path / "run", *PLAIN, *arguments) == 2
        error = capsys.readouterr().err
        assert f"no {CHECKPOINT}" in error
        assert "start anew with overwrite=true (steps that were released count on top)" in error
        assert "--resume" not in error


def test_a_folder_that_only_has_such_a_name_is_left_alone(tmp_path):
    mine = tmp_path / "replaced-parts"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    RunFolder.recover(tmp_path)
    assert contents(tmp_path) == {"replaced-parts/notes.txt": "mine"}


def test_files_that_nobody_can_attribute_are_not_touched(tmp_path):
    aside = tmp_path / "replaced-x1"
    aside.mkdir()
    for folder in (tmp_path, aside):
        (folder / CONFIG).write_text(folder.name)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"replaced-x1 holds files of a run .* move those"):
        RunFolder.recover(tmp_path)
    assert contents(tmp_path) == before
