"""Models of Hugging Face as their library builds them, against one row at a time."""

import copy
import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson, PrivacyEngine
from tests.helpers.clipping_oracle import assert_norms, assert_sums, flat_factors, reference

ROWS, LENGTH, VOCABULARY, PAD = 4, 7, 23, 1
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": PAD}
ENCODER = {
    **SIZES,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTIL = {
    **SIZES,
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 12,
    "max_position_embeddings": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
GPT2 = {
    **SIZES,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MODELS = {
    "BERT, masked": ("BertForMaskedLM", transformers.BertConfig, ENCODER),
    "BERT, classes": ("BertForSequenceClassification", transformers.BertConfig, ENCODER),
    "RoBERTa, masked": ("RobertaForMaskedLM", transformers.RobertaConfig, ENCODER),
    "RoBERTa, classes": ("RobertaForSequenceClassification", transformers.RobertaConfig, ENCODER),
    "DistilBERT, masked": ("DistilBertForMaskedLM", transformers.DistilBertConfig, DISTIL),
    "DistilBERT, classes": (
        "DistilBertForSequenceClassification",
        transformers.DistilBertConfig,
        DISTIL,
    ),
    "GPT-2": ("GPT2LMHeadModel", transformers.GPT2Config, GPT2),
    "GPT-2, classes": ("GPT2ForSequenceClassification", transformers.GPT2Config, GPT2),
}
TIED = {
    "BERT, masked": ("cls.predictions.decoder", "bert.embeddings.word_embeddings"),
    "RoBERTa, masked": ("lm_head.decoder", "roberta.embeddings.word_embeddings"),
    "DistilBERT, masked": ("vocab_projector", "distilbert.embeddings.word_embeddings"),
    "GPT-2": ("lm_head", "transformer.wte"),
}


class Logits(nn.Module):
    """A model called with ids and their mask, and nothing about positions."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask).logits


def build(name, attention="sdpa"):
    torch.manual_seed(0)
    kind, config, sizes = MODELS[name]
    config = config(**sizes, attn_implementation=attention)
    model = getattr(transformers, kind)(config)
    for n, p in model.named_parameters():
        with torch.no_grad():
            p.normal_(std=0.4)
            if n.endswith(("norm.weight", "Norm.weight", "ln_1.weight", "ln_2.weight")):
                p.add_(1.0)
    return Logits(model).double().train()


def texts(length=LENGTH):
    torch.manual_seed(4)
    ids = torch.randint(2, VOCABULARY, (ROWS, length))
    ids[0, 1:3] = ids[0, 0]  # a token that is there several times
    lengths = torch.tensor([length, length - 2, 3, length])
    mask = (torch.arange(length) < lengths[:, None]).long()
    return ids.masked_fill(mask == 0, PAD), mask, torch.randn(ROWS).double() * 20


def make(model, tensors, mode="bookkeeping"):
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data=TensorDataset(*tensors),
        scheme=Poisson(probability=1.0, dataset_size=len(tensors[0]), steps=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        gradients=Gradients(mode=mode, loss="sum"),
    )


def assert_equals_loop(model, tensors, mode="bookkeeping"):
    """Norms and clipped sums of a batch; of a float64 model on ids, mask and targets."""
    *inputs, targets = tensors
    alone = copy.deepcopy(model)
    wanted = reference(alone, tuple(inputs), targets)
    private = make(model, tensors, mode)
    for *batch, y in private.loader:
        output = private.module(*batch)
        torch.testing.assert_close(output, alone(*batch), rtol=1e-10, atol=1e-10)
        (output.flatten(1) - y[:, None]).square().mean(1).sum().backward()
        clipper, bound = private.optimizer.clipper, float(wanted.norms.median())
        weights = torch.tensor([1.0, 1.0, 0.5, 1.0])
        sums = clipper.clipped_sum(max_grad_norm=bound, weights=weights)
        assert_norms(clipper.norms, wanted, 1e-10)
        assert_sums(sums, wanted, flat_factors(wanted.norms, bound, weights), 1e-10)
        break
    return private


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_are_those_of_one_row_at_a_time(name, attention):
    assert_equals_loop(build(name, attention), texts())


@pytest.mark.sample(every=13)
@pytest.mark.parametrize("name", MODELS)
def test_as_many_positions_as_rows(name):
    """The one shape where a row of positions looks like a batch."""
    assert_equals_loop(build(name), texts(ROWS))


@pytest.mark.parametrize("name", TIED)
def test_heads_are_tied_to_the_embedding(name):
    model = build(name)
    head, table = (model.model.get_submodule(part) for part in TIED[name])
    assert head.weight is table.weight


@pytest.mark.parametrize("name", ["BERT, classes", "GPT-2"])
def test_the_default_mode_is_bookkeeping(name, caplog):
    with caplog.at_level(logging.WARNING):
        private = assert_equals_loop(build(name), texts(), mode=None)
    assert type(private.module).__name__ != "HookedModule"
    assert not caplog.text


@pytest.mark.parametrize("name", ["BERT, masked", "GPT-2"])
def test_a_model_is_trained(name):
    """A step's update is that of the clipped sum; twice, and the state dict keeps its names."""
    model = build(name)
    names = list(model.state_dict())
    ids, mask, targets = texts()
    alone = copy.deepcopy(model)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=TensorDataset(ids, mask, targets),
        scheme=Poisson(probability=1.0, dataset_size=ROWS, steps=2),
        noise_multiplier=0.0,
        max_grad_norm=2.0,
        gradients=Gradients(mode="bookkeeping", loss="sum"),
    )
    for i, m, y in private.loader:
        wanted = reference(alone, (ids, mask), targets)
        factors = flat_factors(wanted.norms, 2.0, torch.ones(ROWS))
        sums = wanted.clipped_sums(factors)
        private.optimizer.zero_grad()
        output = private.module(i, m)
        (output.flatten(1) - y[:, None]).square().mean(1).sum().backward()
        private.optimizer.step()
        with torch.no_grad():
            for p, total in zip(alone.parameters(), sums, strict=True):
                p -= 0.01 * total.view_as(p)
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, right, rtol=1e-9, atol=1e-9)
    assert list(model.state_dict()) == names


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.table, self.rnn = nn.Embedding(VOCABULARY, 3), kind(3, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.rnn(self.table(ids))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    ids, _, y = texts()
    assert_equals_loop(Recurrent(kind).double(), (ids, y), mode=None)


@pytest.mark.parametrize("mode", ["bookkeeping", None])
def test_opacus_recurrent_layers_are_refused_by_name(mode):
    ids, _, y = texts()
    says = r"layer 'rnn': DPLSTM has no rule: use torch\.nn\.LSTM, which has one"
    with pytest.raises(ValueError, match=says):
        make(Recurrent(DPLSTM), (ids, y), mode)
