"""Evaluation: means over examples, and summaries of all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_model
from torch import nn
from torch.utils.data import TensorDataset

from recipes.task import Task, evaluate, measure, save_weights

ROWS = 600  # several evaluation batches, the last one smaller
SPREAD = slice(0, ROWS, 2)  # 300 of them at equal distances


def _task(**changes):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, size, generator=generator) for size in (3, 2))
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))

    def metrics(outputs, batch):
        errors = (outputs - batch[1]).square()
        return {"loss": errors.mean(1), "worst": errors.amax(1)}

    stated = {
        "train": TensorDataset(x, y),
        "test": TensorDataset(x, y),
        "model": model,
        "forward": lambda module, batch: module(batch[0]),
        "metrics": metrics,
    }
    return Task(**{**stated, **changes})


def _expected(task, rows=ROWS):
    x, y = (tensor[:rows] for tensor in task.test.tensors)
    with torch.no_grad():
        outputs = task.model[1](x)  # without dropout
    return outputs, y


def test_metrics_are_means_over_the_examples():
    task = _task()
    outputs, targets = _expected(task)
    errors = (outputs - targets).square()
    found = evaluate(task)
    assert found == pytest.approx(
        {"loss": float(errors.mean()), "worst": float(errors.amax(1).mean())}, rel=1e-6
    )
    errors = errors[SPREAD]
    assert evaluate(task, limit=300)["loss"] == pytest.approx(float(errors.mean()), rel=1e-6)


def test_every_example_is_measured_in_order():
    task = _task()
    outputs, targets = _expected(task)
    found = measure(task, task.test)
    assert found.metrics["loss"].dtype == torch.float64
    assert torch.allclose(
        found.metrics["loss"].float(), (outputs - targets).square().mean(1), atol=1e-6
    )
    assert found.outputs is found.targets is None  # nobody asked for them


def test_summaries_see_all_outputs_at_once():
    """A maximum over the test set is no mean over its batches."""
    seen = []

    def summaries(outputs, targets):
        seen.append((outputs, targets))
        return {"largest": float((outputs - targets).abs().max())}

    task = _task(summaries=summaries, target=lambda batch: batch[1])
    outputs, targets = _expected(task)
    found = evaluate(task)
    assert found["largest"] == pytest.approx(float((outputs - targets).abs().max()), rel=1e-6)
    assert set(found) == {"loss", "worst", "largest"}
    evaluate(task, limit=300)
    for (got, wanted), rows in zip(seen, (slice(None), SPREAD), strict=True):
        assert torch.allclose(got, outputs[rows], atol=1e-6)
        assert torch.equal(wanted, targets[rows])


def test_summaries_need_a_target():
    with pytest.raises(ValueError, match="summaries without target"):
        dataclasses.replace(_task(), summaries=lambda outputs, targets: {})


def test_an_evaluation_changes_nothing():
    task = _task(summaries=lambda outputs, targets: {}, target=lambda batch: batch[1])
    state = torch.get_rng_state()
    evaluate(task)
    assert torch.equal(torch.get_rng_state(), state)
    assert task.model.training
    assert all(p.grad is None for p in task.model.parameters())


def test_weights_are_read_back_bit_for_bit_also_tied_and_transposed_ones(tmp_path):
    """safetensors refuses tensors that share memory or are not contiguous, if they are not told."""

    def tied():
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 3))
        model[1].weight = model[0].weight
        model[2].weight = nn.Parameter(torch.randn(5, 3).t())
        model.register_buffer("mean", torch.randn(3, dtype=torch.float64))
        return model

    torch.manual_seed(0)
    trained, read = tied(), tied()
    save_weights(trained, tmp_path / "model.safetensors")
    load_model(read, tmp_path / "model.safetensors")
    assert read[1].weight is read[0].weight
    ours, theirs = trained.state_dict(), read.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
