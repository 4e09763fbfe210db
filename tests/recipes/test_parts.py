"""The recipe's data, model and folder, each on its own."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch

from recipes.data import digits
from recipes.models import vgg
from recipes.runfolder import RunFolder, load_checkpoint, read_metrics
from recipes.schedule import Schedule


def test_digits_are_split_by_class_and_scaled_by_public_constants():
    split = digits(image_size=32)
    x, y = split.train.tensors
    x_test, y_test = split.test.tensors
    assert x.shape == (1437, 1, 32, 32)
    assert x_test.shape == (360, 1, 32, 32)
    assert x.dtype == torch.float32
    assert -1 <= x.min() <= x.max() <= 1
    # 1,797 images of about 180 a class, of which a fifth is held out.
    assert (y_test.bincount(minlength=10) - 36).abs().max() <= 1
    assert len(y.unique()) == 10
    # No image is in both parts (the data set holds no two equal images).
    both = torch.cat([x, x_test]).flatten(1)
    assert len(both.unique(dim=0)) == 1797


def test_digits_are_the_same_for_the_same_seed_only():
    small = {"image_size": 8}
    first, again, other = digits(**small), digits(**small), digits(**small, seed=1)
    assert torch.equal(first.test.tensors[0], again.test.tensors[0])
    assert not torch.equal(first.test.tensors[0], other.test.tensors[0])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_an_impossible_split_is_refused(fraction):
    with pytest.raises(ValueError, match="test_fraction"):
        digits(test_fraction=fraction)


def test_vgg_keeps_examples_apart():
    torch.manual_seed(0)
    model = vgg(in_channels=1, classes=10, image_size=16, channels=[8, 16], groups=4, hidden=8)
    x = torch.randn(3, 1, 16, 16)
    changed = x.clone()
    changed[1] += 1
    before, after = model(x), model(changed)
    assert before.shape == (3, 10)
    assert torch.allclose(before[[0, 2]], after[[0, 2]], atol=1e-6)
    assert not torch.allclose(before[1], after[1], atol=1e-3)


def test_vgg_of_the_demo_has_the_stated_layers():
    model = vgg(in_channels=1, classes=10)
    widths = [m.out_channels for m in model if isinstance(m, torch.nn.Conv2d)]
    assert widths == [32, 32, 64, 64, 128, 128]
    assert sum(isinstance(m, torch.nn.GroupNorm) for m in model) == 6
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


def test_without_blocks_and_dense_layer_the_model_is_linear():
    layers = list(vgg(in_channels=3, classes=10, image_size=8, channels=[], hidden=0))
    assert [type(layer) for layer in layers] == [torch.nn.Flatten, torch.nn.Linear]
    assert layers[1].weight.shape == (10, 3 * 8 * 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": [0]}, "has at least one"),
        ({"channels": [12], "groups": 8}, "groups=8"),
        ({"hidden": -1}, "hidden=-1"),
        ({"channels": [8, 8, 8], "image_size": 4}, "halved 3 times"),
    ],
)
def test_impossible_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        vgg(in_channels=1, classes=10, **changes)


@pytest.mark.parametrize(
    ("name", "factors"),
    [("constant", [1, 1, 1]), ("linear", [1, 0.5, 0]), ("cosine", [1, 0.5, 0])],
)
def test_schedules(name, factors):
    schedule = Schedule(name, 10)
    assert [schedule(step) for step in (0, 5, 10)] == pytest.approx(factors)


def test_late_linear_falls_in_the_middle_half():
    """From η to η/20 over steps n/4 to 3n/4, as in Dong & Ganesh 2026, section 7.2."""
    factors = [Schedule("late_linear", 1500)(step) for step in range(1501)]
    assert factors[:376] == [1.0] * 376
    assert factors[1125:] == pytest.approx([1 / 20] * 376)
    assert factors[750] == pytest.approx((1 + 1 / 20) / 2)
    falls = [a - b for a, b in itertools.pairwise(factors[375:1126])]
    assert falls == pytest.approx([0.95 / 750] * 750)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    folder = RunFolder(tmp_path, config="steps: 3\n")
    for step in (1, 2, 3):
        folder.log({"step": step, "split": "train", "loss": 1.0}, private=True)
        folder.log({"step": step, "split": "test", "loss": 1.0}, private=False)
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "spl')  # cut off by a crash
    folder = RunFolder(tmp_path, completed_steps=2)
    folder.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == [1, 1, 2, 2]
    for record in records:
        assert record.get("not_for_release", False) == (record["split"] == "train")


def test_a_run_is_not_overwritten_unasked_and_other_files_stay(tmp_path):
    folder = RunFolder(tmp_path, config="a: 1\n")
    folder.close()
    (tmp_path / "notes.txt").write_text("mine")
    for remedy in (r"no checkpoint\.pt.*overwrite=true", r"--resume.*overwrite=true"):
        with (
            pytest.raises(ValueError, match=remedy),
            RunFolder.claim(tmp_path, overwrite=False),
        ):
            pass
        folder.save_checkpoint({"private": {}})
    with RunFolder.claim(tmp_path, overwrite=True):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with RunFolder.claim(tmp_path, overwrite=False):
        pass


@pytest.mark.parametrize("where", ["notes.txt", "notes.txt/run", "notes.txt/deep/run"])
def test_a_folder_that_cannot_be_is_refused(tmp_path, where):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"output=.*is a file; name a"):
        RunFolder.refuse(tmp_path / where, overwrite=True)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails_to_start_leaves_the_old_one(tmp_path, error):
    RunFolder(tmp_path, config="a: 1\n").close()
    before = sorted(path.name for path in tmp_path.iterdir())

    def fail(folder):
        with RunFolder.claim(folder, overwrite=True):
            RunFolder(folder, config="b: 2\n").close()
            (folder / "model").mkdir()
            raise error

    with pytest.raises(error):
        fail(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
    with pytest.raises(error):
        fail(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path):
    folder = RunFolder(tmp_path, config="a: 1\n")
    folder.save_checkpoint({"step": 1, "x": torch.ones(2), "private": {}})
    with pytest.raises(Exception, match="pickle"):
        folder.save_checkpoint({"step": 2, "x": lambda: None, "private": {}})
    folder.close()
    assert load_checkpoint(tmp_path)["step"] == 1


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX files")
def test_a_checkpoint_is_its_owners_alone(tmp_path):
    """It holds the seeds from which the noise can be subtracted."""
    (tmp_path / "checkpoint.pt.tmp").write_text("left by a crash")
    folder = RunFolder(tmp_path, config="a: 1\n")
    folder.save_checkpoint({"step": 1, "private": {}})
    folder.close()
    assert (tmp_path / "checkpoint.pt").stat().st_mode & 0o077 == 0


def test_no_checkpoint_to_resume(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        load_checkpoint(tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
        load_checkpoint(tmp_path)


def test_a_damaged_line_of_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2\n{"st')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not valid JSON"):
        read_metrics(tmp_path / "metrics.jsonl")
