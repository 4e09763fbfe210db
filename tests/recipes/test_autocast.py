"""A recipe's model within ``torch.autocast``: its products are rounded, what is released is not."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain.reporting import STATEMENT
from recipes.runfolder import WEIGHTS, load_checkpoint
from recipes.task import Task, measure
from tests.helpers.tiny_vision import PLAIN, run, stopped_and_resumed

ROUNDED = [*PLAIN, "autocast=bfloat16"]
UNIT = 2.0**-8  # of rounding to bfloat16


def _task(autocast: torch.dtype | None) -> Task:
    draw = torch.Generator().manual_seed(0)
    rows = TensorDataset(torch.randn(50, 3, generator=draw), torch.zeros(50))
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return Task(
        train=rows,
        test=rows,
        model=model,
        forward=lambda module, batch: module(batch[0]),
        metrics=lambda outputs, _: {"first": outputs[:, 0], "bits": _bits(outputs[:, 0])},
        autocast=autocast,
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """1 where a float32 number is none of bfloat16."""
    assert values.dtype == torch.float32
    return (values != values.bfloat16()).float()


def test_products_are_of_rounded_numbers_and_metrics_of_float32():
    task = _task(torch.bfloat16)
    found = measure(task, task.test).metrics
    x, weight, bias = (
        values.bfloat16().double() for values in (task.test.tensors[0], *task.model.parameters())
    )
    exact = x @ weight[0] + bias[0]
    spread = (x * weight[0]).abs().sum(1) + bias[0].abs()
    # Kernels round the sum once or, where the bias comes after, twice; float32 does the rest.
    assert ((found["first"] - exact).abs() <= 2 * UNIT * spread).all()
    assert not found["bits"].any()
    assert measure(_task(None), task.test).metrics["bits"].sum() > 25


@pytest.fixture(scope="module")
def rounded(config, tmp_path_factory):
    output = tmp_path_factory.mktemp("rounded") / "run"
    assert run(config, output, *ROUNDED) == 0
    return output


@pytest.mark.slow
@pytest.mark.followed
def test_a_run_states_the_same_and_keeps_float32(config, rounded, tmp_path):
    assert run(config, tmp_path / "run", *PLAIN) == 0
    statements = [
        json.loads((folder / STATEMENT).read_text())["guarantee"]
        for folder in (rounded, tmp_path / "run")
    ]
    assert statements[0] == statements[1]
    ours, theirs = (safetensors.torch.load_file(f / WEIGHTS) for f in (rounded, tmp_path / "run"))
    for name, weights in theirs.items():
        assert ours[name].dtype == torch.float32
        # Both have the same noise; products of eight bits are about as far off as this.
        assert 0 < (ours[name] - weights).abs().max() < 0.1 * weights.abs().max()
    kept = load_checkpoint(rounded)["run"]["module"].values()
    assert all((weights != weights.bfloat16()).any() for weights in kept)


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(config, rounded, tmp_path):
    stopped_and_resumed(config, tmp_path / "run", *ROUNDED)
    ours, theirs = (
        safetensors.torch.load_file(folder / WEIGHTS) for folder in (tmp_path / "run", rounded)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_without_it_the_run_does_not_go_on(config, rounded, capsys):
    assert run(config, rounded, "--resume", *PLAIN) == 2
    assert "autocast: the run has 'bfloat16', now None" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_what_is_no_such_dtype_is_refused(config, tmp_path, capsys, dtype):
    assert run(config, tmp_path / "run", *PLAIN, f"autocast={dtype}") == 2
    message = capsys.readouterr().err
    assert "autocast" in message
    assert "bfloat16" in message
