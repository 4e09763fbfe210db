"""Which tokens of a batch are hidden, against the stated law."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from recipes.models.bert_heads import IGNORED, MaskedTokenLoss, MaskTokens, class_batch

MASK = MaskTokens(mask_id=4, vocabulary=1000, special_ids=(0, 1, 2, 3, 4))


def _samples(ids, rows):
    ids = torch.tensor(ids)
    row = {
        "input_ids": ids.int().numpy(),
        "attention_mask": (ids != 0).byte().numpy(),
        "token_type_ids": torch.zeros(len(ids), dtype=torch.int8).numpy(),
        "position_ids": torch.arange(len(ids)).short().numpy(),
        "label": torch.tensor(3).numpy(),
    }
    return [row] * rows


def test_masking_has_its_stated_law():
    rows, text = 2000, 50
    torch.manual_seed(1)
    ids = torch.tensor([2, *range(500, 500 + text), 3, 0, 0])
    batch = MASK(_samples(ids.tolist(), rows))
    masked = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][masked], ids.repeat(rows, 1)[masked])
    shown = batch["input_ids"]
    assert torch.equal(shown[~masked], ids.repeat(rows, 1)[~masked])
    assert not masked[:, [0, -3, -2, -1]].any()  # special tokens
    assert masked.any(1).all()
    # P(masked) = 0.15 + (probability that no other is) * 0.85 / 50, tiny here. Six sigma below.
    total = rows * text
    expected = 0.15 + 0.85**text / text
    assert abs(masked.sum() / total - expected) < 6 * (0.15 * 0.85 / total) ** 0.5
    chosen, truth = shown[masked], batch["labels"][masked]
    share = {
        0.8: (chosen == 4),
        0.1: (chosen != 4) & (chosen != truth),  # but for 1 in 1,000 random tokens
    }
    for probability, hits in share.items():
        sigma = (probability * (1 - probability) / len(chosen)) ** 0.5
        assert abs(hits.double().mean() - probability) < 6 * sigma + 2e-4
    assert chosen[share[0.1]].double().mean() == pytest.approx(499.5, abs=6 * 289 / 30)


def test_one_token_of_a_short_row_is_masked_uniformly():
    torch.manual_seed(2)
    batch = MASK(_samples([2, 600, 601, 3, 0], rows=4000))
    masked = batch["labels"] != IGNORED
    assert masked.any(1).all()
    # Each is masked alone or with the other: P = 0.15 + 0.85² / 2.
    expected = 0.15 + 0.85**2 / 2
    sigma = (expected * (1 - expected) / 4000) ** 0.5
    for column in (1, 2):
        assert abs(masked[:, column].double().mean() - expected) < 6 * sigma


def test_named_positions_are_those_of_the_whole_row():
    """The same draws, once as labels of every position, once as the positions that have one."""
    samples = _samples([2, *range(500, 530), 3, 0, 0], rows=300)
    torch.manual_seed(3)
    whole = MASK(samples)
    torch.manual_seed(3)
    named = dataclasses.replace(MASK, most=30)(samples)
    assert torch.equal(named["input_ids"], whole["input_ids"])
    scored, labels = named["scored_positions"], named["labels"]
    assert scored.shape == labels.shape == (300, 30)
    for row in range(300):
        counted = labels[row] != IGNORED
        found = dict(zip(scored[row][counted].tolist(), labels[row][counted].tolist(), strict=True))
        places = (whole["labels"][row] != IGNORED).nonzero().flatten()
        assert found == {int(place): int(whole["labels"][row, place]) for place in places}
        assert (scored[row][~counted] == 0).all()


def test_of_too_many_masked_tokens_every_subset_is_as_likely():
    rows, text, most = 4000, 30, 3
    torch.manual_seed(4)
    batch = dataclasses.replace(MASK, most=most)(_samples([2, *range(500, 530), 3], rows=rows))
    counted = batch["labels"] != IGNORED
    assert batch["labels"].shape == (rows, most)
    # min(count, 3) with count binomial, but at least one; every token has the same share of it.
    law = [math.comb(text, n) * 0.15**n * 0.85 ** (text - n) for n in range(text + 1)]
    expected = law[0] + sum(min(n, most) * each for n, each in enumerate(law))
    second = law[0] + sum(min(n, most) ** 2 * each for n, each in enumerate(law))
    counts = counted.sum(1).double()
    assert abs(counts.mean() - expected) < 6 * ((second - expected**2) / rows) ** 0.5
    share = expected / text
    places = torch.bincount(batch["scored_positions"][counted], minlength=text + 2)[1:-1]
    assert (places - rows * share).abs().max() < 6 * (rows * share * (1 - share)) ** 0.5
    # What is not counted is shown as it is.
    hidden = batch["input_ids"] == 4
    assert not hidden[:, [0, -1]].any()
    assert (hidden.sum(1) <= counts).all()


@pytest.mark.parametrize("most", [0, -3])
def test_a_number_of_positions_that_scores_nothing_is_refused(most):
    with pytest.raises(ValueError, match=f"most={most}"):
        dataclasses.replace(MASK, most=most)


def test_rows_without_text_have_loss_zero():
    batch = MASK(_samples([2, 3, 0, 0], rows=2))
    assert (batch["labels"] == IGNORED).all()
    losses = MaskedTokenLoss("none")(torch.randn(2, 4, 1000), batch["labels"])
    assert losses.tolist() == [0, 0]
    batch = dataclasses.replace(MASK, most=2)(_samples([2, 3, 0, 0], rows=2))
    assert (batch["labels"] == IGNORED).all()
    assert (batch["scored_positions"] == 0).all()


def test_batches_come_from_the_global_generator():
    samples = _samples([2, *range(500, 540), 3], rows=8)
    torch.manual_seed(5)
    first = MASK(samples)
    torch.manual_seed(5)
    again, other = MASK(samples), MASK(samples)
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["labels"], other["labels"])
    assert class_batch(samples)["labels"].tolist() == [3] * 8
    assert all(value.dtype == torch.int64 for value in {**first, **class_batch(samples)}.values())
