"""Interrupted and resumed runs, ledgers, and what a checkpoint refuses."""

import io
import json

import pytest
import torch

from dptrain import MatrixMechanism, Poisson, account
from dptrain.engine.private_training import FORMAT
from dptrain.engine.release_ledger import checksum
from dptrain.engine.sealed import seal
from tests.helpers.engine import (
    everything_every_step,
    flat,
    images,
    make,
    separated,
    small_net,
    train,
)


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(mode, stop_after=None, resume=None, micro=3, **options):
    model, data = small_net(dropout=0.3), images()
    private = make(
        model, data, mode, max_physical_batch_size=micro, **separated(len(data), 10), **options
    )
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, 3, 0.5)
    private.register_scheduler(scheduler)
    torch.manual_seed(99)
    if resume is not None:
        torch.manual_seed(12345)  # whatever the new process's generator holds
        private.load_state_dict(resume)
    remaining = None if stop_after is None else stop_after

    def tick():
        scheduler.step()

    train(private, batches=remaining, after_step=tick)
    return private, model


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("stop_after", [1, 2, 5, 8])
def test_resumed_run_is_bit_identical(mode, stop_after):
    """Also when the checkpoint is taken inside a logical step (microbatches, dropout, momentum)."""
    whole, expected = run(mode)
    first, _ = run(mode, stop_after=stop_after)
    second, model = run(mode, resume=through_disk(first.state_dict()))
    assert second.steps_executed == whole.steps_executed == 10
    assert torch.equal(flat(model), flat(expected))
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_resume_continues_with_fresh_entropy_noise():
    """seed=None: the seeds come from the checkpoint, not from the new engine."""
    first, _ = run("hooks", stop_after=4, seed=None)
    state = through_disk(first.state_dict())
    ends = [run("hooks", resume=state, seed=None)[1] for _ in range(2)]
    assert torch.equal(flat(ends[0]), flat(ends[1]))


def test_checkpoint_guarantee_is_the_accountants_answer():
    data = images()
    private = make(
        small_net(),
        data,
        scheme=Poisson(probability=0.2, dataset_size=len(data), steps=6),
        noise_multiplier=1.1,
        target_delta=1e-3,
    )
    train(private, batches=4)
    state = through_disk(private.state_dict())
    mechanism = MatrixMechanism.from_dict(state["mechanism"])
    assert mechanism.hash == state["mechanism_hash"] == private.mechanism.hash
    answer = account(mechanism, delta=1e-3)
    promised = private.guarantee()
    assert promised.epsilon == answer.epsilon == private.get_epsilon(1e-3)
    assert promised.steps_executed == 4
    assert promised.steps_planned == 6


def test_a_state_is_a_copy_and_a_rollback_with_a_changed_step_is_refused():
    private, model = run("hooks", stop_after=4, micro=None)
    state, before = private.state_dict(), flat(model)
    train(private, batches=2)
    private.load_state_dict(state)
    assert torch.equal(flat(model), before)
    train(private, batches=2)  # the same two steps again: nothing new is released
    private.load_state_dict(state)
    torch.manual_seed(1)  # another dropout mask
    with pytest.raises(RuntimeError, match="released before"):
        train(private, batches=1)


def test_resuming_without_a_ledger_is_noted_in_the_guarantee(tmp_path):
    options = {"scheme": everything_every_step(24, 4), "target_delta": 1e-3}
    for path, noted in ((None, True), (tmp_path / "ledger.jsonl", False)):
        first = make(small_net(), images(), ledger=path, **options)
        train(first, batches=2)
        second = make(small_net(), images(), ledger=path, **options)
        second.load_state_dict(through_disk(first.state_dict()))
        assert ("resumed after 2 steps" in str(second.guarantee())) is noted


def test_what_is_no_checkpoint_is_refused():
    private = make(small_net(), images(), scheme=everything_every_step(24, 2))
    with pytest.raises(ValueError, match="format"):
        private.load_state_dict({})
    with pytest.raises(ValueError, match="lacks"):
        private.load_state_dict({"format": FORMAT})
    for nothing in (None, 3, [], [3], "text"):
        with pytest.raises(TypeError, match=r"state is a .*private.state_dict\(\)"):
            private.load_state_dict(nothing)
        with pytest.raises(TypeError, match=r"state is a .*a loader's state_dict\(\)"):
            private.loader.load_state_dict(nothing)
        with pytest.raises(TypeError, match=r"state_dict is a .*optimizer.state_dict\(\)"):
            private.optimizer.load_state_dict(nothing)
    with pytest.raises(TypeError, match="scheduler"):
        private.register_scheduler(object())


def test_another_mechanism_is_refused():
    data = images()
    state = make(small_net(), data, scheme=everything_every_step(len(data), 3)).state_dict()
    for other in (
        {"scheme": everything_every_step(len(data), 4)},
        {"scheme": everything_every_step(len(data), 3), "noise_multiplier": 2.0},
    ):
        private = make(small_net(), data, **other)
        before = flat(private.module)
        with pytest.raises(ValueError, match="another mechanism"):
            private.load_state_dict(state)
        assert torch.equal(before, flat(private.module))
    private = make(small_net(), data, scheme=everything_every_step(len(data), 3), max_grad_norm=2.0)
    with pytest.raises(ValueError, match="max_grad_norm"):
        private.load_state_dict(state)


