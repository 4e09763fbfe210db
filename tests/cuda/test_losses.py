"""Losses by the example on a GPU: the loop over tokens, and clipped sums of one at a time."""

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.losses import TokenCrossEntropy, reduce_examples
from tests.test_losses import CLASSES, TOKENS, WEIGHTS, Tagger, by_hand, sequences

# The mean within an example or a sum, with and without a shift, weights and smoothing.
CASES = [
    (None, 0.0, "mean", False),
    (WEIGHTS, 0.1, "sum", False),
    (WEIGHTS, 0.0, 5, True),
    (None, 0.1, "mean", True),
]


@pytest.mark.parametrize(("weight", "smoothing", "within", "shift"), CASES)
def test_token_losses_are_those_of_a_loop(weight, smoothing, within, shift, device):
    logits, labels = sequences()
    own = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    rows = [by_hand(a, b, weight, smoothing, within) for a, b in zip(*own, strict=True)]
    expected = torch.tensor([float(row) for row in rows], dtype=torch.float64, device=device)
    for reduction, wanted in (
        ("none", expected),
        ("sum", expected.sum()),
        ("mean", expected.mean()),
    ):
        criterion = TokenCrossEntropy(
            weight, label_smoothing=smoothing, shift=shift, within=within, reduction=reduction
        ).to(device)
        torch.testing.assert_close(criterion(logits.to(device), labels.to(device)), wanted)


def test_weights_and_what_is_infinite(device):
    losses = torch.tensor([[1.0, 2.0], [3.0, torch.inf], [5.0, 6.0]], device=device)
    mask = torch.tensor([[1.0, 3.0], [2.0, 0.0], [0.0, 0.0]], device=device)
    found = reduce_examples(losses, mask, reduction="none")
    torch.testing.assert_close(found.cpu(), torch.tensor([7 / 4, 3.0, 0.0]))


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_clipped_sums_are_those_of_one_example_at_a_time(mode, device):
    torch.manual_seed(0)
    module, rows = Tagger(), 6
    ids = torch.randint(0, CLASSES, (rows, TOKENS))
    _, labels = sequences(rows)
    module = module.double().to(device)
    criterion = TokenCrossEntropy(WEIGHTS, reduction="sum").to(device)
    alone = copy.deepcopy(module)
    found = []
    for i in range(rows):
        loss = criterion(alone(ids[i : i + 1].to(device)), labels[i : i + 1].to(device))
        grads = torch.autograd.grad(loss, list(alone.parameters()))
        found.append(torch.cat([g.flatten() for g in grads]))
    gradients = torch.stack(found)
    norms = gradients.norm(dim=1)
    bound = float(norms.median())
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data=TensorDataset(ids, labels),
        scheme=Poisson(probability=1.0, dataset_size=rows, steps=1),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        gradients=Gradients(mode=mode, loss=criterion),
    )
    for x, y in private.loader:
        criterion(private.module(x.to(device)), y.to(device)).backward()
        private.optimizer.step()
    released = torch.cat([p.grad.flatten() for p in private.optimizer.params])
    factors = (bound / (norms + 1e-6)).clamp(max=1.0)
    # The modes differ by the constant 1e-6 that is added to a norm, of six gradients.
    torch.testing.assert_close(released, factors @ gradients, rtol=0, atol=1e-5)
