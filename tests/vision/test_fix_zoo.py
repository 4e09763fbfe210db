"""dptrain.fix on models of torchvision and timm, with all that their layers do besides."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dptrain


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def quietly(model: nn.Module) -> list[str]:
    lines: list[str] = []
    assert dptrain.fix(model, report=lines.append) is model
    return lines


@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param("torchvision.models", "resnet18", marks=needs("torchvision")),
        pytest.param("torchvision.models", "efficientnet_b0", marks=needs("torchvision")),
        pytest.param("torchvision.models", "mobilenet_v3_small", marks=needs("torchvision")),
        pytest.param("timm", "resnet10t", marks=needs("timm")),
        pytest.param("timm", "mobilenetv3_small_050", marks=needs("timm")),
    ],
)
def test_a_fixed_model_takes_a_step(package: str, name: str) -> None:
    torch.manual_seed(0)
    library = importlib.import_module(package)
    model = library.create_model(name, num_classes=4) if package == "timm" else None
    model = model or getattr(library, name)(num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = list(dict(model.named_parameters()))
    assert not any("left as it is" in line for line in quietly(model))
    assert list(dict(model.named_parameters())) == names
    private = dptrain.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data=TensorDataset(torch.randn(3, 3, 32, 32), torch.arange(3)),
        scheme=dptrain.Poisson(probability=1.0, dataset_size=3, steps=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        gradients=dptrain.Gradients(mode="bookkeeping"),
    )
    for x, y in private.loader:
        nn.functional.cross_entropy(private.module(x), y).backward()
        private.optimizer.step()
    assert private.steps_executed == 1
    assert private.nonfinite_examples == 0


@needs("timm")
def test_the_activation_of_a_norm_of_timm_stays() -> None:
    from timm.layers.norm_act import BatchNormAct2d

    torch.manual_seed(0)
    norm = BatchNormAct2d(8, act_layer=nn.SiLU, eps=1e-3)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    weight, bias = norm.weight, norm.bias
    fixed = dptrain.fix(norm, report=lambda _: None)
    x = torch.randn(2, 8, 3, 3)
    assert fixed.weight is weight
    wanted = nn.functional.silu(nn.functional.group_norm(x, 2, weight, bias, 1e-3))
    torch.testing.assert_close(fixed(x), wanted)