def test_steps_beyond_the_plan_are_refused():
    data = images()
    private = make(small_net(), data, scheme=everything_every_step(len(data), 2))
    train(private)
    with pytest.raises(RuntimeError, match="all 2 planned steps"):
        train(private)


def test_private_things_are_in_the_private_part():
    data = images()
    private = make(small_net(), data, scheme=everything_every_step(len(data), 2))
    train(private, batches=1)
    state = private.state_dict()
    public = {
        k: v for k, v in state.items() if k not in ("private", "module", "optimizer", "notes")
    }
    text = json.dumps(public, default=str)
    for word in ("seed", "rng", "nonfinite", "stream"):
        assert word not in text
    assert "only while nobody but the trainer knows it" in str(private.guarantee(1e-3))


def test_ledger_allows_an_equal_repeat_and_refuses_a_different_one(tmp_path, caplog):
    options = {"ledger": tmp_path / "ledger.jsonl"}
    first, _ = run("hooks", stop_after=4, micro=None, **options)
    old = through_disk(first.state_dict())
    train(first, batches=3)  # released after the checkpoint, then the machine dies
    second, _ = run("hooks", resume=old, micro=None, **options)
    assert "steps 4 to 6" in caplog.text
    assert second.steps_executed == 10
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 11

    state = through_disk(run("hooks", stop_after=4, micro=None)[0].state_dict())
    private = make(small_net(dropout=0.3), images(), **separated(24, 10), **options)
    private.register_scheduler(torch.optim.lr_scheduler.StepLR(private.optimizer, 3, 0.5))
    private.load_state_dict(state)
    for group in private.optimizer.param_groups:
        group["lr"] = 0.3
    train(private, batches=1)  # step 4 is still the same: its gradient knows no learning rate
    before = flat(private.module)
    with pytest.raises(RuntimeError, match="released before"):
        train(private)
    assert torch.equal(before, flat(private.module))


def test_a_new_run_on_an_old_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    data = images()
    scheme = everything_every_step(len(data), 3)
    train(make(small_net(), data, scheme=scheme, ledger=path))
    with pytest.raises(RuntimeError, match="released before"):
        train(make(small_net(), data, scheme=scheme, ledger=path, seed=6))
    with pytest.raises(ValueError, match="belongs to mechanism"):
        make(small_net(), data, scheme=scheme, noise_multiplier=3.0, ledger=path)
    with pytest.raises(ValueError, match="folder"):
        make(small_net(), data, scheme=scheme, ledger=tmp_path)
    path.write_text("{}\nnonsense\n")
    with pytest.raises(ValueError, match="cannot be read"):
        make(small_net(), data, scheme=scheme, ledger=path)


def test_a_ledger_line_cut_off_by_a_crash_is_dropped(tmp_path):
    path = tmp_path / "ledger.jsonl"
    data, scheme = images(), everything_every_step(24, 3)
    train(make(small_net(), data, scheme=scheme, ledger=path), batches=2)
    whole = path.read_text()
    path.write_text(whole[:-7])
    private = make(small_net(), data, scheme=scheme, ledger=path)
    assert len(private.optimizer.ledger.digests) == 1
    assert path.read_text() == whole[:-7]  # reading destroys nothing
    train(private)
    assert path.read_text().startswith(whole)  # the same step again, in the place of the piece
    assert len(path.read_text().splitlines()) == 4


def test_checksum_sees_one_bit_one_swap_and_one_move():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(300, 70, generator=generator), torch.randn(5, generator=generator)]
    seen = {checksum(tensors)}
    changes = 0
    for row in range(0, 300, 7):
        bit = [t.clone() for t in tensors]
        bit[0][row, 3] = torch.nextafter(bit[0][row, 3], torch.tensor(9.0))
        swap = [t.clone() for t in tensors]
        swap[0][row, 5], swap[0][row, 69] = tensors[0][row, 69], tensors[0][row, 5]
        for changed in (bit, swap):
            seen.add(checksum(changed))
            changes += 1
    seen.add(checksum([tensors[0].flatten(), tensors[1], torch.ones(1)]))
    seen.add(checksum(tensors[::-1]))
    assert len(seen) == 1 + changes + 2
    assert checksum([t.clone() for t in tensors]) in seen
    assert checksum([]) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"mechanism_hash": "0" * 64},
        {"noise_multiplier": 50.0},
        {"scheme": {"type": "Nonsense"}},
        {"steps_planned": 1},
    ],
)
def test_a_guarantee_of_something_else_is_refused(change):
    data = images()
    private = make(small_net(), data, scheme=everything_every_step(24, 3), target_delta=1e-3)
    private.guarantee()
    state = private.state_dict()
    state["guarantees"] = [json.dumps({**json.loads(t), **change}) for t in state["guarantees"]]
    again = make(small_net(), data, scheme=everything_every_step(24, 3), target_delta=1e-3)
    with pytest.raises(ValueError, match="guarantee of another mechanism"):
        again.load_state_dict(seal(state))
    assert again.steps_executed == 0


def test_what_a_checkpoint_claims_is_computed_again():
    data = images()
    private = make(small_net(), data, scheme=everything_every_step(24, 3), target_delta=1e-3)
    truth = private.guarantee().epsilon
    state = private.state_dict()
    state["guarantees"] = [
        json.dumps({**json.loads(t), "epsilon": 0.001}) for t in state["guarantees"]
    ]
    again = make(small_net(), data, scheme=everything_every_step(24, 3))
    again.load_state_dict(seal(state))
    assert again.guarantee().epsilon == truth  # at the target's δ, which the checkpoint names
