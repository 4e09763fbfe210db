"""A bit of a run's files that has changed ends in a sentence, and never in another run."""

from __future__ import annotations

import random

import pytest
import torch

from recipes.runfolder import CHECKPOINT, LEDGER, load_checkpoint
from tests.helpers.stopping import ctrl_c, stop_at
from tests.helpers.tiny_vision import PLAIN, run
from tests.recipes.test_resume import _same


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    config = folder / "empty.yaml"
    config.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        run(config, folder / "run", *PLAIN)
    return config, folder / "run"


def outcome(folder):
    try:
        return "", load_checkpoint(folder)
    except ValueError as error:
        return str(error), None


@pytest.mark.slow
def test_one_bit_of_the_file_is_noticed_or_changes_nothing(stopped, tmp_path):
    _, output = stopped
    whole = (output / CHECKPOINT).read_bytes()
    saved = load_checkpoint(output)
    draw, noticed = random.Random(0), 0
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        (tmp_path / CHECKPOINT).write_bytes(flipped)
        told, found = outcome(tmp_path)
        if found is None:
            assert "is damaged" in told
            noticed += 1
        else:
            assert _same(found, saved)  # the bit was in the padding of the archive
    assert noticed > 50


def test_a_flipped_bit_ends_in_one_line(stopped, capsys):
    config, output = stopped
    path = output / CHECKPOINT
    whole = path.read_bytes()
    state = torch.load(path, weights_only=True)
    weight = next(iter(state["run"]["module"].values()))
    weight.view(torch.int32).view(-1)[7] ^= 1 << 20
    torch.save(state, path)
    assert run(config, output, "--resume", *PLAIN) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert "checkpoint.pt is damaged" in error
    path.write_bytes(whole)


@pytest.mark.slow
def test_a_lost_ledger_ends_in_one_line_or_is_said(stopped, capsys):
    config, output = stopped
    (output / LEDGER).unlink()
    for _ in range(2):
        assert run(config, output, "--resume", *PLAIN) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert "does not match the checkpoint" in error
        assert "--accept-lost-ledger" in error
    assert run(config, output, "--resume", "--accept-lost-ledger", *PLAIN) == 0
    report = (output / "privacy_report.md").read_text()
    assert "resumed after 3 steps without a ledger of released steps" in report
