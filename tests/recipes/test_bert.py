"""BERT's per-example gradients and losses, each against one example at a time."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, BertForSequenceClassification

from dptrain import (
    Gradients,
    Identity,
    Loading,
    MatrixMechanism,
    Poisson,
    PrivacyEngine,
)
from dptrain.clipping.opacus.per_example import HookedModule
from dptrain.engine.validation import check_module
from recipes.data.packages import readable_import_errors
from recipes.models.bert import CATEGORY, HEADS, MASKED_TOKENS, BertSizes, bert
from recipes.models.bert_heads import (
    IGNORED,
    INPUTS,
    ClassLoss,
    MaskedTokenLoss,
    class_metrics,
    forward,
    masked_token_metrics,
    target,
)
from tests.helpers.arxiv_files import write_config

VOCABULARY, LENGTH, ROWS, CLASSES = 40, 10, 4, 5
SIZES = BertSizes(hidden_size=8, layers=2, heads=2, intermediate_size=16)
LOSSES = {MASKED_TOKENS: MaskedTokenLoss, CATEGORY: ClassLoss}
FORMS = [(MASKED_TOKENS, True), (MASKED_TOKENS, False), (CATEGORY, True)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _model(head, source=SIZES, **options):
    classes = CLASSES if head == CATEGORY else None
    fit = {"vocabulary": VOCABULARY, "max_length": LENGTH, "classes": classes, "dropout": 0.0}
    return bert(source, head=head, **{**fit, **options})


def _batch(head):
    """A full row, a padded one, one without a masked token, and one that is padding only."""
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH))
    attention = torch.ones_like(ids)
    for row, start in ((1, 6), (3, 0)):
        ids[row, start:] = attention[row, start:] = 0
    labels = torch.where(torch.rand(ROWS, LENGTH) < 0.4, ids, IGNORED)
    labels[0, :3] = ids[0, :3]
    labels[1, 6:] = IGNORED
    labels[2] = IGNORED
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "token_type_ids": torch.zeros_like(ids),
        "position_ids": torch.arange(LENGTH).repeat(ROWS, 1),
        "labels": labels if head == MASKED_TOKENS else torch.randint(CLASSES, (ROWS,)),
    }


def _row(batch, row):
    return {name: value[row : row + 1] for name, value in batch.items()}


def _one_at_a_time(model, head, batch):
    """Gradients by parameter name, one row of the batch after the other."""
    gradients = []
    for row in range(ROWS):
        alone = _row(batch, row)
        model.zero_grad()
        LOSSES[head]()(forward(model, alone), target(alone)).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    model.zero_grad()
    return gradients


@pytest.mark.parametrize(("head", "tied"), FORMS)
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_per_example_gradients_are_those_of_one_example_at_a_time(head, tied, mode):
    model = _model(head, tied=tied).double()
    batch = _batch(head)
    expected = _one_at_a_time(copy.deepcopy(model), head, batch)
    wrapped = HookedModule(
        model, at_hand=lambda: None, loss_reduction="mean", force_functorch=mode == "functorch"
    )
    LOSSES[head]()(forward(wrapped, batch), target(batch)).backward()
    for name, p in model.named_parameters():
        for row in range(ROWS):
            assert torch.allclose(p.grad_sample[row], expected[row][name], atol=1e-12), name


@pytest.mark.parametrize("head", HEADS)
def test_it_computes_what_transformers_computes(head, tmp_path):
    """The changes for Opacus change no logit, and every parameter that is left is trained."""
    write_config(tmp_path / "config", vocabulary=VOCABULARY)
    kind = {MASKED_TOKENS: BertForMaskedLM, CATEGORY: BertForSequenceClassification}[head]
    config = kind.config_class.from_pretrained(tmp_path / "config", num_labels=CLASSES)
    theirs = kind(config).eval()
    theirs.save_pretrained(tmp_path / "weights")
    theirs, batch = theirs.double(), _batch(head)
    for tied in (True, False):
        ours = _model(head, tmp_path / "weights", tied=tied, offline=True).eval().double()
        full = theirs(**{name: batch[name] for name in INPUTS}).logits
        kept = batch["attention_mask"].bool() if head == MASKED_TOKENS else slice(0, 3)
        assert torch.allclose(forward(ours, batch)[kept], full[kept], atol=1e-12)
        LOSSES[head]()(forward(ours, batch), target(batch)).backward()
        assert all(p.grad is not None for p in ours.parameters())
        check_module(ours)
        count = sum(p.numel() for p in theirs.parameters())
        extra = config.hidden_size * VOCABULARY if head == MASKED_TOKENS and not tied else 0
        assert sum(p.numel() for p in ours.parameters()) == count + extra


def _named(batch, width=9):
    """The batch with its masked positions named, filled up to a fixed number."""
    labels = torch.full((ROWS, width), IGNORED)
    positions = torch.zeros(ROWS, width, dtype=torch.int64)
    for row in range(ROWS):
        places = (batch["labels"][row] != IGNORED).nonzero().flatten()
        labels[row, : len(places)] = batch["labels"][row, places]
        positions[row, : len(places)] = places
    return {**batch, "labels": labels, "scored_positions": positions}


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_masked_positions_alone_have_the_gradients_of_the_whole_rows(tied, mode):
    """Losses and per-example gradients, against one example at a time with every position."""
    model = _model(MASKED_TOKENS, tied=tied).double()
    batch = _batch(MASKED_TOKENS)
    named = _named(batch)
    whole = masked_token_metrics(forward(model, batch), batch)
    ours = masked_token_metrics(forward(model, named), named)
    for name, value in whole.items():
        assert torch.allclose(ours[name], value, atol=1e-12), name
    expected = _one_at_a_time(copy.deepcopy(model), MASKED_TOKENS, batch)
    if mode == "bookkeeping":
        _assert_clipped_sums(model, named, expected)
        return
    wrapped = HookedModule(
        model, at_hand=lambda: None, loss_reduction="mean", force_functorch=mode == "functorch"
    )
    MaskedTokenLoss()(forward(wrapped, named), target(named)).backward()
    for name, p in model.named_parameters():
        for row in range(ROWS):
            assert torch.allclose(p.grad_sample[row], expected[row][name], atol=1e-12), name


def _assert_clipped_sums(model, named, expected):
    """What the engine releases without noise: the mean of gradients that were clipped alone."""
    norm = 0.5 * max(
        torch.cat([g.flatten() for g in gradients.values()]).norm() for gradients in expected
    )
    rows = [{name: value[row] for name, value in named.items()} for row in range(ROWS)]
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data=DataLoader(rows),
        mechanism=MatrixMechanism(
            scheme=Poisson(probability=1.0, dataset_size=ROWS, steps=1),
            strategy=Identity(),
            noise_multiplier=1e-9,
        ),
        max_grad_norm=float(norm),
        gradients=Gradients(mode="bookkeeping"),
        loading=Loading(max_physical_batch_size=3),
        seed=0,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with private:
        for batch in private.loader:
            private.optimizer.zero_grad()
            MaskedTokenLoss()(forward(private.module, batch), target(batch)).backward()
            private.optimizer.step()
    for name, p in model.named_parameters():
        total = torch.zeros_like(p)
        for gradients in expected:
            length = torch.cat([g.flatten() for g in gradients.values()]).norm()
            total += gradients[name] * min(1.0, float(norm / length)) if length > 0 else 0.0
        assert torch.allclose(before[name] - p.detach(), total / ROWS, atol=1e-7), name


def test_examples_do_not_touch_each_other():
    model, batch = _model(MASKED_TOKENS).eval(), _batch(MASKED_TOKENS)
    before = masked_token_metrics(forward(model, batch), batch)["loss"]
    # Another example with another number of masked tokens leaves the other losses alone.
    batch["labels"][1, 1:5] = batch["input_ids"][1, 1:5]
    batch["input_ids"][1, :4] = 7
    after = masked_token_metrics(forward(model, batch), batch)["loss"]
    assert torch.allclose(before[[0, 2, 3]], after[[0, 2, 3]], atol=1e-6)
    assert not torch.allclose(before[1], after[1], atol=1e-3)


def test_masked_token_loss_is_the_mean_of_the_row_alone():
    batch = _batch(MASKED_TOKENS)
    logits = torch.randn(ROWS, LENGTH, VOCABULARY)
    losses = MaskedTokenLoss("none")(logits, batch["labels"])
    assert losses[2] == 0  # no masked token
    for row in (0, 1):
        alone = cross_entropy(logits[row], batch["labels"][row], ignore_index=IGNORED)
        assert torch.allclose(losses[row], alone)
    assert torch.allclose(MaskedTokenLoss()(logits, batch["labels"]), losses.mean())
    assert torch.allclose(MaskedTokenLoss("sum")(logits, batch["labels"]), losses.sum())


def test_metrics_of_right_and_wrong_answers():
    batch = _batch(MASKED_TOKENS)
    logits = torch.nn.functional.one_hot(batch["input_ids"], VOCABULARY).float()
    logits[1] = -logits[1]
    assert masked_token_metrics(logits, batch)["accuracy"][:3].tolist() == [1, 0, 0]
    labels = torch.tensor([0, 1, 2])
    metrics = class_metrics(torch.eye(3)[[0, 1, 1]], {"labels": labels})
    assert metrics["accuracy"].tolist() == [1, 1, 0]
    assert torch.allclose(metrics["loss"][0], cross_entropy(torch.eye(3)[:1], labels[:1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "generation"}, "head='generation'"),
        ({"head": CATEGORY, "classes": None}, "classes=None"),
        ({"head": MASKED_TOKENS, "classes": 3}, "classes=3"),
        ({"head": MASKED_TOKENS, "dropout": 1.0}, "dropout=1.0"),
        ({"head": MASKED_TOKENS, "vocabulary": VOCABULARY + 1}, "knows 40 tokens"),
        ({"head": MASKED_TOKENS, "max_length": 65}, "max_length=65"),
        ({"head": MASKED_TOKENS, "source": BertSizes(hidden_size=9)}, "hidden_size=9"),
        ({"head": MASKED_TOKENS, "source": BertSizes(layers=0)}, "layers=0"),
        ({"head": MASKED_TOKENS, "source": "no/such"}, "no model 'no/such'.*Download"),
    ],
)
def test_models_that_cannot_be_made_are_refused(tmp_path, options, message):
    write_config(tmp_path / "config", vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match=message):
        _model(**{"source": tmp_path / "config", "pretrained": False, "offline": True, **options})


def test_missing_weights_are_named(tmp_path, caplog):
    write_config(tmp_path / "config", vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match="no model"):  # a configuration is no trained model
        _model(CATEGORY, tmp_path / "config", offline=True)
    _model(CATEGORY, tmp_path / "config", pretrained=False, offline=True)
    masked = BertForMaskedLM(BertForMaskedLM.config_class.from_pretrained(tmp_path / "config"))
    masked.save_pretrained(tmp_path / "weights")
    _model(CATEGORY, tmp_path / "weights", offline=True)
    assert "classifier.weight" in caplog.text
    caplog.clear()
    _model(MASKED_TOKENS, tmp_path / "weights", offline=True)
    assert not caplog.text


def test_a_model_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    with pytest.raises(ValueError, match=r"is a roberta.*model_type bert"):
        _model(MASKED_TOKENS, tmp_path, offline=True)


def test_a_broken_torchvision_is_named(monkeypatch):
    def load():
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'BertForMaskedLM'") from error

    with pytest.raises(ValueError, match="uninstall torchvision"), readable_import_errors():
        load()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"\[text\]"):
        _model(MASKED_TOKENS)
    with pytest.raises(RuntimeError, match="out of memory"), readable_import_errors():
        raise RuntimeError("out of memory")
