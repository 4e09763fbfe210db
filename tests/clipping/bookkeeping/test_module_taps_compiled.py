"""Compiled models: what runs between the layers is compiled, what is released stays the same."""

import copy

import pytest
import torch
from torch import nn

from tests.helpers.bookkeeping_runs import ROWS, backward, case, check, run_of
from tests.helpers.clipping_oracle import reference


class Net(nn.Module):
    """Something to be compiled before, between and after the layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.nn.functional.gelu(self.first(x.sin() * 2)) + 1
        return self.last(torch.tanh(self.norm(h) * 3).exp()).cos()


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def used_before(module, x):
    """The module has been traced, with and without a graph, before the run is made."""
    with torch.no_grad():
        module(x)
    module(x).sum().backward()
    module.zero_grad()
    return module


def before(a, backend):
    """``torch.compile`` gives a module around the user's."""
    inner = a.module
    a.module = used_before(torch.compile(inner, backend=backend), *a.inputs)
    private = run_of(a)
    assert private.module is a.module
    assert set(private.state_dict()["module"]) == set(inner.state_dict())
    return private, None


def in_place(a, backend):
    """``module.compile()``."""
    a.module.compile(backend=backend)
    used_before(a.module, *a.inputs)
    return run_of(a), None


def a_part(a, backend):
    """One layer of the model, compiled with its name changed to ``..._orig_mod``."""
    a.module.norm = torch.compile(a.module.norm, backend=backend)
    used_before(a.module, *a.inputs)
    return run_of(a), None


def after(a, backend):
    """The run's module."""
    private = run_of(a)
    return private, torch.compile(private.module, backend=backend)


def after_in_place(a, backend):
    """The run's module, in place."""
    private = run_of(a)
    private.module.compile(backend=backend)
    return private, None


WAYS = [before, in_place, a_part, after, after_in_place]


@pytest.mark.sample(every=13)
@pytest.mark.parametrize(
    ("how", "backend"),
    [
        *((how, "eager") for how in WAYS),
        *(pytest.param(how, "aot_eager", marks=pytest.mark.slow) for how in WAYS),
        pytest.param(before, "inductor", marks=pytest.mark.slow),  # minutes of g++ the first time
        pytest.param(after, "inductor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("_unfollowed")
def test_a_compiled_model_releases_the_same(how, backend):
    a = case(Net(), torch.randn(ROWS, 4))
    wanted = reference(copy.deepcopy(a.module), a.inputs, a.targets)
    private, forward = how(a, backend)
    torch._dynamo.utils.counters.clear()
    backward(private, forward)
    check(private, wanted)
    if how is not a_part:  # of which nothing is left but the layer
        assert torch._dynamo.utils.counters["stats"]["calls_captured"] >= 4


def test_a_function_traced_before_the_run_is_refused_and_not_released_unclipped():
    """Its graph goes past the layers' reports, straight to the parameters."""
    a = case(Net(), torch.randn(ROWS, 4))
    forward = torch.compile(lambda x: a.module(x), backend="eager")
    forward(*a.inputs).sum().backward()
    a.module.zero_grad()
    private = run_of(a)
    wanted = reference(copy.deepcopy(a.module), a.inputs, a.targets)
    refused = None
    try:
        backward(private, forward)
    except RuntimeError as error:
        refused = str(error)
    if refused is None:  # a torch that traces anew
        check(private, wanted)
        return
    assert "used outside the layer" in refused
    assert all(p.grad is None for p in a.module.parameters())


@pytest.mark.usefixtures("_unfollowed")
def test_fullgraph_fails_loudly():
    a = case(Net(), torch.randn(ROWS, 4))
    private = run_of(a)
    compiled = torch.compile(private.module, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        backward(private, compiled)


@pytest.mark.slow
def test_evaluation_in_between():
    a = case(Net(), torch.randn(ROWS, 4))
    plain = copy.deepcopy(a.module)
    wanted = reference(plain, a.inputs, a.targets)
    private, _ = before(a, "eager")
    with torch.no_grad():
        torch.testing.assert_close(private.module(*a.inputs), plain(*a.inputs))
    backward(private)
    with torch.no_grad():
        torch.testing.assert_close(private.module.eval()(*a.inputs), plain(*a.inputs))
    check(private, wanted)
