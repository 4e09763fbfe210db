"""What the library refuses on the way ends in one line; a bug shows where it is."""

from __future__ import annotations

import pytest
import torch

from dptrain import PrivacyEngine
from dptrain.sampling import PrivateLoader
from recipes.runfolder import LEDGER
from tests.helpers.stopping import ctrl_c, stop_at
from tests.helpers.tiny_vision import PLAIN, run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return path


def last_line(capsys):
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_a_step_that_was_released_before(config, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        run(config, tmp_path / "run", *PLAIN)
    with (tmp_path / "run" / LEDGER).open("a") as file:
        file.write('{"step": 3, "digest": "0123456789abcdef0123456789abcdef"}\n')
    assert run(config, tmp_path / "run", "--resume", *PLAIN) == 2
    line = last_line(capsys)
    assert line.startswith("error: step 3 was released before and now has a different result")
    assert "Resume from the latest checkpoint" in line


def test_a_ledger_that_goes_away_on_the_way(config, tmp_path, monkeypatch, capsys):
    stop_at(monkeypatch, 2, (tmp_path / "run" / LEDGER).unlink)
    assert run(config, tmp_path / "run", *PLAIN) == 2
    assert "ledger.jsonl was changed while this run was using it" in last_line(capsys)


def test_a_refusal_while_the_run_is_made(config, tmp_path, monkeypatch, capsys):
    """Not only values: what make_private refuses by another kind of error, too."""
    make = PrivacyEngine.make_private

    def with_seed(self, **given):
        return make(self, **{**given, "seed": 2.5})

    monkeypatch.setattr(PrivacyEngine, "make_private", with_seed)
    assert run(config, tmp_path / "run", *PLAIN) == 2
    assert last_line(capsys) == "error: seed=2.5 must be an integer, not float"


def test_too_little_memory(config, tmp_path, monkeypatch, capsys):
    def full():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    stop_at(monkeypatch, 2, full)
    assert run(config, tmp_path / "run", *PLAIN) == 2
    line = last_line(capsys)
    assert line.startswith("error: CUDA out of memory. Tried to allocate 2.00 GiB. Go on with")
    assert "max_physical_batch_size=" in line


def of_the_caller():
    raise RuntimeError("a bug")


def of_torch():
    torch.ones(2) @ torch.ones(3)


@pytest.mark.parametrize("bug", [of_the_caller, of_torch])
def test_a_bug_shows_its_traceback(config, tmp_path, monkeypatch, bug):
    stop_at(monkeypatch, 2, bug)
    with pytest.raises(RuntimeError, match=r"a bug|inconsistent tensor size") as found:
        run(config, tmp_path / "run", *PLAIN)
    assert bug.__name__ in [entry.name for entry in found.traceback]


def test_a_bug_of_torchs_within_the_library_shows_its_traceback(config, tmp_path, monkeypatch):
    """torch's own errors have no frame: the last one is the library's, at a line that calls it."""
    monkeypatch.setattr("dptrain.engine.optimizer.checksum", torch.stack)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateLoader, "report_microbatch", lambda self: torch.ones(2).view(3))
        with pytest.raises(RuntimeError, match="invalid for input"):
            run(config, tmp_path / "one", *PLAIN)
    with pytest.raises(RuntimeError, match="stack expects each tensor"):
        run(config, tmp_path / "two", *PLAIN)
