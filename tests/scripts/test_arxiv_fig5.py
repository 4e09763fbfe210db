"""The contests on arXiv: the settings of their mechanisms, and what is trained."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from recipes.models.bert import CATEGORY, BertSizes, bert
from recipes.models.bert_heads import INPUTS
from scripts.paper import arxiv_fig5


@pytest.mark.parametrize("epsilon", arxiv_fig5.EPSILONS)
def test_settings_are_those_of_least_predicted_error(epsilon):
    """Bands do not exceed what the scheme keeps apart, or nobody accounts for them."""
    found = arxiv_fig5.settings(epsilon)
    cyclic = found["UserCyclic"]
    assert cyclic["bands"] * cyclic.get("spread", 1) <= cyclic["cycle"]
    for kind in ("UserMinSep", "UserFixed"):
        assert found[kind]["bands"] <= found[kind]["min_sep"]


def test_both_parts_begin_as_the_whole_model_does():
    torch.manual_seed(0)
    model = bert(
        BertSizes(hidden_size=8, layers=1, heads=2, intermediate_size=8),
        head=CATEGORY, vocabulary=30, max_length=6, classes=3, dropout=0.0,
    )  # fmt: skip
    ids = torch.randint(5, 30, (7, 6))
    columns = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(6).repeat(7, 1),
    }
    expected = model(**columns).logits
    rows = arxiv_fig5.Rows(
        torch.stack([columns[name] for name in INPUTS], 1), torch.randint(3, (7,))
    )
    encoder = arxiv_fig5.Encoder(model)
    assert torch.allclose(encoder(rows.inputs), expected, atol=1e-6)
    head, states = arxiv_fig5.Head(model), arxiv_fig5.states(rows, model)
    assert torch.allclose(head(states.inputs), expected, atol=1e-6)
    found = arxiv_fig5.measured(head, states)
    assert found["loss"] == pytest.approx(float(cross_entropy(expected, rows.labels)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(
        float((expected.argmax(1) == rows.labels).double().mean())
    )
    frozen = {name for name, p in encoder.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("embeddings" in name for name in frozen)


def test_runs_of_one_table_begin_alike():
    arxiv_fig5.check_same_start(1.3, None)
    arxiv_fig5.check_same_start(1.2993 + 1e-6, {"before": {"loss": 1.2993}})
    with pytest.raises(ValueError, match=r"1\.2835 before .* 1\.2993: .*--results"):
        arxiv_fig5.check_same_start(1.2835, {"before": {"loss": 1.2993}})
