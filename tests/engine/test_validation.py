"""Modules, losses and values that would break the guarantee or fail in the middle of a run."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.engine.test_arguments import DATA, ONE, refused
from tests.helpers.engine import everything_every_step, images, make, small_net, train, wire


def test_embeddings_that_rescale_their_rows_are_refused():
    """The forward pass would change the rows that a batch looks up, without noise."""
    net = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3))
    refused(r"'0' is a Embedding with max_norm", module=net)


def test_checking_a_module_keeps_the_mode_of_every_layer():
    net = small_net()
    net[4].eval()
    make(net, DATA, scheme=ONE)
    assert net.training
    assert not net[4].training


def test_compiled_modules_are_refused():
    refused("compiled", module=torch.compile(small_net()))


def test_a_mean_over_the_targets_that_count_is_refused(mode):
    """One label set to the ignored one would change the scale of all other gradients."""
    net = small_net()
    arguments = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(ignore_index=2),
        "data": DATA,
        "scheme": ONE,
        "max_grad_norm": 1.0,
        "noise_multiplier": 1.0,
        "grad_sample_mode": mode,
    }
    with pytest.raises(ValueError, match="ignore_index=2"):
        wire(**arguments)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"target_delta": 1.5}, ValueError, "target_delta=1.5"),
        ({"target_delta": 0.0}, ValueError, "target_delta=0.0"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm='1'"),
        ({"max_grad_norm": [1.0, 2.0]}, TypeError, "max_grad_norm"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier='1'"),
        ({"noise_multiplier": True}, TypeError, "noise_multiplier=True"),
        ({"scheme": "poisson"}, TypeError, "scheme='poisson'"),
        ({"scheme": None, "mechanism": "best"}, TypeError, "mechanism='best'"),
    ],
)
def test_values_of_another_kind_name_the_argument(options, kind, match):
    refused(match, kind=kind, **options)


def test_double_precision_models_train(mode):
    x, y = images(8).tensors
    net = small_net().double()
    private = make(net, TensorDataset(x.double(), y), mode, scheme=everything_every_step(8, 2))
    train(private)
    assert private.steps_executed == 2
    assert net[0].weight.dtype == torch.float64
