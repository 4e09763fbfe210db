"""A trained model as transformers reads it: the same logits, nothing missing."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from dptrain.clipping.opacus.per_example import HookedModule
from recipes.models.bert import CATEGORY, MASKED_TOKENS, BertSizes, bert, export

SIZES = BertSizes(hidden_size=8, layers=2, heads=2, intermediate_size=16)
LABELS = ["cs", "math", "hep-th"]
KINDS = {MASKED_TOKENS: AutoModelForMaskedLM, CATEGORY: AutoModelForSequenceClassification}


def _trained(head, tied):
    """A model none of whose parameters is as it began, the zeros among them too."""
    torch.manual_seed(0)
    classes = len(LABELS) if head == CATEGORY else None
    model = bert(SIZES, head=head, vocabulary=40, max_length=10, classes=classes, tied=tied)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize(
    ("head", "tied"), [(MASKED_TOKENS, True), (MASKED_TOKENS, False), (CATEGORY, True)]
)
def test_it_comes_back_with_the_same_logits(tmp_path, head, tied):
    model = _trained(head, tied)
    HookedModule(model, at_hand=lambda: None, loss_reduction="mean")  # as it is after training
    before = set(model.state_dict())
    export(model, tmp_path, labels=LABELS if head == CATEGORY else None)
    assert set(model.state_dict()) == before
    ids = torch.randint(5, 40, (3, 10))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, 6:] = 0
    theirs, info = KINDS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.allclose(theirs.eval()(**inputs).logits, model(**inputs).logits, atol=1e-6)
    if head == CATEGORY:
        assert theirs.config.id2label == dict(enumerate(LABELS))
    again = bert(
        tmp_path,
        head=head,
        vocabulary=40,
        max_length=10,
        classes=len(LABELS) if head == CATEGORY else None,
        tied=tied,
        offline=True,
    )
    assert torch.equal(again.eval()(**inputs).logits, model(**inputs).logits)
