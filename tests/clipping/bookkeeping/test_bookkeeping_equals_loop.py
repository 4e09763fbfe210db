"""Norms and clipped sums of random architectures, against one example at a time."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dptrain import Automatic, PerLayer
from tests.helpers.architectures import BLOCKS, STEMS, architectures
from tests.helpers.architectures_runs import MODES, UNKNOWN, backward, one_batch, releases
from tests.helpers.clipping_oracle import (
    TOLERANCE,
    assert_norms,
    assert_sums,
    automatic_factors,
    flat_factors,
    group_factors,
    reference,
)


def examples(mode, number):
    """So many architectures; a third of them in mode hooks, which is there to check the loop.

    They are not shrunk, which takes minutes: what fails is small, and is printed in full.
    """
    return settings(
        max_examples=number if mode != "hooks" else -(-number // 3),
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )


BOUNDS = st.sampled_from([0.3, 1.0, 1e3])  # times the median of the norms
WEIGHTS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.0, 1.0]), min_size=6, max_size=6)
REDUCTIONS = st.sampled_from(["mean", "sum"])

in_every_mode = pytest.mark.parametrize("mode", MODES)


def bound_of(wanted, share):
    """R such that some examples are clipped and others are not, unless ``share`` is extreme."""
    finite = wanted.norms[torch.isfinite(wanted.norms)]
    middle = float(finite.median()) if len(finite) else 0.0
    return share * middle if middle > 0 else 1.0


def check_batch(architecture, mode, share, weights, reduction):
    """Norms and clipped sum of one batch with these weights."""
    a = architecture
    wanted = reference(a.module, a.inputs, a.targets, a.views)
    private = one_batch(a, mode, reduction=reduction)
    backward(private, a)
    clipper = private.optimizer.clipper
    weights, bound = torch.tensor(weights[: a.examples]), bound_of(wanted, share)
    sums = clipper.clipped_sum(max_grad_norm=bound, weights=weights, scales=None)
    assert_norms(clipper.norms, wanted, TOLERANCE[a.dtype])
    factors = flat_factors(wanted.norms, bound, weights)
    assert_sums(sums, wanted, factors, TOLERANCE[a.dtype])


@pytest.mark.sample(every=33)
@pytest.mark.parametrize(
    ("mode", "block"), [(m, b) for m in MODES for b in BLOCKS if b not in UNKNOWN[m]]
)
def test_every_layer(mode, block):
    @examples(mode, 7)
    @given(architectures(block=block, without=UNKNOWN[mode]), BOUNDS, WEIGHTS, REDUCTIONS)
    def check(a, share, weights, reduction):
        check_batch(a, mode, share, weights, reduction)

    check()


@pytest.mark.sample(every=13)
@pytest.mark.parametrize(
    ("mode", "stem"), [(m, s) for m in MODES for s in STEMS if s not in UNKNOWN[m]]
)
def test_every_stem(mode, stem):
    @examples(mode, 7)
    @given(architectures(stem=stem, without=UNKNOWN[mode]), BOUNDS, WEIGHTS, REDUCTIONS)
    def check(a, share, weights, reduction):
        check_batch(a, mode, share, weights, reduction)

    check()


@pytest.mark.sample(every=3)
@in_every_mode
def test_views(mode):
    @examples(mode, 12)
    @given(
        architectures(views=(2, 3), without=UNKNOWN[mode], most_examples=4),
        BOUNDS,
        WEIGHTS,
        REDUCTIONS,
    )
    def check(a, share, weights, reduction):
        check_batch(a, mode, share, weights, reduction)

    check()


@pytest.mark.sample(every=3)
@in_every_mode
def test_what_a_step_of_microbatches_releases(mode):
    @examples(mode, 12)
    @given(
        architectures(without=UNKNOWN[mode], views=(1, 1, 2)),
        BOUNDS,
        REDUCTIONS,
        st.integers(1, 4),
    )
    def check(a, share, reduction, most):
        wanted = reference(a.module, a.inputs, a.targets, a.views)
        bound = bound_of(wanted, share)
        sums, norms = releases(a, mode, reduction=reduction, bound=bound, most=most)
        assert_norms(norms, wanted, TOLERANCE[a.dtype])
        factors = flat_factors(wanted.norms, bound, torch.ones(a.examples))
        assert_sums(sums, wanted, factors, TOLERANCE[a.dtype])

    check()


@pytest.mark.sample(every=3)
@in_every_mode
def test_broken_examples_count_nothing_and_hurt_nobody(mode):
    @examples(mode, 12)
    @given(
        architectures(without=UNKNOWN[mode], views=(1, 1, 2)),
        st.sampled_from([math.nan, math.inf, -math.inf]),
        st.data(),
    )
    def check(a, bad, data):
        rows = st.sets(st.integers(0, len(a.targets) - 1), min_size=1, max_size=2)
        a.targets[list(data.draw(rows, label="broken rows"))] = bad
        check_batch(a, mode, 1.0, [1.0] * a.examples, "mean")

    check()


@pytest.mark.sample(every=3)
@in_every_mode
def test_automatic_clipping(mode):
    @examples(mode, 12)
    @given(architectures(without=UNKNOWN[mode]), WEIGHTS, REDUCTIONS)
    def check(a, weights, reduction):
        wanted = reference(a.module, a.inputs, a.targets)
        private = one_batch(a, mode, reduction=reduction, clipping=Automatic(gamma=0.05))
        backward(private, a)
        weights = torch.tensor(weights[: a.examples])
        clipper = private.optimizer.clipper
        sums = clipper.clipped_sum(max_grad_norm=0.7, weights=weights, scales=None)
        assert_norms(clipper.norms, wanted, TOLERANCE[a.dtype])
        factors = automatic_factors(wanted.norms, 0.7, weights, gamma=0.05)
        assert_sums(sums, wanted, factors, TOLERANCE[a.dtype])

    check()


@pytest.mark.sample(every=3)
@in_every_mode
def test_clipping_by_layer(mode):
    @examples(mode, 12)
    @given(architectures(without=UNKNOWN[mode]), BOUNDS, WEIGHTS, REDUCTIONS)
    def check(a, share, weights, reduction):
        wanted = reference(a.module, a.inputs, a.targets)
        layers = [n.rpartition(".")[0] for n, p in a.module.named_parameters() if p.requires_grad]
        first = list(dict.fromkeys(layers))
        groups = [first.index(layer) for layer in layers]
        private = one_batch(a, mode, reduction=reduction, clipping=PerLayer())
        backward(private, a)
        weights, bound = torch.tensor(weights[: a.examples]), bound_of(wanted, share)
        clipper = private.optimizer.clipper
        sums = clipper.clipped_sum(max_grad_norm=bound, weights=weights, scales=None)
        assert_norms(clipper.norms, wanted, TOLERANCE[a.dtype])
        bounds = [bound / math.sqrt(len(first))] * len(first)
        factors = group_factors(wanted.group_norms(groups), bounds, weights)
        assert_sums(sums, wanted, factors, TOLERANCE[a.dtype], groups)

    check()


@pytest.mark.slow
@in_every_mode
def test_many_architectures(mode):
    @examples(mode, 250)
    @given(
        architectures(without=UNKNOWN[mode], views=(1, 1, 1, 2), most_examples=19),
        BOUNDS,
        st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=19, max_size=19),
        REDUCTIONS,
    )
    def check(a, share, weights, reduction):
        check_batch(a, mode, share, weights, reduction)

    check()
