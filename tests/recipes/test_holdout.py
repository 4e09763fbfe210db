"""A part of the training set in place of the test set, to choose hyperparameters by."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from recipes.data import Images, Split, digits
from recipes.runfolder import load_checkpoint, read_metrics
from recipes.task import evenly_spread
from tests.helpers.image_files import random_images
from tests.helpers.tiny_vision import PLAIN, run


def _split(counts=(40, 20, 10), **options) -> Split:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    pixels = torch.from_numpy(random_images(len(labels))[0])
    test = Images(*map(torch.from_numpy, random_images(5, seed=1)))
    train = Images(pixels, labels, **options)
    return Split(train=train, test=test, channels=3, classes=len(counts), image_size=32)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_every_class_gives_its_share_and_no_image_is_lost(share):
    split = _split()
    parts = split.hold_out(share, seed=3)
    held = [round(share * count) for count in (40, 20, 10)]
    assert parts.test.labels.bincount().tolist() == held
    assert len(parts.train) + len(parts.test) == 70
    both = torch.cat([parts.train.pixels, parts.test.pixels]).flatten(1).numpy()
    assert np.array_equal(
        np.unique(both, axis=0), np.unique(split.train.pixels.flatten(1).numpy(), axis=0)
    )
    assert len(np.unique(both, axis=0)) == 70  # no image is on both sides
    assert (parts.channels, parts.classes, parts.image_size) == (3, 3, 32)


def test_the_seed_decides_and_nothing_else():
    state = torch.get_rng_state()
    first, again, other = (_split().hold_out(0.2, seed=seed) for seed in (0, 0, 1))
    assert first.test.fingerprint == again.test.fingerprint != other.test.fingerprint
    assert first.train.fingerprint == again.train.fingerprint
    assert torch.equal(torch.get_rng_state(), state)


def test_only_what_is_trained_on_is_augmented():
    parts = _split(transform=lambda image, views: torch.stack([image] * views), views=2)
    parts = parts.hold_out(0.5, seed=0)
    assert parts.train[0][0].shape == (2, 3, 32, 32)
    assert parts.test[0][0].shape == (3, 32, 32)


def test_digits_are_held_out_too():
    whole = digits(image_size=8)
    parts = whole.hold_out(0.25, seed=0)
    assert len(parts.test) == 360  # of 1,437
    assert len(parts.train) + len(parts.test) == len(whole.train)


@pytest.mark.parametrize(
    ("counts", "share", "message"),
    [
        ((40, 1), 0.5, "a class has 1 training images"),
        ((40, 5), 0.1, "a class has 5 training images"),
        ((40, 5), 0.9, "a class has 5 training images"),
        ((40, 5), 0.0, "must lie strictly between 0 and 1"),
        ((40, 5), 1.0, "must lie strictly between 0 and 1"),
    ],
)
def test_impossible_shares_are_refused(counts, share, message):
    with pytest.raises(ValueError, match=rf"holdout={share}: .*{message}|{message}"):
        _split(counts).hold_out(share, seed=0)


@pytest.mark.parametrize("share", ["0", "1", "-0.1", "half"])
def test_the_field_is_checked_before_anything_is_read(config, tmp_path, capsys, share):
    assert run(config, tmp_path / "run", *PLAIN, f"data.holdout={share}") == 2
    assert f"data.holdout={share}".replace("half", '"half"') in capsys.readouterr().err


@pytest.mark.slow
def test_the_records_say_which_examples_they_are_of(config, tmp_path, capsys):
    output = tmp_path / "run"
    assert run(config, output, *PLAIN, "data.holdout=0.25", "plots=true") == 0
    records = read_metrics(output / "metrics.jsonl")
    assert {r["split"] for r in records} == {"train", "held-out"}
    assert all(r["not_for_release"] for r in records)
    assert [r["step"] for r in records if r["split"] == "held-out"] == [0, 2, 4, 6]
    shown = capsys.readouterr().out
    last = records[-1]
    assert f"held-out loss {last['loss']:.4f}, accuracy {last['accuracy']:.4f} on 360" in shown
    assert "not for release: no guarantee covers them" in shown
    # What the folder keeps to publish says that they were held out, and not how they did.
    kept = (output / "summary.txt").read_text()
    assert "360 images of the training set were held out" in kept
    assert f"{last['loss']:.4f}" not in kept
    assert (output / "curves.png").is_file()
    # δ = 1/(2N) counts who is trained on.
    report = json.loads((output / "privacy_report.json").read_text())
    assert report["guarantee"]["delta"] == 1 / (2 * 1077)


@pytest.mark.slow
def test_a_resumed_run_keeps_what_is_held_out(config, tmp_path, capsys):
    options = [*PLAIN, "data.holdout=0.25"]
    assert run(config, tmp_path / "run", *options) == 0
    assert run(config, tmp_path / "run", *options, "--resume") == 0
    assert load_checkpoint(tmp_path / "run")["settings"]["data"]["holdout"] == 0.25
    capsys.readouterr()
    assert run(config, tmp_path / "run", *PLAIN, "--resume") == 2
    assert "data.holdout: the run has 0.25, now None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "limit", "rows"),
    [
        (10, None, None),
        (10, 10, None),
        (10, 11, None),
        (10, 5, [0, 2, 4, 6, 8]),
        (10, 3, [0, 3, 6]),
        (10, 1, [0]),
        (10, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_limited_evaluation_spreads_over_the_set(count, limit, rows):
    assert evenly_spread(count, limit) == rows


def test_a_limited_evaluation_sees_every_class_of_a_sorted_set():
    labels = np.repeat(np.arange(10), 1000)
    assert np.bincount(labels[evenly_spread(10_000, 2000)]).tolist() == [200] * 10
