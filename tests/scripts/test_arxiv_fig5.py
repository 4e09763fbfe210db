"""The contest on arXiv: its mechanisms, what stands for them at a fraction, and what is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from dptrain import AttributionGraph, MatrixMechanism
from recipes.models.bert import CATEGORY, BertSizes, bert
from recipes.models.bert_heads import INPUTS
from scripts.paper import arxiv_fig5


@pytest.fixture(scope="module")
def users():
    """Two thousand users of four thousand examples, two an example at most."""
    rng = np.random.default_rng(0)
    pairs = [sorted({int(a), int(b)}) for a, b in rng.integers(0, 9000, (6000, 2))]
    return AttributionGraph.from_lists(pairs).bound(2, duplicates=True, seed=0).graph


@pytest.mark.parametrize("name", ["dp-sgd", "cyclic", "min-sep", "unamplified"])
def test_a_simulation_has_the_noise_of_the_mean_and_a_part_of_the_batch(name, users, monkeypatch):
    monkeypatch.setattr(arxiv_fig5, "BATCH", 32)
    monkeypatch.setattr(arxiv_fig5, "STEPS", 80)
    method = arxiv_fig5.methods(8.0)[name]
    whole = MatrixMechanism(
        scheme=method.scheme(users), strategy=method.strategy, noise_multiplier=3.0
    )
    small = arxiv_fig5.simulated(whole, method, users)
    assert type(small.scheme) is type(whole.scheme)
    assert small.strategy == whole.strategy
    # Where draws bar others the mean is simulated, to about a percent.
    assert small.scheme.expected_batch_size == pytest.approx(2, rel=0.05)
    ratio = small.noise_multiplier / small.scheme.expected_batch_size
    assert ratio == pytest.approx(3.0 / whole.scheme.expected_batch_size, rel=0.05)


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
