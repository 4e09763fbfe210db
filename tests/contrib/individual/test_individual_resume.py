"""Interrupted and resumed runs with an individual filter, and records that are refused."""

import functools
import json

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from dptrain.engine.sealed import seal
from dptrain.individual import GDPFilter, GDPOdometer, OdometerRecord
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train

SIZE, STEPS = 14, 10
FILTER = GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=50)
FULL = GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=50, full_consumption=True)
ODOMETER = GDPOdometer(increments=(0.9, 1.1), target_delta=1e-3, max_steps=50)


def private_run(individual=FILTER, mode="hooks", data=None, **options):
    options.setdefault("noise_multiplier", 1.2)
    options.setdefault("scheme", everything_every_step(SIZE, STEPS))
    options.setdefault("max_physical_batch_size", 4)
    return make(
        small_net(dropout=0.3),
        images(SIZE) if data is None else data,
        mode,
        max_grad_norm=2.0,
        individual=individual,
        **options,
    )


def finish(private, batches=None):
    """To the end, or so many batches; an odometer opens its second round after the fourth step."""

    optimizer = private.optimizer

    def after_step():
        record = private.individual
        if isinstance(record, OdometerRecord) and record.rounds == 1 and record.steps >= 4:
            if not optimizer.at_step_boundary:
                return
            record.open_round()

    train(private, batches=batches, after_step=after_step)
    return private


def ended(private):
    return flat(private.module), private.individual.state_dict()


@functools.cache
def uninterrupted(individual=FILTER):
    """How a run ends that nothing stops; read it and leave it as it is."""
    torch.manual_seed(99)
    return finish(private_run(individual))


def same(one, other):
    assert torch.equal(one[0], other[0])
    mine, theirs = one[1], other[1]
    assert mine["active_counts"] == theirs["active_counts"]
    assert mine["spending"].keys() == theirs["spending"].keys()
    for name, value in mine["spending"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs["spending"][name])
        else:
            assert value == theirs["spending"][name]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("batches", [1, 6, 8, 18, 35])
@pytest.mark.parametrize("individual", [FILTER, FULL, ODOMETER])
def test_a_resumed_run_is_bit_identical(individual, batches, tmp_path):
    """4 microbatches a step: 1, 6, 18 and 35 are in the middle of one."""
    whole = uninterrupted(individual)
    assert min(whole.individual.active_counts) < SIZE
    torch.manual_seed(99)
    path = tmp_path / "ledger.jsonl"
    first = finish(private_run(individual, ledger=path), batches=batches)
    state = through_disk(first.state_dict())
    torch.manual_seed(1)
    second = private_run(individual, ledger=path)
    second.load_state_dict(state)
    assert second.individual.steps == second.steps_executed == batches // 4
    finish(second)
    same(ended(second), ended(whole))
    assert second.guarantee().epsilon == whole.guarantee().epsilon


@pytest.mark.parametrize("mode", ["bookkeeping", "functorch"])
def test_other_modes_resume_too(mode):
    torch.manual_seed(99)
    whole = finish(private_run(mode=mode))
    torch.manual_seed(99)
    first = private_run(mode=mode)
    train(first, batches=17)
    second = private_run(mode=mode)
    second.load_state_dict(through_disk(first.state_dict()))
    same(ended(finish(second)), ended(whole))


def test_a_state_is_a_copy_and_can_be_gone_back_to():
    torch.manual_seed(99)
    private = private_run()
    train(private, steps=3)
    state = private.state_dict()
    spent = private.individual.spent
    train(private, steps=6)
    later = ended(private)
    private.load_state_dict(state)
    np.testing.assert_array_equal(private.individual.spent, spent)
    train(private, steps=6)
    same(ended(private), later)


def saved(individual=FILTER, **options):
    torch.manual_seed(99)
    private = private_run(individual, **options)
    train(private, steps=3)
    return through_disk(private.state_dict())


def other_contents():
    x, y = images(SIZE).tensors
    return TensorDataset(x + 1.0, y)


REFUSED = {
    "other contents": (lambda: saved(data=other_contents()), "other contents"),
    "another size": (
        lambda: saved(data=images(SIZE + 1), scheme=everything_every_step(SIZE + 1, STEPS)),
        "another mechanism",
    ),
    "no filter": (lambda: saved(None), "individual=None"),
    "another budget": (
        lambda: saved(GDPFilter(target_epsilon=7.0, target_delta=1e-3, max_steps=50)),
        r"target_epsilon.*7\.0",
    ),
    "another kind of filter": (lambda: saved(ODOMETER), "GDPOdometer"),
    "full consumption": (lambda: saved(FULL), "full_consumption"),
    "changed steps": (lambda: tampered(active_counts=[SIZE]), "covers 1 steps"),
    "changed size": (lambda: tampered(size=SIZE + 1), f"{SIZE + 1} examples"),
    "a shorter record": (lambda: spending(torch.zeros(3)), r"float32\[3\]"),
    "negative spendings": (lambda: spending(-torch.ones(SIZE).double()), "outside the budget"),
    "broken spendings": (lambda: spending(torch.full((SIZE,), torch.nan).double()), "outside"),
    "lost record": (lambda: without_record(), "lacks"),
}


def tampered(**changes):
    state = saved()
    state["private"]["individual"].update(changes)
    return seal(state)


def spending(squares):
    return tampered(spending={"squares": squares})


def without_record():
    state = saved()
    del state["private"]["individual"]
    return seal(state)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", REFUSED)
def test_another_record_is_refused_and_nothing_changed(name, tmp_path):
    make_state, message = REFUSED[name]
    state = make_state()
    torch.manual_seed(99)
    path = tmp_path / "ledger.jsonl"
    private = private_run(ledger=path)
    train(private, steps=2)
    before, lines = flat(private.module), path.read_text()
    with pytest.raises(ValueError, match=message):
        private.load_state_dict(state)
    assert path.read_text() == lines
    assert torch.equal(flat(private.module), before)
    assert private.steps_executed == private.individual.steps == 2
    finish(private)  # the run goes on as if nothing had been tried
    same(ended(private), ended(uninterrupted()))


def test_a_state_with_a_filter_is_refused_by_a_run_without():
    private = private_run(None)
    with pytest.raises(ValueError, match=r"GDPFilter.*individual=None"):
        private.load_state_dict(saved())
    with pytest.raises(ValueError, match="give make_private individual="):
        private.individual  # noqa: B018


def test_a_repeated_step_with_another_record_is_stopped(tmp_path):
    """The file of released steps notices what an emptied record would let pass."""
    path = tmp_path / "ledger.jsonl"
    torch.manual_seed(99)
    first = private_run(ledger=path)
    train(first, steps=3)
    state = through_disk(first.state_dict())
    finish(first)
    state["private"]["individual"]["spending"]["squares"].zero_()
    second = private_run(ledger=path)
    second.load_state_dict(seal(state))
    with pytest.raises(RuntimeError, match="released before"):
        finish(second)


def test_what_was_spent_is_in_the_private_part_only():
    private = private_run()
    train(private, steps=3)
    state = through_disk(private.state_dict())
    public = {k: v for k, v in state.items() if k not in ("private", "module", "optimizer")}
    text = json.dumps(public, default=str)
    assert "squares" not in text
    assert "active_counts" not in text
    assert "GDPFilter" in text  # the settings are public
    assert "squares" in state["private"]["individual"]["spending"]
