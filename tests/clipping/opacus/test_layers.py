"""Modes hooks and functorch, which rest on Opacus's rules, against one example at a time.

What Opacus gets wrong is right in dptrain or refused: norms that are not those of the sum bound
nothing.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.helpers.architectures import Architecture, architectures
from tests.helpers.architectures_runs import UNKNOWN
from tests.helpers.clipping_oracle import assert_norms, assert_sums, flat_factors, reference
from tests.helpers.older_modes import (
    ROWS,
    TOLERANCE,
    Call,
    batch,
    check,
    last,
    older,
    shared_layer,
    step,
    wired,
    with_features,
)


def with_padding():
    ids = torch.tensor([[0, 1, 0], [2, 2, 0], [0, 0, 0], [1, 3, 2]])
    return batch(nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Linear(3, 2)), ids)


CASES = {
    "channels last": lambda: with_features(
        Call(
            lambda x, f, g: g(torch.tanh(last(f(last(x))))), nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2)
        )
    ),
    "channels last, padded": lambda: with_features(
        Call(lambda x, f: last(f(last(x)).tanh()), nn.Conv2d(3, 4, 3, padding=1, stride=2))
    ),
    "channels last, one by one": lambda: with_features(
        Call(lambda x, f: f(last(x)), nn.Conv2d(3, 4, 1)), nn.GroupNorm(2, 4)
    ),
    "channels last, a leaf that is no parameter": lambda: with_features(
        Call(lambda x, f: f(last(x.detach().requires_grad_())), nn.Conv2d(3, 4, 3))
    ),
    "channels last in three dimensions": lambda: with_features(
        Call(
            lambda x, f: f(x.contiguous(memory_format=torch.channels_last_3d)), nn.Conv3d(3, 4, 2)
        ),
        shape=(3, 4, 3, 2),
    ),
    "transposed images": lambda: with_features(
        Call(lambda x, f: f(x.transpose(2, 3)), nn.Conv2d(3, 4, 3, padding=1))
    ),
    "transposed sequences": lambda: with_features(
        Call(
            lambda x, f, g: g(f(x.transpose(1, 2)).transpose(1, 2)),
            nn.Conv1d(4, 4, 3),
            nn.Linear(4, 2),
        ),
        shape=(5, 4),
    ),
    "padding_idx": with_padding,
    "layer norm without bias": lambda: with_features(
        nn.Linear(4, 4), nn.LayerNorm(4, bias=False), shape=(4,)
    ),
    "layer norm without bias over positions": lambda: with_features(
        nn.LayerNorm(4, bias=False), nn.Linear(4, 2), shape=(5, 4)
    ),
    "layer norm over positions": lambda: with_features(
        nn.LayerNorm(4), nn.Linear(4, 2), shape=(5, 4)
    ),
    "layer norm over two dimensions": lambda: with_features(
        nn.LayerNorm((5, 4), eps=0.1), nn.Conv2d(3, 2, 2), shape=(3, 5, 4)
    ),
}


@pytest.mark.sample(every=4)
@older
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_are_those_of_the_loop(name, reduction, mode):
    torch.manual_seed(0)
    check(CASES[name](), mode, reduction=reduction)


@pytest.mark.sample(every=4)
@older
@pytest.mark.parametrize("name", CASES)
def test_one_example_moves_the_sum_by_no_more_than_the_bound(name, mode):
    """Without noise what is released of one example is the clipped gradient itself."""
    torch.manual_seed(0)
    a = CASES[name]()
    one = Architecture(
        module=a.module, inputs=tuple(x[:1] for x in a.inputs), targets=a.targets[:1], views=1
    )
    sums, _ = step(wired(one, mode, bound=0.1))
    length = torch.cat([total.flatten() for total in sums]).norm()
    assert 0.099 < length <= 0.1 * (1 + 1e-6)


@older
@pytest.mark.parametrize("name", ["channels last", "padding_idx", "layer norm without bias"])
def test_a_broken_example_counts_nothing(name, mode):
    torch.manual_seed(0)
    a = CASES[name]()
    a.targets[1] = float("nan")
    check(a, mode)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("how", ["residual", "deeper"])
def test_a_layer_that_two_modules_hold_counts_once(how, mode):
    torch.manual_seed(0)
    check(with_features(shared_layer(how), shape=(3,)), mode)


@older
def test_one_id_an_example_stays_right(mode):
    """In the second microbatch they follow one another, as they did not in the first."""
    torch.manual_seed(0)
    ids = torch.tensor([3, 1, 4, 5])
    a = batch(nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 2)), ids)
    wanted = reference(a.module, a.inputs, a.targets)
    sums, _ = step(wired(a, mode, most=2))
    assert_sums(sums, wanted, flat_factors(wanted.norms, 0.5, torch.ones(ROWS)), TOLERANCE)


# Refused by all of them; see test_older_modes_refused.
REFUSED = UNKNOWN["hooks"] - {"padding_mode"}


def random_architectures(mode, number):
    """So many that are not refused."""
    without = REFUSED if mode == "functorch" else REFUSED | {"padding_mode"}
    found = [0]

    @settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
    @given(
        architectures(
            without=frozenset(without),
            dtypes=(torch.float64,),
        ),
        st.sampled_from(["mean", "sum"]),
        st.sampled_from([0.3, 1.0, 1e3]),
    )
    def compare(a, reduction, share):
        wanted = reference(a.module, a.inputs, a.targets)
        middle = float(wanted.norms.median())
        bound = share * middle if middle > 0 else 1.0
        sums, norms = step(wired(a, mode, bound, reduction))
        assert_norms(norms, wanted, TOLERANCE)
        factors = flat_factors(wanted.norms, bound, torch.ones(a.examples))
        assert_sums(sums, wanted, factors, TOLERANCE)
        found[0] += 1

    compare()
    return found[0]


@pytest.mark.slow
def test_random_architectures():  # hooks: tests/clipping/bookkeeping
    assert random_architectures("functorch", 180) >= 110
