"""torch.amp.GradScaler: its scale is undone before clipping, and follows from nothing private."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Automatic
from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train

SIZE = 24


def scaler_of(scale, interval=10**9):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def run(mode, scaler=None, data=None, autocast=None, net=None, after_step=lambda: None, **options):
    """Two steps of everything, by a loop with or without a scaler."""
    net = small_net() if net is None else net
    options.setdefault("scheme", everything_every_step(SIZE, 2))
    options.setdefault("seed", 1)
    private = make(net, images() if data is None else data, mode, **options)
    for x, y in private.loader:
        private.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = nn.functional.cross_entropy(private.module(x).float(), y)
        if scaler is None:
            loss.backward()
            private.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(private.optimizer)
            scaler.update()
        after_step()
    return private, net


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("scale", [2.0**-3, 2.0**16, 3e4])
def test_a_scaled_run_releases_what_the_plain_one_does(mode, scale):
    """A power of two bit for bit, as it changes no digit; any other up to rounding."""
    _, plain = run(mode)
    scaler = scaler_of(scale)
    private, scaled = run(mode, scaler)
    assert private.steps_executed == 2
    assert scaler.get_scale() == scale
    if scale == 3e4:
        torch.testing.assert_close(flat(scaled), flat(plain), rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(flat(scaled), flat(plain))


def test_norms_and_filters_see_true_units(mode):
    """``last_norms``, and the constant of automatic clipping, are in units of the gradient."""
    plain, a = run(mode, clipping=Automatic(gamma=0.1))
    scaled, b = run(mode, scaler_of(2.0**10), clipping=Automatic(gamma=0.1))
    assert torch.equal(plain.last_norms, scaled.last_norms)
    assert torch.equal(flat(a), flat(b))


def test_parts_of_a_step_with_a_scale_that_changes_between_them(mode):
    """The scale grows after every part; each part is divided by its own."""
    _, plain = run(mode, max_physical_batch_size=7)
    scaler = scaler_of(2.0**4, interval=1)
    private, scaled = run(mode, scaler, max_physical_batch_size=7)
    assert private.steps_executed == 2
    assert scaler.get_scale() == 2.0**12  # two steps of four parts
    assert torch.equal(flat(scaled), flat(plain))


def disturbed(data, row, factor):
    x, y = (t.clone() for t in data.tensors)
    x[row] *= factor
    return TensorDataset(x, y)


def torch_rule(data):
    """Scales and whether a step was made, where a plain run is scaled."""
    net, scaler, found = small_net(), scaler_of(2.0**10), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = data.tensors
    for _ in range(2):
        before = flat(net).clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), not torch.equal(flat(net), before)))
    return found


def test_an_overflow_is_not_told_to_the_scaler_and_skips_no_step(mode):
    """Neighboring data of which one overflows: torch's rule tells them apart with certainty.

    Here the scales and the number of releases are the same for both, and the first releases, which
    have the same noise, differ by no more than what replacing one example may.
    """
    data = images()
    other = disturbed(data, 3, 1e30)
    assert torch_rule(data) == [(2.0**10, True)] * 2
    assert torch_rule(other) == [(2.0**9, False), (2.0**8, False)]
    first, scales, releases = [], [], []
    for d in (data, other):
        scaler, net = scaler_of(2.0**10), small_net()
        found = []

        def note(net=net, scaler=scaler, found=found):
            found.append((scaler.get_scale(), [p.grad.clone() for p in net.parameters()]))

        private, _ = run(mode, scaler, d, torch.float16, net, note)
        scales.append([scale for scale, _ in found])
        releases.append(private.steps_executed)
        first.append(torch.cat([g.flatten() for g in found[0][1]]) * SIZE)
        assert private.nonfinite_examples == (0 if d is data else 2)  # in two steps
    assert scales == [[2.0**10] * 2] * 2
    assert releases == [2, 2]
    assert float((first[0] - first[1]).norm()) <= 1.0 + 1e-4  # R: the other counts nothing
    assert bool(first[1].isfinite().all())


def test_a_step_of_which_every_example_overflows_is_released(mode):
    """What it releases is the noise of the step: as if the batch had been empty."""
    data = disturbed(images(), slice(None), 1e30)
    private, net = run(mode, scaler_of(2.0**10), data, torch.float16)
    assert private.steps_executed == 2
    assert private.nonfinite_examples == 2 * SIZE
    assert len(private.optimizer.ledger.digests) == 2
    assert not torch.equal(flat(net), flat(small_net()))


def test_small_gradients_survive_float16_by_the_scale():
    """Of 1e-8, below the least number of float16: lost without a scale, not with one."""
    norms = []
    for scaler in (None, scaler_of(2.0**20)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
        private = make(
            net,
            TensorDataset(images().tensors[0].flatten(1), images().tensors[1]),
            "bookkeeping",
            scheme=everything_every_step(SIZE, 1),
        )
        for x, y in private.loader:
            with torch.autocast("cpu", dtype=torch.float16):
                output = private.module(x)
            loss = nn.functional.cross_entropy(output.float(), y) * 1e-7
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                private.optimizer.step()
            else:
                scaler.step(private.optimizer)
        norms.append(private.last_norms.clone())
    assert bool((norms[0] < 1e-15).all())  # but for what norms are rounded up by
    assert bool((norms[1] > 1e-8).all())


def test_unscaling_first_is_refused_and_the_next_step_is_right(mode):
    scaler, net = scaler_of(2.0**8), small_net()
    private = make(net, images(), mode, scheme=everything_every_step(SIZE, 2), seed=1)
    x, y = next(iter(private.loader))
    private.optimizer.zero_grad()
    scaler.scale(nn.functional.cross_entropy(private.module(x), y)).backward()
    scaler.unscale_(private.optimizer)
    before = flat(net).clone()
    with pytest.raises(RuntimeError, match=r"Remove unscale_"):
        scaler.step(private.optimizer)
    assert private.optimizer.ledger.digests == []
    assert torch.equal(flat(net), before)
    again = scaler_of(2.0**8)
    again.scale(torch.zeros(()))
    again.step(private.optimizer)
    again.update()
    expected = small_net()
    train(make(expected, images(), mode, scheme=everything_every_step(SIZE, 2), seed=1), steps=1)
    assert torch.equal(flat(net), flat(expected))


def test_a_refused_step_leaves_no_scale_behind():
    """The scaler would multiply the next one by it."""
    scaler, net = scaler_of(2.0**8), small_net()
    private = make(net, images(), "bookkeeping", scheme=everything_every_step(SIZE, 2))
    scaler.scale(torch.zeros(()))
    with pytest.raises(RuntimeError, match="without a new batch"):
        scaler.step(private.optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(private.optimizer))


@pytest.mark.parametrize("scale", [0.0, -2.0, float("inf"), float("nan")])
def test_scales_that_nothing_can_be_divided_by_are_refused(scale):
    private = make(small_net(), images(), "bookkeeping", scheme=everything_every_step(SIZE, 1))
    x, y = next(iter(private.loader))
    scaler = scaler_of(scale)
    scaler.scale(nn.functional.cross_entropy(private.module(x), y)).backward()
    with pytest.raises(RuntimeError, match="must be positive and finite"):
        scaler.step(private.optimizer)
    assert private.optimizer.ledger.digests == []


def test_a_scale_that_grows_is_said(caplog):
    with caplog.at_level(logging.WARNING, "dptrain"):
        run("bookkeeping", scaler_of(4.0, interval=1))
    assert [r.message for r in caplog.records if "grew from 4 to 8" in r.message]


def test_a_scaler_that_is_off_changes_nothing(mode):
    _, plain = run(mode)
    _, same = run(mode, torch.amp.GradScaler("cpu", enabled=False))
    assert torch.equal(flat(plain), flat(same))


def test_a_scaled_run_resumes_bit_for_bit():
    whole, net = run("bookkeeping", scaler_of(2.0**12))
    scaler = scaler_of(2.0**12)
    options = {"scheme": everything_every_step(SIZE, 2), "seed": 1}
    half = make(small_net(), images(), "bookkeeping", **options)
    x, y = next(iter(half.loader))
    scaler.scale(nn.functional.cross_entropy(half.module(x), y)).backward()
    scaler.step(half.optimizer)
    scaler.update()
    state, scale = half.state_dict(), scaler.state_dict()
    other, again = small_net(), scaler_of(1.0)
    rest = make(other, images(), "bookkeeping", **options)
    rest.load_state_dict(state)
    again.load_state_dict(scale)
    for x, y in rest.loader:
        again.scale(nn.functional.cross_entropy(rest.module(x), y)).backward()
        again.step(rest.optimizer)
        again.update()
    assert torch.equal(flat(net), flat(other))
    assert rest.optimizer.ledger.digests == whole.optimizer.ledger.digests
