"""No step is released in two versions, whatever became of the ledger: cut, lost or replaced."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch

from dptrain.engine.release_ledger import StepLedger
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train

STEPS, RELEASED = 8, 6
MECHANISM = "ab" * 32


def digest(step, version=0):
    return f"{version * 0x123456789ABCDEF:016x}{step:016x}"


def written(path, steps=RELEASED):
    ledger = StepLedger(MECHANISM, path)
    for step in range(steps):
        ledger.record(step, digest(step))
    return path.read_bytes()


def test_a_ledger_cut_off_anywhere_knows_what_is_whole_and_loses_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, steps=3)
    head = whole.index(b"\n") + 1
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size < head - 1:
            with pytest.raises(ValueError, match="cannot be read"):
                StepLedger(MECHANISM, path)
            assert path.read_bytes() == whole[:size]
            continue
        ledger = StepLedger(MECHANISM, path)
        # A line is whole with its last brace: then the step may have been released.
        assert ledger.digests == [digest(s) for s in range(whole[:size].count(b"}") - 1)]
        assert path.read_bytes().startswith(whole[:size])
        for step in range(3):
            ledger.record(step, digest(step))
        assert path.read_bytes() == whole


def test_no_flipped_bit_of_a_ledger_forgets_a_step(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path, steps=3)
    run = StepLedger(MECHANISM, path).run
    opened = 0
    for place, bit in itertools.product(range(len(whole)), range(8)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            ledger = StepLedger(MECHANISM, path)
        except ValueError:
            assert path.read_bytes() == flipped
            continue
        opened += 1
        for step in range(3):
            with pytest.raises(RuntimeError, match="released before"):
                ledger.record(step, digest(step, version=1))
        with pytest.raises(ValueError, match="ledger"):
            ledger.check([digest(s) for s in range(3)], run=run, kept=True)
    assert opened > 0  # flips in digests and in the name of the run


def test_a_ledger_that_changes_during_the_run_is_noticed(tmp_path):
    path = tmp_path / "ledger.jsonl"

    def deleted():
        path.unlink()

    def shortened():
        path.write_bytes(path.read_bytes()[:-5])

    def used_by_another_process():
        StepLedger(MECHANISM, path).record(1, digest(1))

    for change in (deleted, shortened, used_by_another_process):
        path.unlink(missing_ok=True)
        ledger = StepLedger(MECHANISM, path)
        ledger.record(0, digest(0))
        change()
        with pytest.raises(
            RuntimeError, match=r"was changed while this run was using it.*Restore it"
        ):
            ledger.record(1, digest(1, version=1))
        assert len(ledger.digests) == 1


def test_a_full_disk_loses_no_line(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    ledger = StepLedger(MECHANISM, path)
    ledger.record(0, digest(0))

    def full(file, data):
        file.write(data[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dptrain.engine.release_ledger._write", full)
        with pytest.raises(OSError, match="No space"):
            ledger.record(1, digest(1))
    assert ledger.digests == [digest(0)]  # nor does memory know of a release that was none
    ledger.record(1, digest(1))
    assert StepLedger(MECHANISM, path).digests == [digest(0), digest(1)]


def run(path, **options):
    options = {"scheme": everything_every_step(24, STEPS), "target_delta": 1e-3} | options
    return make(small_net(), images(), ledger=path, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Checkpoints after 0, 2 and 4 of six released steps, the ledger, and the model after them."""
    path = tmp_path_factory.mktemp("finished") / "ledger.jsonl"
    private = run(path)
    states = {0: through_disk(private.state_dict())}
    for steps in (2, 4):
        train(private, steps=steps)
        states[steps] = through_disk(private.state_dict())
    train(private, steps=RELEASED)
    return states, path, flat(private.module)


def cut_to(steps):
    def cut(path, ledger):
        lines = ledger.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[: 1 + steps]))

    return cut


def deleted(path, ledger):
    path.unlink(missing_ok=True)


def begun_anew(path, ledger):
    run(path)  # as by a first attempt to go on, which was refused


def another_runs(path, ledger):
    train(run(path, seed=77), steps=RELEASED)


def same_seed_begun_anew(path, ledger):
    train(run(path), steps=RELEASED)


LOST = {
    "deleted": deleted,
    "begun anew": begun_anew,
    "another run's": another_runs,
    "a run's with the same seed": same_seed_begun_anew,
}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("what", LOST)
def test_a_ledger_that_is_not_the_runs_is_refused(finished, tmp_path, what, steps):
    states, ledger, _ = finished
    path = tmp_path / "ledger.jsonl"
    LOST[what](path, ledger)
    for _ in range(2):  # a second attempt finds what the first one left
        private = run(path)
        before = flat(private.module)
        with pytest.raises(ValueError, match=r"does not match the checkpoint|not those of"):
            private.load_state_dict(states[steps])
        assert private.steps_executed == 0
        assert torch.equal(flat(private.module), before)


