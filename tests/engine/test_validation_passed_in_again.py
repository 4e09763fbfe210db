"""What is private already, or was wrapped by accelerate: works, or the error says what to call."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dptrain import PrivacyEngine
from tests.helpers.engine import flat, images, small_net, train, wire


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def shuffled():
    return DataLoader(images(), batch_size=4, shuffle=True)


def private_run(module, optimizer, data, **options):
    return wire(
        module=module,
        optimizer=optimizer,
        data=data,
        epochs=2,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        seed=5,
        **options,
    )


def finish(private):
    while private.steps_executed < private.mechanism.steps:
        train(private)


def test_a_second_run_as_in_opacuss_example(mode):
    """``mnist.py -r 2`` binds the private loader to the name of the plain one."""
    ends = []
    train_loader = given = shuffled()
    for _ in range(2):
        model = small_net()
        optimizer = sgd(model)
        if ends:
            again = (model, optimizer, train_loader)
            with pytest.raises(TypeError, match="data= is the private loader of another"):
                private_run(*again, grad_sample_mode=mode)
        private = private_run(model, optimizer, given, grad_sample_mode=mode)
        _, optimizer, train_loader = private
        finish(private)
        ends.append(flat(model))
    assert torch.equal(*ends)


def test_a_private_loader_is_no_data_set():
    model = small_net()
    private = private_run(model, sgd(model), shuffled())
    other = small_net()
    with pytest.raises(TypeError, match="data= is the private loader of another run"):
        PrivacyEngine().make_private(
            module=other,
            optimizer=sgd(other),
            data=private.loader,
            scheme=private.mechanism.scheme,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_the_parts_of_a_run_in_another_one(mode):
    """Each error names the call after which it works, and then it is a run like any other."""
    data, net = shuffled(), small_net()
    first = private_run(net, sgd(net), data, grad_sample_mode=mode)
    finish(first)
    start = flat(net)
    with pytest.raises(
        ValueError, match=r"(already wrapped|another private run).*private\.detach\(\)"
    ):
        private_run(first.module, first.optimizer, data, grad_sample_mode=mode)
    with pytest.raises(ValueError, match=r"another private run.*private\.detach\(\)"):
        private_run(net, first.optimizer, data, grad_sample_mode=mode)
    bare = first.detach()
    assert bare is net
    with pytest.raises(ValueError, match=r"optimizer is already the private.*original_optimizer"):
        private_run(bare, first.optimizer, data, grad_sample_mode=mode)
    second = private_run(bare, first.optimizer.original_optimizer, data, grad_sample_mode=mode)
    assert second.optimizer.original_optimizer is first.optimizer.original_optimizer
    finish(second)
    assert not torch.equal(flat(net), start)


@pytest.mark.parametrize("what", ["optimizer", "data"])
def test_what_accelerate_prepared_before_is_refused(what):
    accelerate = pytest.importorskip("accelerate")
    net = small_net()
    given = {"module": net, "optimizer": sgd(net), "data": shuffled()}
    prepared = accelerate.Accelerator(cpu=True).prepare(*given.values())
    wrapped = dict(zip(given, prepared, strict=True))
    call = r"accelerate\.prepare\(accelerator, private\)"
    told = rf"{what}= is an .*prepare\(\) returned: call make_private first.*{call}"
    with pytest.raises(ValueError, match=told):
        private_run(**{**given, what: wrapped[what]})
    private = private_run(**{**given, "module": wrapped["module"]})
    finish(private)


def test_accelerate_after_make_private_runs_the_same(mode):
    accelerate = pytest.importorskip("accelerate")
    ends = []
    for prepares in (False, True):
        net = small_net()
        private = private_run(net, sgd(net), shuffled(), grad_sample_mode=mode, microbatches=2)
        if prepares:
            accelerator = accelerate.Accelerator(cpu=True)
            module, optimizer, loader = accelerator.prepare(*private)
            assert loader is private.loader
            while private.steps_executed < private.mechanism.steps:
                batches = 0
                for x, y in loader:
                    batches += 1
                    optimizer.zero_grad()
                    accelerator.backward(nn.functional.cross_entropy(module(x), y))
                    optimizer.step()
                assert batches == 2 * len(shuffled())
        else:
            finish(private)
        ends.append(flat(net))
    assert torch.equal(*ends)


def test_accelerates_accumulation_is_an_error_and_not_a_lost_step():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = small_net()
    private = private_run(net, sgd(net), shuffled())
    module, optimizer = accelerator.prepare(private.module, private.optimizer)

    def loop():
        for x, y in itertools.islice(private.loader, 4):
            with accelerator.accumulate(module):
                accelerator.backward(nn.functional.cross_entropy(module(x), y))
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"Call it once for every"):
        loop()
