"""What is released, against one autograd call per example."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Loading, Poisson, PrivacyEngine
from tests.helpers.engine import (
    MODES,
    everything_every_step,
    flat,
    images,
    make,
    reference_sum,
    released,
    small_net,
    train,
)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("micro", [None, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_released_gradient_is_the_clipped_sum(mode, micro, reduction):
    data, model = images(), small_net()
    expected = reference_sum(copy.deepcopy(model), data, range(len(data)), 0.5)
    private = make(
        model,
        data,
        mode,
        scheme=everything_every_step(len(data), 1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        max_physical_batch_size=micro,
        loss_reduction=reduction,
    )
    train(private)
    scale = len(data) if reduction == "mean" else 1.0
    torch.testing.assert_close(released(private, scale), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("micro", [None, 5])
def test_a_broken_example_counts_nothing_and_hurts_nobody(mode, bad, micro):
    data, model = images(12), small_net()
    clean = reference_sum(
        copy.deepcopy(model), data, [i for i in range(12) if i not in (2, 9)], 0.5
    )
    x, y = (t.clone() for t in data.tensors)
    x[2] = bad
    x[9, 0, 1, 1] = float("nan")
    # 1e30 passes GroupNorm as an ordinary finite example in some builds; the reference decides.
    expected = reference_sum(copy.deepcopy(model), TensorDataset(x, y), range(12), 0.5)
    if bad != 1e30:
        torch.testing.assert_close(expected, clean)
    private = make(
        model,
        TensorDataset(x, y),
        mode,
        scheme=everything_every_step(12, 2),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        max_physical_batch_size=micro,
        lr=0.0,
    )
    train(private)
    torch.testing.assert_close(released(private, 12), expected, rtol=1e-5, atol=2e-6)
    broken = 2 if torch.allclose(expected, clean) else 1
    assert private.nonfinite_examples == 2 * broken  # both steps
    assert "nonfinite" not in private.guarantee(1e-3).to_json()


def test_nan_with_embedding_layernorm_and_reused_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.norm = nn.LayerNorm(4)
            self.last = nn.Linear(4, 3)

        def forward(self, batch):
            h = self.embed(batch[:, :2].long()).mean(1) + batch[:, 2:]
            return self.last(torch.tanh(self.norm(h)))

    torch.manual_seed(0)
    ids = torch.randint(0, 5, (10, 2)).float()
    x = torch.cat([ids, torch.randn(10, 4)], dim=1)
    x[4, 3] = float("nan")
    data = TensorDataset(x, torch.randint(0, 3, (10,)))
    results = []
    for mode in ("hooks", "bookkeeping", "functorch"):
        torch.manual_seed(1)
        private = make(Net(), data, mode, scheme=everything_every_step(10, 1), noise_multiplier=0.0)
        train(private)
        results.append(released(private, 10))
        assert private.nonfinite_examples == 1
        assert torch.isfinite(results[-1]).all()
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)


def test_modes_agree_over_a_run():
    """In float64: in float32 a ReLU may switch where modes round differently, and runs part."""
    finals = []
    x, y = images().tensors
    data = TensorDataset(x.double(), y)
    for mode in MODES:
        model = small_net().double()
        scheme = Poisson(probability=0.4, dataset_size=len(data), steps=8)
        train(make(model, data, mode, scheme=scheme))
        finals.append(flat(model))
    for final in finals[1:]:
        torch.testing.assert_close(finals[0], final, rtol=0, atol=1e-12)


def test_empty_batches_take_a_step_of_noise_only(mode):
    model, data = small_net(), images()
    before = flat(model)
    # Pr[any example in 3 steps] = 1 - (1 - 1e-9)^72 < 1e-7
    scheme = Poisson(probability=1e-9, dataset_size=len(data), steps=3)
    private = make(model, data, mode, scheme=scheme, noise_multiplier=1.0, momentum=0.0)
    train(private)
    assert private.steps_executed == 3
    assert torch.isfinite(flat(model)).all()
    assert not torch.equal(flat(model), before)


def test_expected_batch_size_is_the_public_constant():
    data = images(100)
    scheme = Poisson.for_batch_size(batch_size=32, dataset_size=100, steps=1)
    private = make(small_net(), data, scheme=scheme)
    assert private.optimizer.expected_batch_size == 32.0


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_two_backward_passes_are_refused(mode):
    data = images()
    private = make(small_net(), data, mode, scheme=everything_every_step(len(data), 2))
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss()
    for x, y in loader:
        criterion(model(x), y).backward()

        def again(x=x, y=y):
            criterion(model(x), y).backward()
            optimizer.step()

        with pytest.raises(RuntimeError, match=r"(two|2) backward"):
            again()
        break


class Folded(nn.Module):
    """Four positions of an example as rows: one after the other, or those of all examples first."""

    def __init__(self, *, together):
        super().__init__()
        self.layer, self.together = nn.Linear(4, 3), together

    def forward(self, x):
        x = x[:, 0]
        if self.together:
            return self.layer(x.reshape(-1, 4)).reshape(len(x), -1, 3).mean(1)
        return self.layer(x.transpose(0, 1).reshape(-1, 4)).reshape(-1, len(x), 3).mean(0)


@pytest.mark.parametrize("together", [True, False])
def test_rows_that_are_not_examples_are_refused(mode, together):
    """Of several rows an example, one after the other, bookkeeping takes the sum."""
    data = images()
    module = Folded(together=together)
    expected = reference_sum(copy.deepcopy(module), data, range(len(data)), 0.5)
    scheme = everything_every_step(len(data), 1)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.5}
    private = make(module, data, mode, scheme=scheme, **options)
    if mode == "bookkeeping" and together:
        train(private)
        torch.testing.assert_close(released(private, len(data)), expected, rtol=1e-5, atol=2e-6)
        return
    with pytest.raises(RuntimeError, match=r"one row per example|Keep one row|in each row"):
        train(private)


def test_step_without_backward_or_batch_is_refused(mode):
    data = images()
    private = make(small_net(), data, mode, scheme=everything_every_step(len(data), 2))
    with pytest.raises(RuntimeError, match="take a batch from the private loader"):
        private.optimizer.step()
    for _ in private.loader:
        with pytest.raises(RuntimeError, match="backward"):
            private.optimizer.step()
        break
    with pytest.raises(RuntimeError, match=r"optimizer\.step"):
        for _ in private.loader:
            pass


def test_gradients_of_an_abandoned_batch_are_not_used_for_another(mode):
    """They would count twice: as the rows of part 0, and again as their own."""
    data = images()
    scheme = everything_every_step(len(data), 2)
    private = make(small_net(), data, mode, scheme=scheme, max_physical_batch_size=8)
    train(private, batches=1)
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss()
    for x, y in loader:
        criterion(model(x), y).backward()
        if loader.current.part == 1:
            break
        optimizer.step()
    for _ in loader:
        assert loader.current.part == 0
        with pytest.raises(RuntimeError, match="backward"):
            optimizer.step()
        break


def test_abandoned_microbatches_leave_nothing_behind():
    """Breaking off inside a logical step and starting again gives the step as if never begun."""
    data, finals = images(), []
    for interrupt in (False, True):
        model = small_net()
        private = make(
            model,
            data,
            scheme=everything_every_step(len(data), 2),
            max_physical_batch_size=5,
        )
        if interrupt:
            train(private, batches=3)
            assert private.steps_executed == 0
        train(private)
        assert private.steps_executed == 2
        finals.append(flat(model))
    assert torch.equal(finals[0], finals[1])


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_half_precision_parameters_are_summed_and_noised_in_float32(mode):
    """512 equal gradients of norm 1: a running bfloat16 sum would stop growing at 256."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    x = torch.zeros(512, 4, dtype=torch.bfloat16)
    x[:, 0] = 8.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data=TensorDataset(x),
        scheme=everything_every_step(512, 1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        gradients=Gradients(loss="sum", mode=mode),
        loading=Loading(max_physical_batch_size=1),
    )
    wrapped, optimizer, loader = private
    for (rows,) in loader:
        optimizer.zero_grad()
        wrapped(rows).sum().backward()
        optimizer.step()
    assert model.weight.grad.dtype == torch.bfloat16
    assert float(model.weight.grad[0, 0]) == pytest.approx(512, rel=2**-7)


def test_a_forward_pass_for_metrics_gives_a_clear_error_or_no_harm():
    data = images()
    private = make(small_net(), data, scheme=everything_every_step(len(data), 2))
    model, optimizer, loader = private
    for x, y in loader:
        with torch.no_grad():
            model(x)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        break
    for x, y in loader:
        model(x)  # in training mode, without backward
        nn.functional.cross_entropy(model(x), y).backward()
        with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            optimizer.step()
        break


def test_a_forward_pass_of_an_earlier_batch_is_refused(mode):
    """Its examples would be in a part, or a step, that did not draw them."""
    data = images()
    scheme = everything_every_step(len(data), 3)
    private = make(small_net(), data, mode, scheme=scheme, max_physical_batch_size=12)
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss()
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    early = criterion(model(x), y)
    optimizer.step()  # the first of two parts: no parameter has changed
    next(batches)
    with pytest.raises(RuntimeError, match="made before the current batch"):
        early.backward()
