"""Every scheme through the engine: what is released is the clipped sum of its rows, no others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import TensorDataset

from dptrain.sampling import (
    AttributionGraph,
    CyclicPoisson,
    MinSep,
    Poisson,
    RandomAllocation,
    Shuffled,
    UserCyclic,
    UserFixed,
    UserMinSep,
)
from tests.helpers.engine import flat, images, make, reference_sum, released, small_net, train

N = 24
GRAPH = AttributionGraph.from_lists([[e % 9, 9 + e % 7] for e in range(N)])

SCHEMES = {
    "Poisson, cut": Poisson(probability=0.4, dataset_size=N, steps=6, max_batch_size=9),
    "CyclicPoisson": CyclicPoisson(probability=0.5, cycle=2, dataset_size=N, steps=6),
    "CyclicPoisson, cut": CyclicPoisson(
        probability=0.7, cycle=2, dataset_size=N, steps=6, max_batch_size=7
    ),
    "RandomAllocation": RandomAllocation(
        steps_per_epoch=3, participations=1, epochs=2, dataset_size=N
    ),
    "MinSep, cut": MinSep(probability=0.6, min_sep=2, dataset_size=N, steps=6, max_batch_size=6),
    "Shuffled": Shuffled(batch_size=10, dataset_size=N, epochs=2),
    "UserMinSep": UserMinSep(
        graph=GRAPH, probability=0.2, min_sep=2, steps=6, burn_in=1, batch_size=2.0
    ),
    "UserCyclic, cut": UserCyclic.for_batch_size(
        graph=GRAPH, batch_size=4.0, cycle=1, steps=6, max_batch_size=5
    ),
    "UserFixed": UserFixed(graph=GRAPH, batch_size=5, min_sep=1, max_participations=9, steps=6),
}
TRUNCATED = ("Poisson, cut", "CyclicPoisson, cut", "MinSep, cut", "UserCyclic, cut")


def _options(name):
    # By name: the accountants of some of these schemes are still to come.
    return {"accountant": "gaussian", "scheme": SCHEMES[name]}


def assert_released(private, model, data, rows):
    """The last release, times B̄, is the clipped sum over ``rows`` at ``model``."""
    expected = reference_sum(model, data, rows, 0.5)
    found = released(private, private.mechanism.scheme.expected_batch_size)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_release_is_the_sum_over_the_batch(mode, name, micro):
    data, model = images(N), small_net()
    frozen = copy.deepcopy(model)
    private = make(
        model,
        data,
        mode,
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        max_physical_batch_size=micro,
        lr=0.0,
        **_options(name),
    )
    scheme, rows, sizes = SCHEMES[name], {}, set()

    def check():
        batch = private.loader.current
        rows.setdefault(batch.step, []).extend(batch.indices.tolist())
        sizes.add(batch.rows)
        if batch.last:
            assert_released(private, frozen, data, rows[batch.step])

    train(private, after_step=check)
    assert private.steps_executed == scheme.steps
    if name in TRUNCATED:
        assert len(sizes) == 1  # every physical batch has the same shape
        assert any(len(batch) < scheme.physical_batch_size for batch in rows.values())


def test_padding_rows_that_are_nan_change_nothing(mode):
    """log(0) is -inf: the zeros of padding rows go through a layer that cannot take them."""

    class Log(torch.nn.Module):
        def forward(self, x):
            return torch.log(x.abs())

    data = images(N)
    model = torch.nn.Sequential(Log(), *small_net())
    frozen = copy.deepcopy(model)
    private = make(
        model,
        data,
        mode,
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        lr=0.0,
        **_options("Poisson, cut"),
    )

    def check():
        assert_released(private, frozen, data, private.loader.current.indices.tolist())

    train(private, after_step=check)
    assert private.nonfinite_examples == 0  # padding is nobody's gradient


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SCHEMES)
def test_resume_in_the_middle_of_an_epoch_is_exact(name, workers):
    data = images(N)

    def run():
        return make(
            small_net(dropout=0.0),
            data,
            num_workers=workers,
            steps_per_epoch=4,
            max_physical_batch_size=5,
            **_options(name),
        )

    whole = run()
    while whole.steps_executed < SCHEMES[name].steps:
        train(whole)
    first = run()
    train(first, steps=3)
    state = first.state_dict()
    again = make(
        small_net(),
        data,
        num_workers=2 - workers,
        steps_per_epoch=4,
        max_physical_batch_size=5,
        seed=6,
        **_options(name),
    )
    again.load_state_dict(state)
    while again.steps_executed < SCHEMES[name].steps:
        train(again)
    assert torch.equal(flat(whole.module), flat(again.module))
    assert whole.optimizer.ledger.digests == again.optimizer.ledger.digests


def test_other_data_is_refused_on_resume():
    data = images(N)
    private = make(small_net(), data, **_options("Poisson, cut"))
    train(private, steps=2)
    state = private.state_dict()
    x, y = data.tensors
    other = make(small_net(), TensorDataset(-x, y), **_options("Poisson, cut"))
    with pytest.raises(ValueError, match="dataset has changed"):
        other.load_state_dict(state)