def test_a_ledger_that_was_deleted_is_called_missing(finished, tmp_path):
    """The file that the attempt itself begins is not said to be another run's."""
    states, _, _ = finished
    for _ in range(2):
        with pytest.raises(ValueError, match="it was missing, or begun anew, and holds no step"):
            run(tmp_path / "ledger.jsonl").load_state_dict(states[4])


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("left", range(RELEASED + 1))
def test_a_ledger_cut_below_the_checkpoint_is_refused_and_no_other(finished, tmp_path, left, steps):
    states, ledger, end = finished
    path = tmp_path / "ledger.jsonl"
    cut_to(left)(path, ledger)
    private = run(path)
    if left < steps:
        with pytest.raises(ValueError, match=f"cut off after {left} steps.*released {steps} steps"):
            private.load_state_dict(states[steps])
        return
    private.load_state_dict(states[steps])
    assert "resumed" not in str(private.guarantee())
    train(private, steps=RELEASED)
    assert torch.equal(flat(private.module), end)
    assert path.read_bytes() == ledger.read_bytes()


@pytest.mark.parametrize("lose", [deleted, cut_to(1)])
def test_a_loss_that_is_accepted_is_said(finished, tmp_path, lose):
    states, ledger, _ = finished
    path = tmp_path / "ledger.jsonl"
    lose(path, ledger)
    private = run(path)
    with pytest.raises(TypeError, match=r"accept_lost_ledger='no': True or False"):
        private.load_state_dict(states[4], accept_lost_ledger="no")
    private.load_state_dict(states[4], accept_lost_ledger=True)
    told = "resumed after 4 steps without a ledger of released steps"
    assert told in str(private.guarantee())
    train(private, steps=5)
    again = run(path)
    again.load_state_dict(through_disk(private.state_dict()))  # needs no more acceptance
    assert told in str(again.guarantee())  # nor is it forgotten
    another = tmp_path / "another.jsonl"
    another_runs(another, ledger)
    private = run(another)
    with pytest.raises(ValueError, match="different runs"):
        private.load_state_dict(states[4], accept_lost_ledger=True)


def test_a_ledger_that_is_left_out_is_said(finished):
    states, _, _ = finished
    private = run(None)
    private.load_state_dict(states[2])
    assert "resumed after 2 steps without a ledger of released steps" in str(private.guarantee())


def test_an_accepted_loss_is_not_mended_by_a_checkpoint(finished, tmp_path):
    """What it fills up is not what was lost: an earlier checkpoint knows as little as before."""
    states, ledger, _ = finished
    path = tmp_path / "ledger.jsonl"
    cut_to(1)(path, ledger)
    run(path).load_state_dict(states[4], accept_lost_ledger=True)
    for _ in range(2):
        again = run(path)
        with pytest.raises(ValueError, match="does not match the checkpoint"):
            again.load_state_dict(states[2])
        again.load_state_dict(states[2], accept_lost_ledger=True)
        assert "resumed after 2 steps" in str(again.guarantee())
    train(again, steps=RELEASED)
    final = run(path)
    final.load_state_dict(through_disk(again.state_dict()))
    assert len(StepLedger(final.mechanism.hash, path).digests) == RELEASED


def test_a_finished_run_needs_no_ledger(finished, tmp_path):
    """All of its releases are in the checkpoint, and there is no further one."""
    states, ledger, _ = finished
    path = tmp_path / "ledger.jsonl"
    shutil.copy(ledger, path)
    whole = run(path)
    whole.load_state_dict(states[4])
    train(whole)
    state = through_disk(whole.state_dict())
    for again in (run(None), run(tmp_path / "new.jsonl")):
        again.load_state_dict(state)
        assert "resumed" not in str(again.guarantee())
        with pytest.raises(RuntimeError, match="all 8 planned steps have run"):
            train(again)
    earlier = run(tmp_path / "new.jsonl")  # which does not make it the ledger of earlier ones
    with pytest.raises(ValueError, match="does not match the checkpoint"):
        earlier.load_state_dict(states[4])


def test_a_moved_ledger_is_the_same(finished, tmp_path):
    states, ledger, end = finished
    path = tmp_path / "elsewhere" / "steps.jsonl"
    path.parent.mkdir()
    shutil.copy(ledger, path)
    private = run(path)
    private.load_state_dict(states[2])
    train(private, steps=RELEASED)
    assert torch.equal(flat(private.module), end)


def test_a_run_without_a_file_says_so_however_it_goes_on(tmp_path):
    """Also from its very beginning, and also under a file that has not seen the steps before."""
    first = run(None)
    states = [through_disk(first.state_dict())]
    train(first, steps=2)
    states.append(through_disk(first.state_dict()))
    for state, path in itertools.product(states, (None, tmp_path / "new.jsonl")):
        (tmp_path / "new.jsonl").unlink(missing_ok=True)
        second = run(path)
        second.load_state_dict(state)
        assert f"resumed after {state['steps_executed']} steps" in str(second.guarantee())
    first.load_state_dict(states[1])  # in the same process, which has seen all
    assert "resumed" not in str(first.guarantee())
