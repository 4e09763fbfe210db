"""Checkpoints in folders go on to the same bits, on other ranks to the same numbers, or not."""

from __future__ import annotations

import math

import pytest
import torch.distributed.checkpoint as dcp

from tests.distributed.test_fully_sharded import close
from tests.helpers import divided_checkpoints as runs
from tests.helpers.worlds import EACH, WORLDS, found_by

# Its ranks do all that the module asks for, which takes half a minute.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(folder):
    """What the ranks found, by how many there were and what they did."""
    for name in runs.CASES:
        runs.saved(folder, name, 1)
    return found_by(runs.worker, folder)


@pytest.mark.parametrize("name", runs.CASES)
@pytest.mark.parametrize("world", EACH)
def test_a_folder_goes_on_to_the_same_bits(found, world, name):
    """Model, noise, optimizer, ledger, sampler: as those of a run that never stopped."""
    for one in found(world, name):
        assert set(one) == {"never stopped", 1, *WORLDS[: WORLDS.index(world) + 1]}
        close(one[world], one["never stopped"], tolerance=0.0)


@pytest.mark.parametrize("name", runs.CASES)
@pytest.mark.parametrize("world", EACH)
def test_any_number_of_ranks_goes_on(found, folder, world, name):
    """To the same noise bit for bit, and to the parameters up to the order of floats' sums."""
    for one in found(world, name):
        for before in (1, *WORLDS[: WORLDS.index(world)]):
            for what in ("parameters", "optimizer", "schedulers"):
                close(one[before][what], one["never stopped"][what])
            for what in ("noise", "loader"):
                close(one[before][what], one["never stopped"][what], tolerance=0.0)
            # Bits of releases, which another number of ranks rounds otherwise, but for the first.
            assert len(one[before]["ledger"]) == len(one["never stopped"]["ledger"])
    alone = runs.outcome(
        runs.trained(name, sharded=False, folder=runs.path_of(folder, name, world))
    )
    close(alone["parameters"], one["never stopped"]["parameters"])
    close(alone["optimizer"], one["never stopped"]["optimizer"])


@pytest.mark.parametrize("name", runs.CASES)
def test_a_process_by_itself_goes_on_to_the_same_bits(found, folder, name):
    found(2, name)
    again = runs.trained(name, sharded=False, folder=runs.path_of(folder, name, 1))
    close(runs.outcome(again), runs.outcome(runs.trained(name, sharded=False)), tolerance=0.0)


@pytest.mark.parametrize("world", EACH)
def test_every_entry_is_there_once(found, folder, world):
    """And by the names of the user's model, as DTensors of which each rank wrote its own."""
    found(world, "tied")
    metadata = dcp.FileSystemReader(runs.path_of(folder, "tied", world)).read_metadata()
    entries = metadata.state_dict_metadata
    private, _ = runs.made("tied", sharded=False)
    for name, value in private.module.state_dict().items():
        for key in (f"run.module.{name}", "run.rest"):
            sizes = [math.prod(chunk.sizes) for chunk in entries[key].chunks]
            assert len(sizes) == (1 if key == "run.rest" else min(world, value.shape[0]))
        assert entries[f"run.module.{name}"].size == value.shape
    kept = sum(p.numel() for p in private.module.parameters())
    noise = [n for n in entries if n.startswith("run.noise.")]
    assert sum(entries[n].size.numel() for n in noise) == kept  # one row of past noise
    assert entries["run.rest"].size.numel() < 2**16  # nothing that grows with the model
    assert len(list(runs.path_of(folder, "tied", world).glob("*.distcp"))) == world


@pytest.mark.parametrize("world", EACH)
def test_others_cannot_read_it(found, folder, world):
    for one in found(world, "modes"):
        assert one.pop(f"conv_{world}") == 0o700
        assert set(one.values()) == {0o600}
        assert len(one) == world + 1


REFUSED = {
    "exists": "already exists: name another",
    "missing": "holds no checkpoint",
    "another each": "the ranks of this run differ (folder:",
    "mechanism": "belongs to another mechanism",
    "settings": "was written with max_grad_norm=0.5, and this run has max_grad_norm=0.25",
    "schedulers": "register them before",
    "model": "belongs to another module",
    "ledger": "come from different runs",
    "whole model": "use private.state_dict(share=True)",
    "mixed": "is damaged",
    "flipped module.4.weight": "is damaged",
    "flipped optimizer.0.5.exp_avg": "is damaged",
    "flipped noise": "is damaged",
    "flipped rest": "is damaged",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason(found, name):
    for one in found(2, "refusals"):
        assert "ValueError: " in one[name], one[name]  # of this rank, or told of another
        assert REFUSED[name] in one[name]


class App:
    """As torch's tutorials have a program keep its state."""

    def __init__(self, private):
        self.private = private

    def state_dict(self):
        return {"private": self.private.state_dict()}

    def load_state_dict(self, state):
        self.private.load_state_dict(state["private"])


@pytest.mark.parametrize("held", [lambda private: private, App])
def test_torch_is_not_given_the_run_itself(tmp_path, held):
    """It would write it for all to read, and not load the optimizer's state into a new run."""
    private = runs.trained("tied", sharded=False, steps=1)
    with pytest.raises(RuntimeError, match=r"private\.save\(folder\)"):
        dcp.save({"run": held(private)}, checkpoint_id=tmp_path / "run", no_dist=True)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    private.save(tmp_path / "saved")
    with pytest.raises(RuntimeError, match=r"private\.load\(folder\)"):
        dcp.load({"run": held(private)}, checkpoint_id=tmp_path / "saved", no_dist=True)


def test_what_cannot_be_is_said(found):
    for one in found(2, "refusals"):
        assert one["no path"].startswith("TypeError: folder=3")
        assert one["detached"].startswith("RuntimeError: private.detach() has ended this run")
