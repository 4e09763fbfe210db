"""Losses by the example: against a loop over the examples, and clipped against one at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.losses import (
    TokenCrossEntropy,
    causal_cross_entropy,
    reduce_examples,
    token_cross_entropy,
)

CLASSES, TOKENS = 7, 5
WEIGHTS = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0, 0.1, 4.0], dtype=torch.float64)


def sequences(rows=6):
    """Logits and labels, with all numbers of targets from none to all."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, TOKENS, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (rows, TOKENS), generator=generator)
    for i in range(rows):
        labels[i, min(i, TOKENS) :] = -100
    return logits, labels


def by_hand(logits, labels, weight, smoothing, within):
    """One example's loss, token by token, from the definition."""
    total, found = 0.0, 0
    w = torch.ones(CLASSES, dtype=torch.float64) if weight is None else weight
    for scores, y in zip(logits, labels.tolist(), strict=True):
        if y == -100:
            continue
        nll = -scores.log_softmax(0)
        total = total + (1 - smoothing) * w[y] * nll[y] + smoothing / CLASSES * (w * nll).sum()
        found += 1
    if within == "mean":
        return total / max(found, 1)
    return total if within == "sum" else total / within


@pytest.mark.parametrize("weight", [None, WEIGHTS], ids=["plain", "weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("within", ["mean", "sum", 5])
@pytest.mark.parametrize("shift", [False, True], ids=["masked", "causal"])
def test_token_losses_are_those_of_a_loop(weight, smoothing, within, shift):
    logits, labels = sequences()
    own = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    rows = [by_hand(a, b, weight, smoothing, within) for a, b in zip(*own, strict=True)]
    expected = torch.tensor([float(row) for row in rows], dtype=torch.float64)
    loss = causal_cross_entropy if shift else token_cross_entropy
    options = {"weight": weight, "label_smoothing": smoothing, "within": within}
    for reduction, wanted in (
        ("none", expected),
        ("sum", expected.sum()),
        ("mean", expected.sum() / len(expected)),
    ):
        found = loss(logits, labels, reduction=reduction, **options)
        torch.testing.assert_close(found, wanted)
        module = TokenCrossEntropy(
            weight, label_smoothing=smoothing, shift=shift, within=within, reduction=reduction
        )
        assert torch.equal(module(logits, labels), found)


def test_one_label_an_example_with_class_weights():
    logits, labels = torch.randn(4, CLASSES), torch.tensor([3, 1, 1, 6])
    expected = sum(WEIGHTS[y] * F.cross_entropy(z, y) for z, y in zip(logits, labels, strict=True))
    found = token_cross_entropy(logits, labels, weight=WEIGHTS.float())
    torch.testing.assert_close(found, expected.float() / 4)


def test_reduce_examples_takes_weights_and_leaves_out_what_is_infinite():
    losses = torch.tensor([[1.0, 2.0], [3.0, torch.inf], [5.0, 6.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 3.0], [2.0, 0.0], [0.0, 0.0]])
    found = reduce_examples(losses, mask, reduction="none")
    torch.testing.assert_close(found, torch.tensor([7 / 4, 3.0, 0.0]))
    found.sum().backward()
    torch.testing.assert_close(losses.grad, torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.0, 0.0]]))
    pixels = torch.ones(3, 4, 5)
    kept = torch.tensor([[1, 1, 0, 0]] * 3, dtype=torch.bool)
    assert float(reduce_examples(pixels, kept, within="sum", reduction="sum")) == 3 * 2 * 5
    assert float(reduce_examples(pixels)) == 1.0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: reduce_examples(torch.tensor(1.0)), ValueError, "reduction='none'"),
        (lambda: reduce_examples(torch.ones(3, 2), torch.ones(2)), ValueError, "mask has shape"),
        (lambda: reduce_examples(torch.ones(3), within="max"), ValueError, "within='max'"),
        (lambda: reduce_examples(torch.ones(3), within=0), ValueError, "within=0"),
        (lambda: reduce_examples(torch.ones(3), within=True), TypeError, "within=True"),
        (lambda: TokenCrossEntropy(reduction="batch"), ValueError, "reduction='batch'"),
        (
            lambda: token_cross_entropy(torch.ones(2, 7, 5), torch.ones(2, 5, dtype=torch.long)),
            ValueError,
            "movedim",
        ),
        (
            lambda: causal_cross_entropy(torch.ones(2, 7), torch.ones(2, dtype=torch.long)),
            ValueError,
            "tokens",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids):
        return self.head(self.embed(ids).tanh())


@pytest.mark.parametrize("shift", [False, True], ids=["masked", "causal"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_clipped_sums_are_those_of_one_example_at_a_time(mode, reduction, shift):
    """An example's gradient is the one it has alone, whatever the lengths of the others."""
    torch.manual_seed(0)
    module, rows = Tagger(), 6
    ids = torch.randint(0, CLASSES, (rows, TOKENS))
    _, labels = sequences(rows)
    criterion = TokenCrossEntropy(WEIGHTS.float(), shift=shift, reduction=reduction)
    alone = copy.deepcopy(module)
    norms, sums = [], [torch.zeros_like(p) for p in alone.parameters()]
    for i in range(rows):
        loss = criterion(alone(ids[i : i + 1]), labels[i : i + 1])
        grads = torch.autograd.grad(loss, list(alone.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        norms.append(norm)
        for total, g in zip(sums, grads, strict=True):
            total += g * min(1.0, 0.5 / (norm.item() + 1e-6))
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data=TensorDataset(ids, labels),
        scheme=Poisson(probability=1.0, dataset_size=rows, steps=1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        seed=0,
        gradients=Gradients(loss=criterion, mode=mode),
    )
    for x, y in private.loader:
        criterion(private.module(x), y).backward()
        private.optimizer.step()
    torch.testing.assert_close(private.last_norms, torch.stack(norms), rtol=1e-4, atol=1e-6)
    divisor = rows if reduction == "mean" else 1
    for p, total in zip(private.optimizer.params, sums, strict=True):
        torch.testing.assert_close(p.grad * divisor, total, rtol=1e-4, atol=1e-6)
