"""Rules on a device that is not the CPU, on machines that have no other: nothing is left behind."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dptrain.accounting.min_sep import engine_torch
from dptrain.testing import check_layer_rule, check_norms_of_releases
from tests.accounting.min_sep.test_engine_compiled_replayed import LAWS, source
from tests.accounting.min_sep.test_engine_torch_tilted import events, some_copies
from tests.clipping.bookkeeping.rules.test_rules_norms_of_releases import CASES
from tests.cuda.imagined import PLACE, Elsewhere, Imagined, moved, on_the_imagined_device
from tests.cuda.test_rules import ROWS_FIRST


def case(name):
    build, inputs = CASES[name]
    torch.manual_seed(0)
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    return build(), given


def there(given):
    return [Elsewhere(v) if isinstance(v, torch.Tensor) else v for v in given]


@pytest.mark.slow
@pytest.mark.sample(every=31)
@pytest.mark.parametrize(
    ("name", "check"),
    [
        *((name, check_layer_rule) for name in ROWS_FIRST),
        *((name, check_norms_of_releases) for name in ROWS_FIRST),
    ],
)
def test_a_rule_stays_on_its_device(name, check, monkeypatch):
    layer, given = case(name)
    layer, given = moved(layer), there(given)
    with on_the_imagined_device(monkeypatch):
        check(layer, given)


class Left(nn.Module):
    """A layer whose constant is on the CPU."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight + torch.ones(3)


def test_what_is_on_another_device_is_noticed(monkeypatch):
    layer = Left()
    x = torch.randn(4, 3)
    layer(x)
    layer = moved(copy.deepcopy(layer))
    with (
        on_the_imagined_device(monkeypatch),
        pytest.raises(RuntimeError, match="on the same device"),
    ):
        layer(Elsewhere(x))


def test_numbers_and_gradients_are_those_of_the_cpu():
    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    layer(x).square().sum().backward()
    expected = layer.weight.grad
    layer = moved(copy.deepcopy(layer).requires_grad_())
    with Imagined():
        out = layer(Elsewhere(x))
        assert out.device == PLACE
        out.square().sum().backward()
    assert torch.equal(layer.weight.grad.inner, expected)
    assert torch.zeros(2).device.type == "cpu"


class Words(engine_torch._Words):
    """Words that the CPU draws for another device."""

    def draw(self, *shape):
        words = torch.empty(shape, dtype=torch.int64)
        return Elsewhere(words.random_(-(1 << 63), None, generator=self.generator))


def test_losses_of_the_accountant_stay_on_their_device(monkeypatch):
    law, size = LAWS["odd block"], 20
    unit, along = np.full(law.steps, law.steps**-0.5), np.linspace(-2.0, 2.0, size)
    copies = events(some_copies(law, 3, size))

    def all_losses(device):
        return (
            engine_torch.tilted_losses(law, 1.0, *copies, source(6), size, copies=3, device=device),
            engine_torch.losses_along(law, 1.0, unit, source(7), along, device=device),
        )

    def seeded(rng, device):
        return Words(torch.Generator().manual_seed(int(rng.integers(0, 1 << 63))), PLACE)

    expected = all_losses("cpu")
    monkeypatch.setattr(engine_torch._Words, "seeded", seeded)
    with on_the_imagined_device(monkeypatch):
        found = all_losses(PLACE)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
