"""A loss function that is handed over is called: what ties examples is refused, and nothing else.

The oracle is the definition: the loss of several rows against the losses of each alone.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dptrain import Gradients, PrivacyEngine
from dptrain.losses import TokenCrossEntropy
from tests.helpers.engine import everything_every_step, images, small_net

W = torch.tensor([0.5, 2.0, 3.0])


class Own(nn.Module):
    """A loss of somebody's own."""

    def __init__(self, compute, reduction="mean"):
        super().__init__()
        self.compute, self.reduction = compute, reduction

    def forward(self, *arguments):
        return self.compute(*arguments)


def nt_xent(a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    likeness = (z @ z.T / 0.5).fill_diagonal_(-1e9)
    rows = len(a)
    partner = torch.cat([torch.arange(rows) + rows, torch.arange(rows)])
    return F.cross_entropy(likeness, partner)


def barlow_twins(a, b):
    a, b = ((v - v.mean(0)) / (v.std(0, correction=0) + 1e-3) for v in (a, b))
    c = a.T @ b / len(a)
    return (c - torch.eye(len(c))).square().sum()


def over_counted_tokens(logits, labels):
    counted = labels > 0
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def hardest_half(x, y):
    losses = F.cross_entropy(x, y, reduction="none")
    return losses.topk((len(losses) + 1) // 2).values.mean()


def by_class_counts(x, y):
    weights = 1 / torch.bincount(y, minlength=x.shape[1]).clamp(min=1)
    return (F.cross_entropy(x, y, reduction="none") * weights[y]).mean()


def triplets_within(x, y):
    return (x[:, None] - x).norm(dim=-1).max(1).values.mean()


def center(x, y):
    return (x - x.mean(0)).square().mean()


TYING = {
    "NT-Xent": nt_xent,
    "Barlow twins": barlow_twins,
    "tokens of the batch": over_counted_tokens,
    "the hardest half": hardest_half,
    "counts of classes": by_class_counts,
    "hardest pairs": triplets_within,
    "its center": center,
}

RIGHT = {
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted sum": nn.CrossEntropyLoss(weight=W, reduction="sum"),
    "NLLLoss": nn.NLLLoss(),
    "MSELoss": nn.MSELoss(),
    "L1Loss": nn.L1Loss(reduction="sum"),
    "SmoothL1Loss": nn.SmoothL1Loss(),
    "HuberLoss": nn.HuberLoss(),
    "KLDivLoss": nn.KLDivLoss(),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "GaussianNLLLoss": nn.GaussianNLLLoss(),
    "BCELoss": nn.BCELoss(),
    "BCELoss, weights": nn.BCELoss(weight=W),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "BCEWithLogitsLoss, weights": nn.BCEWithLogitsLoss(weight=W),
    "BCEWithLogitsLoss, positive": nn.BCEWithLogitsLoss(pos_weight=W),
    "MultiMarginLoss, weights": nn.MultiMarginLoss(weight=W),
    "MultiLabelSoftMarginLoss, weights": nn.MultiLabelSoftMarginLoss(weight=W),
    "SoftMarginLoss": nn.SoftMarginLoss(),
    "HingeEmbeddingLoss": nn.HingeEmbeddingLoss(),
    "CosineEmbeddingLoss": nn.CosineEmbeddingLoss(),
    "MarginRankingLoss": nn.MarginRankingLoss(),
    "TripletMarginLoss": nn.TripletMarginLoss(),
    "TripletMarginWithDistanceLoss": nn.TripletMarginWithDistanceLoss(),
    "TokenCrossEntropy": TokenCrossEntropy(),
    "own": Own(lambda x, y: F.cross_entropy(x, y)),
}


@pytest.mark.parametrize("name", TYING)
def test_a_criterion_that_ties_examples_is_refused(name):
    with pytest.raises(ValueError, match="ties the examples of a batch together"):
        Gradients(loss=Own(TYING[name]))


@pytest.mark.parametrize("name", RIGHT)
def test_a_criterion_of_one_loss_a_row_is_not(name):
    found = Gradients(loss=RIGHT[name])
    assert found.reduction == RIGHT[name].reduction
    assert found.notes == ()


def test_four_weights_are_no_divisors():
    """Alone and together, of rows that the check has not made up."""
    torch.manual_seed(3)
    x, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 1])
    targets = (torch.randn(5, 3) > 0).float()
    for loss, given, y in (
        (nn.BCELoss(weight=W), x.sigmoid(), targets),
        (nn.BCEWithLogitsLoss(weight=W), x, targets),
        (nn.MultiMarginLoss(weight=W), x, labels),
        (nn.MultiLabelSoftMarginLoss(weight=W), x, targets),
    ):
        alone = torch.stack([loss(given[k : k + 1], y[k : k + 1]) for k in range(5)])
        torch.testing.assert_close(loss(given, y), alone.mean())
        Gradients(loss=loss)


def test_the_guarantee_names_a_loss_that_went_unseen():
    """One that takes other arguments than those that can be made up."""
    net = small_net()
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data=images(),
        scheme=everything_every_step(24, 1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        gradients=Gradients(loss=nn.CTCLoss()),
    )
    notes = private.guarantee(1e-3).notes
    assert any("the loss, a CTCLoss," in note and "could not be seen" in note for note in notes)


def test_a_loss_that_ties_rows_of_some_kinds_only_is_noted():
    """It may be meant for the others, as sums over positions that broadcast by accident are."""

    def pairs(x, _):
        return torch.cdist(x, x).max(1).values.mean()  # within each, of three dimensions

    (note,) = Gradients(loss=Own(pairs)).notes
    assert "could not be seen" in note


def test_the_check_leaves_the_criterion_and_the_generators_as_they_were():
    class Counts(nn.Module):
        reduction, calls = "mean", 0

        def forward(self, x, y):
            self.calls += 1
            return F.mse_loss(x, y) + 0 * torch.rand(())

    loss, state = Counts(), torch.get_rng_state()
    Gradients(loss=loss)
    assert loss.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
