"""Copies of the module, its way back, and what else may happen to it after it was wrapped."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.helpers.bookkeeping_runs import (
    ROWS,
    backward,
    case,
    check,
    check_like_loop,
    dense,
    run_of,
)
from tests.helpers.clipping_oracle import reference


class Embedded(nn.Module):
    """Layers of several kinds, the head tied to the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)).mean(1))


def embedded():
    return case(Embedded(), torch.randint(0, 6, (ROWS, 3)))


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch])
def test_a_copy_has_its_own_parameters_and_reports_nothing(duplicate):
    """A copied layer must not compute with the parameters of the layer that it was copied from."""
    a = embedded()
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a)
    duplicated = duplicate(private.module)
    assert duplicated.state_dict().keys() == a.module.state_dict().keys()
    with torch.no_grad():
        expected = a.module(*a.inputs)
        assert torch.equal(duplicated(*a.inputs), expected)
        for p in duplicated.parameters():
            p.mul_(2)
        assert torch.equal(a.module(*a.inputs), expected)
        assert not torch.allclose(duplicated(*a.inputs), expected)
        assert duplicated.head.weight is duplicated.embed.weight
    # Between the passes of the run it trains like any module, on its own gradients.
    backward(private)
    duplicated(*a.inputs).sum().backward()
    assert all(p.grad is not None for p in duplicated.parameters())
    assert all(p.grad is None for p in a.module.parameters())
    check(private, wanted)


def test_a_copy_of_a_copy_and_a_run_with_it():
    a = embedded()
    run_of(a)
    second = copy.deepcopy(copy.deepcopy(a.module))
    check_like_loop(case(second, *a.inputs))


def test_averaged_weights():
    """torch's own use of a deep copy."""
    a = dense()
    private = run_of(a, lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(private.module)
    average.update_parameters(private.module)
    before = average(*a.inputs)
    backward(private)
    private.optimizer.step()
    torch.testing.assert_close(average(*a.inputs), before)
    average.update_parameters(private.module)
    start = average.module.state_dict()
    assert start.keys() == private.module.state_dict().keys()
    assert not torch.allclose(average(*a.inputs), before)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_state_dicts_and_evaluation_are_those_of_the_other_modes(mode):
    a, b = dense(), dense()
    first, second = run_of(a), run_of(b, mode=mode)
    ours = first.module
    assert list(ours.state_dict()) == list(b.module.state_dict())
    assert list(first.state_dict()["module"]) == list(second.state_dict()["module"])
    plain = dense().module
    plain.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert torch.equal(ours(*a.inputs), plain(*a.inputs))
        assert torch.equal(ours.eval()(*a.inputs), plain.eval()(*a.inputs))
    with torch.inference_mode():
        assert torch.equal(ours(*a.inputs), plain(*a.inputs))


def bare_gradients(module, inputs):
    module.zero_grad()
    module(*inputs).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def test_the_way_back():
    a = dense()
    plain = copy.deepcopy(a.module)
    attributes = {name: set(vars(m)) for name, m in plain.named_modules()}
    private = run_of(a)
    backward(private)
    assert private.detach() is a.module
    assert {name: set(vars(m)) for name, m in a.module.named_modules()} == attributes
    for own, expected in zip(
        bare_gradients(a.module, a.inputs), bare_gradients(plain, a.inputs), strict=True
    ):
        assert torch.equal(own, expected)
    a.module.zero_grad()
    check_like_loop(a)  # and a new run


def test_a_forward_of_a_librarys_own_is_used_and_given_back():
    """accelerate, for instance, sets ``layer.forward``."""
    a = dense()
    wanted = reference(a.module, a.inputs, a.targets)
    layer, calls = a.module[0], []

    def forward(x):
        calls.append(1)
        return nn.Linear.forward(layer, x)

    layer.forward = forward
    private = run_of(a)
    backward(private)
    assert calls
    check(private, wanted)
    private.detach()
    assert layer.forward is forward


@pytest.mark.parametrize("first", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("second", ["bookkeeping", "hooks", None])
def test_a_second_run_on_the_same_module_is_refused_until_the_first_lets_go(first, second):
    """Two taps on a layer would report every gradient twice."""
    a = dense()
    wanted = reference(a.module, a.inputs, a.targets)
    private = run_of(a, mode=first)
    with pytest.raises(ValueError, match=r"another private run.*private\.detach\(\)"):
        run_of(a, mode=second)
    backward(private)  # which the refusal leaves as it was
    check(private, wanted)
    private.detach()
    if second == "bookkeeping":
        check_like_loop(a)
    else:
        run_of(a, mode=second)


def test_a_part_of_a_model_in_another_run_is_refused():
    a = dense()
    run_of(a)
    with pytest.raises(ValueError, match="another private run"):
        run_of(case(nn.Sequential(a.module, nn.Linear(2, 2)), *a.inputs))


def test_another_dtype_after_wrapping():
    a = dense()
    a = case(a.module, *a.inputs, dtype=torch.float32)
    private = run_of(a)
    private.module.double()
    doubles = tuple(x.double() for x in a.inputs)
    wanted = reference(copy.deepcopy(a.module), doubles, a.targets.double())
    backward(private, lambda x: private.module(x.double()))
    check(private, wanted)
