"""The multi-layer perceptron."""

from __future__ import annotations

import pytest
import torch

from recipes.models.mlp import mlp


def test_the_default_is_the_model_of_the_papers_code():
    model = mlp(inputs=714, outputs=25)
    assert [type(layer).__name__ for layer in model] == ["Linear", "ReLU", "Linear"]
    assert model[0].out_features == 369
    assert sum(p.numel() for p in model.parameters()) == 715 * 369 + 370 * 25
    assert model(torch.zeros(3, 714)).shape == (3, 25)


def test_the_layers_are_those_asked_for():
    model = mlp(inputs=5, outputs=2, widths=[8, 4], activation="tanh", groups=2)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Linear", "GroupNorm", "Tanh"] * 2 + ["Linear"]
    linear = mlp(inputs=5, outputs=2, widths=[])
    x = torch.randn(4, 5)
    assert torch.allclose(linear(x), x @ linear[0].weight.T + linear[0].bias)


def test_one_group_is_layer_normalization():
    torch.manual_seed(0)
    model = mlp(inputs=5, outputs=2, widths=[6], groups=1)
    hidden = model[0](torch.randn(4, 5))
    expected = torch.nn.functional.layer_norm(hidden, (6,), eps=model[1].eps)
    assert torch.allclose(model[1](hidden), expected, atol=1e-6)


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_examples_are_kept_apart(groups):
    torch.manual_seed(0)
    model = mlp(inputs=5, outputs=2, widths=[16, 16], groups=groups)
    x = torch.randn(3, 5)
    changed = x.clone()
    changed[1] += 1
    before, after = model(x), model(changed)
    assert torch.allclose(before[[0, 2]], after[[0, 2]], atol=1e-6)
    assert not torch.allclose(before[1], after[1], atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": 0}, "inputs=0"),
        ({"outputs": 0}, "outputs=0"),
        ({"widths": [8, 0]}, r"not \[0\]"),
        ({"activation": "gelu"}, "activation='gelu': choose one of relu, tanh"),
        ({"groups": -1}, "groups=-1"),
        ({"widths": [8, 6], "groups": 4}, r"groups=4 must divide every width, not so for \[6\]"),
    ],
)
def test_impossible_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        mlp(**{"inputs": 5, "outputs": 2, **changes})
