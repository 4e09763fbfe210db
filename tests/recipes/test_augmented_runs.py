"""The vision recipe on augmented views."""

from __future__ import annotations

import pathlib

import pytest

from recipes.command import INTERRUPTED
from recipes.runfolder import load_checkpoint
from recipes.vision import main
from tests.helpers.image_files import write_batches
from tests.helpers.stopping import ctrl_c, stop_at

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SMALL = [
    "privacy.epsilon=null",
    "privacy.noise_multiplier=1",
    "plots=false",
    "model.channels=[4, 4]",
    "model.hidden=8",
    "scheme.epoch_length=null",
    "scheme.batch_size=20",
]
BY_SCHEME = {
    "dpsgd": ["steps=3"],
    "cyclic": ["scheme.cycle=2", "strategy.bands=2", "steps=3"],
    "balls_in_bins": ["strategy.bands=2", "steps=5"],
    "minsep": ["scheme.min_sep=2", "strategy.bands=2", "steps=3"],
}


def _run(config, output, *options):
    return main(["--config", str(CONFIGS / config), "--output", str(output), *SMALL, *options])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_views_resume_in_the_same_model(tmp_path, monkeypatch, workers):
    """The views of a step are drawn again after an interruption, also in other processes."""
    root = tmp_path / "data"
    write_batches(root, size=20)
    options = [f"data.root={root}", *BY_SCHEME["minsep"], "data.augment=true", "data.views=3"]
    options += ["seed=5", "checkpoint_every=1", f"num_workers={workers}"]
    assert _run("cifar10_minsep.yaml", tmp_path / "whole", *options) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 2, ctrl_c)
        assert _run("cifar10_minsep.yaml", tmp_path / "again", *options) == INTERRUPTED
    assert (
        _run("cifar10_minsep.yaml", tmp_path / "again", *options, "num_workers=0", "--resume") == 0
    )
    assert _run("cifar10_minsep.yaml", tmp_path / "plain", *options, "data.views=1") == 0
    whole, again, plain = (
        load_checkpoint(tmp_path / name)["run"]["ledger"] for name in ("whole", "again", "plain")
    )
    assert again == whole != plain


@pytest.mark.slow
def test_changed_images_are_refused_on_resume(tmp_path, capsys):
    for size, name in ((20, "data"), (20, "other")):
        write_batches(tmp_path / name, size=size)
    options = [*BY_SCHEME["dpsgd"], "seed=5"]
    assert (
        _run("cifar10_dpsgd.yaml", tmp_path / "run", f"data.root={tmp_path / 'data'}", *options)
        == 0
    )
    batch = tmp_path / "data" / "cifar-10-batches-py" / "data_batch_3"
    raw = bytearray(batch.read_bytes())
    raw[len(raw) // 2] ^= 1  # one bit of one pixel
    batch.write_bytes(bytes(raw))
    resume = [f"data.root={tmp_path / 'data'}", *options, "--resume"]
    assert _run("cifar10_dpsgd.yaml", tmp_path / "run", *resume) == 2
    assert "dataset has changed" in capsys.readouterr().err
