"""What a program does between ``optimizer.step()`` and the next batch, and with the run's parts."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.helpers.engine import everything_every_step, make

ROWS, WIDTH = 6, 4


def data():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.arange(ROWS) % 2)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), Own(5), nn.Linear(5, 2)).double()


class Own(nn.Module):
    """A layer without a rule."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, width))

    def forward(self, x):
        return x * self.scale


def run(module, mode, steps=3):
    return make(module, data(), mode, scheme=everything_every_step(ROWS, steps), momentum=0.0)


def step(private, x, y):
    private.optimizer.zero_grad()
    F.cross_entropy(private.module(x), y).backward()
    private.optimizer.step()


@pytest.mark.parametrize("rows", [2, ROWS])
def test_a_generator_is_trained_through_the_private_module(mode, rows, caplog):
    """Its gradients are those that the plain module gives, and the run is as if it were not."""
    alone, beside = net(), net()
    private = run(alone, mode)
    for x, y in private.loader:
        step(private, x, y)
    wanted = [p.detach().clone() for p in alone.parameters()]
    private.detach()

    generator = nn.Linear(3, WIDTH).double()
    private = run(beside, mode)
    with caplog.at_level(logging.WARNING):
        for x, y in private.loader:
            step(private, x, y)
            plain = net()
            plain.load_state_dict(beside.state_dict())
            z = torch.randn(rows, 3, dtype=torch.float64)
            F.cross_entropy(plain(generator(z)), torch.ones(rows).long()).backward()
            expected = [p.grad.clone() for p in generator.parameters()]
            generator.zero_grad()
            F.cross_entropy(private.module(generator(z)), torch.ones(rows).long()).backward()
            for p, right in zip(generator.parameters(), expected, strict=True):
                torch.testing.assert_close(p.grad, right)
            generator.zero_grad()
    assert len([r for r in caplog.records if "run ignores its gradients" in r.getMessage()]) == 1
    for p, right in zip(beside.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.detach(), right, rtol=1e-12, atol=1e-12)


def test_a_saliency_map_after_the_last_batch(mode):
    module = net()
    private = run(module, mode, steps=1)
    for x, y in private.loader:
        step(private, x, y)
    release = [p.grad.clone() for p in module.parameters()]
    x = data().tensors[0][:2].requires_grad_()
    plain = net()
    plain.load_state_dict(module.state_dict())
    (wanted,) = torch.autograd.grad(plain(x).sum(), x)
    private.module(x).sum().backward()
    torch.testing.assert_close(x.grad, wanted)
    if mode == "bookkeeping":
        assert all(
            torch.equal(p.grad, r) for p, r in zip(module.parameters(), release, strict=True)
        )


def test_a_pass_before_the_first_batch_is_told_what_to_take():
    """Nothing was private yet: a trainer may have been given the other loader."""
    module = net()
    run(module, "bookkeeping")
    generator = nn.Linear(3, WIDTH).double()
    loss = module(generator(torch.randn(2, 3).double())).sum()
    with pytest.raises(RuntimeError, match=r"take a batch from the private.*backward\(inputs="):
        loss.backward()
    loss = module(generator(torch.randn(2, 3).double())).sum()
    loss.backward(inputs=list(generator.parameters()))
    assert generator.weight.grad is not None


def test_a_forward_pass_between_batches_is_no_part_of_the_next_one():
    """Its share of the gradient would be missing from what is clipped."""
    private = run(net(), "bookkeeping")
    batches = iter(private.loader)
    step(private, *next(batches))
    before = private.module(data().tensors[0]).sum()
    x, y = next(batches)
    with pytest.raises(RuntimeError, match="made before the current batch"):
        (F.cross_entropy(private.module(x), y) + before).backward()


def test_two_steps_for_one_batch(mode):
    private = run(net(), mode)
    x, y = next(iter(private.loader))
    step(private, x, y)
    with pytest.raises(RuntimeError, match=r"second time for one batch.*Add up the losses"):
        step(private, x, y)


def test_a_step_of_the_other_optimizer_names_the_right_one():
    module = net()
    private = run(module, "bookkeeping")
    batches = iter(private.loader)
    x, y = next(batches)
    F.cross_entropy(private.module(x), y).backward()
    private.optimizer.original_optimizer.step()
    with pytest.raises(RuntimeError, match=r"on the optimizer that make_private returned"):
        next(batches)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_private_optimizer_is_not_copied_and_other_runs_go_on(how):
    private = run(net(), "bookkeeping")
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        how(private.optimizer)
    kind = type(private.optimizer)
    with pytest.raises(TypeError, match="neither copied nor pickled"):  # as an older pickle does
        kind.__new__(kind).__setstate__({"state": {}, "param_groups": []})
    for x, y in private.loader:
        step(private, x, y)
    private = run(net(), "bookkeeping")
    for x, y in private.loader:
        step(private, x, y)


EXPORTERS = {
    "export": lambda m, x: torch.export.export(m, (x,)),
    "export strictly": lambda m, x: torch.export.export(m, (x,), strict=True),
    "script": lambda m, x: torch.jit.script(m),
    "trace": lambda m, x: torch.jit.trace(m, x),
    "trace of a layer": lambda m, x: torch.jit.trace(m[0], x),
    "ONNX by a trace": lambda m, x: torch.onnx.export(m, (x,), "unwritten.onnx", dynamo=False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", EXPORTERS)
def test_exporters_of_a_module_in_a_run_say_what_to_do(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = net()
    private = run(module, "bookkeeping", steps=1)
    for x, y in private.loader:
        step(private, x, y)
    module.eval()
    x = data().tensors[0]
    with pytest.raises(Exception, match=r"export, trace or script copy.deepcopy\(module\)"):
        EXPORTERS[name](module, x)
    if "ONNX" not in name:
        EXPORTERS[name](copy.deepcopy(module), x)
        EXPORTERS[name](private.detach(), x)
