"""NoiseOptions: what is drawn, said, saved and refused."""

import itertools

import numpy as np
import pytest
import torch

from dptrain import BLT, BSR, BallsInBins, BandMF, Guarantee, Kind, MatrixMechanism, NoiseOptions
from dptrain.engine.private_training import SEED_NOTE
from dptrain.engine.sealed import seal
from dptrain.noise.generators import Normals
from dptrain.reporting.report import conditions
from dptrain.strategies.toeplitz.bisr import BISR
from dptrain.strategies.trees.tree import Tree, TreeRestart
from tests.engine.test_private_training_resume import run, through_disk
from tests.helpers.engine import (
    everything_every_step,
    images,
    make,
    released,
    separated,
    small_net,
    train,
    watch_releases,
)

SECURE = {"secure": True, "seed": None}


def pinned_secrets(monkeypatch):
    """Fresh entropy that is the same in every run, so that secure runs can be compared."""
    numbers = itertools.count(11)
    monkeypatch.setattr("dptrain.core.randomness.secrets.randbits", lambda bits: next(numbers))


def test_secure_noise_is_what_the_secure_generator_draws(monkeypatch):
    pinned_secrets(monkeypatch)
    model, data = small_net(), images()
    private = make(
        model, data, scheme=everything_every_step(24, 3), max_grad_norm=1e-9,
        noise_multiplier=1e9, lr=0.0, **SECURE,
    )  # fmt: skip
    for step in range(3):
        train(private, batches=1)
        expected = torch.empty(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        bits = private.optimizer.noise.grid_bits
        Normals(12, secure=True).fill(
            expected, group=0, step=step, bits=bits
        )  # 11 is the sampler's
        # R = 1e-9: the clipped sum of 24 gradients is at most 2.4e-8 beside the noise.
        expected = (expected * 2.0**-bits).float()
        torch.testing.assert_close(released(private, 24.0), expected, rtol=3e-7, atol=2.5e-8)


def test_secure_and_fast_runs_share_everything_but_the_noise(monkeypatch):
    ends = []
    for options in (SECURE, {"seed": None}):
        pinned_secrets(monkeypatch)
        private, _ = run("hooks", noise_multiplier=0.0, **options)
        ends.append(torch.cat([p.flatten() for p in private.optimizer.params]))
    assert torch.equal(*ends)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("stop_after", [4, 5, 8])
def test_a_secure_run_resumes_bit_for_bit(monkeypatch, stop_after):
    pinned_secrets(monkeypatch)
    _, expected = run("hooks", **SECURE)
    pinned_secrets(monkeypatch)
    first, _ = run("hooks", stop_after=stop_after, **SECURE)
    state = through_disk(first.state_dict())
    second, model = run("hooks", resume=state, **SECURE)  # with other fresh seeds of its own
    assert second.steps_executed == 10
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_bfloat16_run_resumes_bit_for_bit():
    options = {"noise_dtype": torch.bfloat16}
    _, expected = run("hooks", **options)
    first, _ = run("hooks", stop_after=8, **options)
    _, model = run("hooks", resume=through_disk(first.state_dict()), **options)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(
    "options",
    [
        {**separated(24, 14), "strategy": BandMF(bands=4)},
        {"scheme": BallsInBins(bins=7, epochs=2, dataset_size=24), "strategy": BLT(buffers=2)},
    ],
)
def test_a_run_with_its_past_noise_in_a_file_releases_the_same_bits(options, tmp_path):
    """Every release, and those after a checkpoint of the one is resumed as the other."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    memory, file = (
        make(small_net(), images(), noise_folder=each, **options) for each in (None, folder)
    )
    expected, found = watch_releases(memory), watch_releases(file)
    train(memory)
    train(file, steps=6)
    state = through_disk(file.state_dict())
    train(file)
    assert memory.steps_executed == file.steps_executed == 14
    assert memory.optimizer.noise.buffer_bytes == file.optimizer.noise.buffer_bytes > 0
    resumed = make(small_net(), images(), **{**options, "seed": 6})
    rest = watch_releases(resumed)
    resumed.load_state_dict(state)
    train(resumed)
    assert [len(each) for each in (expected, found, rest)] == [14, 14, 8]
    for one, other in zip([*found, *rest], [*expected, *expected[6:]], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("keyword", "values"),
    [
        ("secure", (False, True)),
        ("dtype", (torch.float32, torch.bfloat16)),
        ("regenerate", (False, True)),
    ],
)
def test_resuming_with_other_noise_is_refused_both_ways(keyword, values):
    for one, other in (values, values[::-1]):
        common = {"seed": None, **separated(24, 10)}
        first = make(small_net(), images(), noise=NoiseOptions(**{keyword: one}), **common)
        train(first, batches=2)
        state = through_disk(first.state_dict())
        second = make(small_net(), images(), noise=NoiseOptions(**{keyword: other}), **common)
        before = second.state_dict()
        with pytest.raises(ValueError, match=rf"noise.{keyword}={one}, .*noise.{keyword}={other}"):
            second.load_state_dict(state)
        after = second.state_dict()
        assert after["steps_executed"] == before["steps_executed"] == 0
        assert after["private"]["noise"]["seed"] == before["private"]["noise"]["seed"]


def test_a_secure_stream_refuses_the_state_of_a_fast_one():
    """Even if somebody edits the settings: the stream's own state names its generator."""
    common = {"scheme": everything_every_step(24, 3), "seed": None}
    for one, other in ((False, True), (True, False)):
        first = make(small_net(), images(), secure=one, **common)
        second = make(small_net(), images(), secure=other, **common)
        state = through_disk(first.state_dict())
        state["settings"]["noise"]["secure"] = other
        with pytest.raises(ValueError, match=r"generator.*AES-256-CTR"):
            second.load_state_dict(seal(state))


def test_the_guarantee_names_the_generator():
    common = {"scheme": everything_every_step(24, 2), "target_delta": 1e-3}
    fast = make(small_net(), images(), **common).guarantee()
    safe = make(small_net(), images(), **common, **SECURE).guarantee()
    assert fast.noise_generator == "AES-256-CTR by chunk, rounded normals with dither"
    assert safe.noise_generator == Normals(0, secure=True).name
    assert f"drawn by {safe.noise_generator}" in str(safe)
    assert safe.kind is fast.kind
    assert safe.epsilon == fast.epsilon
    assert safe.mechanism_hash == fast.mechanism_hash
    assert set(safe.notes) == set(fast.notes) - {SEED_NOTE}
    assert any("AES-256-CTR" in line and "PCG64-DXSM" in line for line in conditions(safe))


def test_bfloat16_buffers_leave_an_estimate():
    options = {**separated(24, 10), "noise_multiplier": 2.0, "target_delta": 1e-2, "seed": None}
    whole = make(small_net(), images(), **options).guarantee()
    rough = make(small_net(), images(), noise_dtype=torch.bfloat16, **options).guarantee()
    assert whole.kind is not Kind.ESTIMATE
    assert rough.kind is Kind.ESTIMATE
    assert rough.epsilon == pytest.approx(whole.epsilon, rel=0.2)
    assert any("bfloat16" in note for note in rough.notes)
    assert any("bfloat16" in line for line in conditions(rough))
    assert any("must not be published" in line for line in conditions(rough))
    assert "WITHOUT PROOF" in str(rough)
    # Nothing is kept of independent noise, so nothing is rounded.
    scheme = everything_every_step(24, 2)
    exact = make(
        small_net(), images(), scheme=scheme, noise_dtype=torch.bfloat16, target_delta=1e-2
    ).guarantee()
    assert exact.kind is not Kind.ESTIMATE


def test_a_checkpoint_of_a_bfloat16_run_states_an_estimate():
    """Its guarantees are plain JSON that anybody may read; a calibrated target is one of them."""
    options = {
        "scheme": BallsInBins(bins=4, epochs=2, dataset_size=24),
        "strategy": BSR(bands=3),
        "noise_multiplier": None,
        "target_epsilon": 4.0,
        "target_delta": 1e-2,
        "noise_dtype": torch.bfloat16,
        "accountant": "balls-in-bins-renyi",  # the same noise both times
    }
    private = make(small_net(), images(), **options)
    train(private, batches=3)
    state = through_disk(private.state_dict())
    (written,) = (Guarantee.from_json(text) for text in state["guarantees"])
    assert written == private.guarantee()
    assert written.kind is Kind.ESTIMATE
    assert written.noise_generator == "AES-256-CTR by chunk, rounded normals with dither"
    other = make(small_net(), images(), **options)
    other.load_state_dict(state)
    train(other, batches=1)
    assert other.guarantee().steps_executed == 4
    assert other.guarantee().kind is Kind.ESTIMATE
    assert set(written.notes) <= set(other.guarantee().notes)


def test_noise_drawn_again_is_the_noise_that_was_kept():
    """BSR's inverse is dense, so every step draws all earlier rows again; float32 sums differ."""
    gradients = []
    for again in (False, True):
        options = {**separated(24, 8), "strategy": BSR(bands=3), "regenerate_noise": again}
        private = make(small_net(), images(), lr=0.0, **options)
        rows = []
        while private.steps_executed < 8:
            train(private, batches=1)
            rows.append(released(private, 1.0))
        gradients.append(torch.stack(rows))
    np.testing.assert_allclose(*gradients, atol=1e-5)
    assert not make(
        small_net(), images(), **{**options, "regenerate_noise": True}
    ).optimizer.noise.state_dict()["buffers"][0]


def test_a_mechanism_of_a_checkpoint_takes_the_options_too():
    first = make(small_net(), images(), **separated(24, 10), **SECURE)
    train(first, batches=2)
    state = through_disk(first.state_dict())
    second = make(
        small_net(), images(), mechanism=MatrixMechanism.from_dict(state["mechanism"]), **SECURE
    )
    second.load_state_dict(state)
    assert second.steps_executed == 2


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"secure": True, "seed": 7}, ValueError, r"secure=True with a seed.*Leave seed out"),
        ({"secure": 1}, TypeError, "secure=1"),
        ({"regenerate_noise": None}, TypeError, "regenerate=None"),
        ({"noise_dtype": torch.float16}, ValueError, r"dtype=torch\.float16.*bfloat16"),
        ({"noise_dtype": "bfloat16"}, TypeError, "dtype='bfloat16'"),
        (
            {"noise_dtype": torch.bfloat16, "regenerate_noise": True},
            ValueError,
            "dtype.*regenerate=True",
        ),
        ({"noise_folder": 3}, TypeError, "folder=3"),
        ({"noise_folder": b"here"}, TypeError, "folder=b'here'"),
        ({"noise_folder": "x", "regenerate_noise": True}, ValueError, "folder='x'.*regenerate"),
        ({"noise_folder": "no/such/place"}, FileNotFoundError, "no/such/place"),
    ],
)
def test_impossible_options(options, kind, match):
    with pytest.raises(kind, match=match):
        make(small_net(), images(), scheme=everything_every_step(24, 1), **options)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (Tree(), {}),
        (TreeRestart(height=2), SECURE),
        (BISR(inverse_bands=3), {"regenerate_noise": True}),
        (BISR(inverse_bands=3), {"noise_dtype": torch.bfloat16}),
    ],
)
def test_strategies_with_other_streams_run_and_resume(strategy, options):
    """A tree has more rows than steps; nothing but its stream and its accountant may care."""
    scheme = BallsInBins(bins=6, epochs=2, dataset_size=24)
    common = {"scheme": scheme, "strategy": strategy, **options}
    model = small_net()
    whole = make(model, images(), **common)
    train(whole, batches=5)
    state = through_disk(whole.state_dict())
    train(whole)
    resumed_model = small_net()
    resumed = make(resumed_model, images(), **common)
    resumed.load_state_dict(state)
    train(resumed)
    assert whole.steps_executed == resumed.steps_executed == 12
    for mine, other in zip(resumed_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, other)
    guarantee = resumed.guarantee(1e-2)
    assert 0 < guarantee.epsilon < 50
    assert (guarantee.kind is Kind.ESTIMATE) == ("noise_dtype" in options)


def test_noise_that_cannot_be_drawn_again_is_refused():
    with pytest.raises(ValueError, match="regenerate=True with strategy=Tree"):
        make(
            small_net(), images(), scheme=BallsInBins(bins=6, epochs=2, dataset_size=24),
            strategy=Tree(), regenerate_noise=True,
        )  # fmt: skip
