"""A seed that everybody knows, set before a run, decides nothing of what dropout draws in it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Identity, Loading, Poisson, PrivacyEngine, PrivateTraining

SIZE = 6


def released(*, public: int, seed: int | None) -> torch.Tensor:
    """A step without noise of everybody, of a model with dropout, seeded in public before."""
    torch.manual_seed(public)
    np.random.seed(public)  # noqa: NPY002
    random.seed(public)
    model = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Dropout(0.5), nn.Linear(40, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    draw = torch.Generator().manual_seed(9)
    data = TensorDataset(torch.randn(SIZE, 40, generator=draw))
    with PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data=data,
        scheme=Poisson(probability=1.0, dataset_size=SIZE, steps=1),
        strategy=Identity(),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        seed=seed,
    ) as private:
        for (inputs,) in private.loader:
            private.optimizer.zero_grad()
            model(inputs).square().mean().backward()
            private.optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")  # there is no noise
def test_dropout_does_not_follow_from_a_seed_set_before() -> None:
    """Two masks of 240 fair coins are equal with probability 2⁻²⁴⁰."""
    assert not torch.equal(released(public=0, seed=None), released(public=0, seed=None))


@pytest.mark.filterwarnings("ignore")
def test_a_run_with_a_seed_of_its_own_is_the_same_again() -> None:
    assert torch.equal(released(public=0, seed=3), released(public=1, seed=3))


@pytest.mark.filterwarnings("ignore")
def test_other_generators_are_seeded_too() -> None:
    drawn = []
    for public, seed in ((0, 3), (1, 3), (0, None), (0, 4)):
        released(public=public, seed=seed)
        drawn.append((random.random(), np.random.random()))  # noqa: NPY002
    assert drawn[0] == drawn[1]
    for place in (0, 1):
        assert len({pair[place] for pair in drawn}) == 3


def begun(seed: int) -> tuple[nn.Module, PrivateTraining]:
    """Two steps in two parts each, of a model with dropout."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    draw = torch.Generator().manual_seed(9)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data=TensorDataset(torch.randn(SIZE, 8, generator=draw)),
        scheme=Poisson(probability=1.0, dataset_size=SIZE, steps=2),
        strategy=Identity(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        loading=Loading(max_physical_batch_size=SIZE // 2),
        seed=seed,
    )
    return model, private


def parts(model: nn.Module, private: PrivateTraining, most: int) -> torch.Tensor:
    """So many batches; an evaluation draws from torch's generator before each step."""
    torch.rand(7)
    for number, (inputs,) in enumerate(private.loader, start=1):
        private.optimizer.zero_grad()
        model(inputs).square().mean().backward()
        private.optimizer.step()
        if number == most:
            break
        if private.optimizer.at_step_boundary:
            torch.rand(7)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("most", [1, 3])
def test_a_step_begins_again_with_the_dropout_it_had(most: int) -> None:
    """Cut within the first or the second step, and continued without the evaluation before it."""
    whole = parts(*begun(5), 4)
    model, private = begun(5)
    parts(model, private, most)
    state = private.state_dict()
    model, private = begun(5)
    private.load_state_dict(state)
    for (inputs,) in private.loader:
        private.optimizer.zero_grad()
        model(inputs).square().mean().backward()
        private.optimizer.step()
        if private.optimizer.at_step_boundary and private.steps_executed == 1:
            torch.rand(7)
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), whole)
