"""Whole runs in mode bookkeeping against the same runs in mode hooks: same batches, same noise."""

import copy

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dptrain import Automatic, BandMF, Flat, PerLayer, Poisson
from tests.helpers.architectures import Architecture, architectures
from tests.helpers.architectures_runs import UNKNOWN, loss_of, one_batch

STEPS = 4
STYLES = st.sampled_from([Flat(), PerLayer(), Automatic(gamma=0.05)])


def few(number):
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )


def run(a, mode, **options):
    """Trainable parameters after the run, and what its last step released."""
    own = Architecture(
        module=copy.deepcopy(a.module), inputs=a.inputs, targets=a.targets, views=a.views
    )
    private = one_batch(own, mode, lr=0.05, **options)
    for batch in private.loader:
        private.optimizer.zero_grad()
        loss_of(private, batch).backward()
        private.optimizer.step()
    assert private.steps_executed == STEPS
    parameters = private.optimizer.params
    return [p.detach().clone() for p in parameters], [p.grad.clone() for p in parameters]


def check_runs(a, *, reduction, most, style, strategy=None):
    """Poisson batches of varying sizes, at times empty; in microbatches; with noise."""
    options = {
        "reduction": reduction,
        "bound": 0.3,
        "most": most,
        "noise_multiplier": 0.5,
        "scheme": Poisson(probability=0.6, dataset_size=a.examples, steps=STEPS),
        "clipping": style,
        "strategy": strategy,
    }
    found, released = run(a, "bookkeeping", **options)
    wanted, expected = run(a, "hooks", **options)
    before = [p.detach() for p in a.module.parameters() if p.requires_grad]
    moved = torch.cat([(w - b).flatten() for w, b in zip(wanted, before, strict=True)]).norm()
    assert moved > 0  # by the noise at least
    tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4  # over steps that depend on each other
    for got, right in zip(found, wanted, strict=True):
        assert float((got - right).norm()) <= tolerance * float(moved)
    size = torch.cat([g.flatten() for g in expected]).norm()
    for got, right in zip(released, expected, strict=True):
        assert float((got - right).norm()) <= tolerance * float(size)


@pytest.mark.slow
@few(14)
@given(
    architectures(without=UNKNOWN["hooks"], views=(1, 1, 2), dtypes=(torch.float64,)),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([None, 2]),
    STYLES,
)
def test_runs_in_both_modes_agree(a, reduction, most, style):
    check_runs(a, reduction=reduction, most=most, style=style)


@pytest.mark.slow
@few(5)
@given(architectures(without=UNKNOWN["hooks"], dtypes=(torch.float32,)), STYLES)
def test_runs_in_float32_agree_with_correlated_noise(a, style):
    check_runs(a, reduction="mean", most=3, style=style, strategy=BandMF(bands=2))


@pytest.mark.slow
@few(120)
@given(
    architectures(without=UNKNOWN["hooks"], views=(1, 2, 3), dtypes=(torch.float64,)),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([None, 1, 2]),
    STYLES,
)
def test_many_runs_in_both_modes_agree(a, reduction, most, style):
    check_runs(a, reduction=reduction, most=most, style=style)
