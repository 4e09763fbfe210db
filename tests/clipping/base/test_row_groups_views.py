"""Several views of an example: the mean of their gradients is clipped once, to R."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import Gradients, Poisson
from dptrain.clipping import PerExampleClipper
from tests.helpers.engine import everything_every_step, flat, make, small_net, wire

WITH_GRADIENTS = ["bookkeeping", "hooks", "functorch"]
STABILITY = 1e-6  # what Opacus, and dptrain with it, adds to a norm that it divides by


def viewed(size=9, views=3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, views, 1, 4, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))


def consecutive(x, y):
    return x.flatten(0, 1), y.repeat_interleave(x.shape[1])


def strided(x, y):
    return x.transpose(0, 1).flatten(0, 1), y.repeat(x.shape[1])


def release(model, data, *, views, mode="hooks", rows=consecutive, reduction="sum", **options):
    """What one step releases, times B̄ for a mean; and the run."""
    private = wire(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data=data,
        scheme=options.pop("scheme", everything_every_step(len(data), 1)),
        noise_multiplier=options.pop("noise_multiplier", 0.0),
        max_grad_norm=options.pop("max_grad_norm", 0.5),
        seed=1,
        gradients=Gradients(mode=mode, loss=reduction, views=views),
        **options,
    )
    model, optimizer, loader = private
    for x, y in loader:
        optimizer.zero_grad()
        x, y = rows(x, y)
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
    scale = optimizer.expected_batch_size if reduction == "mean" else 1.0
    return torch.cat([p.grad.flatten() for p in optimizer.params]) * scale, private


def one_by_one(model, data, max_grad_norm, skip=()):
    """Σ clip(mean of the views' gradients, R), one autograd call a view."""
    total = torch.zeros_like(flat(model))
    for i, (x, y) in enumerate(data):
        if i in skip:
            continue
        mean = torch.zeros_like(total)
        for view in x:
            loss = nn.functional.cross_entropy(model(view[None]), y[None])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            mean += torch.cat([g.flatten() for g in grads]) / len(x)
        total += mean * min(1.0, max_grad_norm / (float(mean.norm()) + STABILITY))
    return total


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", WITH_GRADIENTS)
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e3])
def test_the_mean_over_views_is_clipped(mode, reduction, micro, max_grad_norm):
    model, data = small_net().double(), viewed()
    expected = one_by_one(copy.deepcopy(model), data, max_grad_norm)
    found, _ = release(
        model,
        data,
        views=3,
        mode=mode,
        reduction=reduction,
        max_physical_batch_size=micro,
        max_grad_norm=max_grad_norm,
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", WITH_GRADIENTS)
@pytest.mark.parametrize("views", [2, 5])
def test_equal_views_release_what_one_view_does(mode, reduction, views):
    x, y = viewed(views=1).tensors
    options = {"mode": mode, "reduction": reduction, "noise_multiplier": 1.5}
    once, _ = release(small_net().double(), TensorDataset(x, y), views=1, **options)
    repeated = TensorDataset(x.expand(-1, views, -1, -1, -1), y)
    several, _ = release(small_net().double(), repeated, views=views, **options)
    torch.testing.assert_close(several, once, rtol=1e-12, atol=1e-12)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("mode", WITH_GRADIENTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.followed
def test_an_example_moves_the_sum_by_at_most_the_bound(mode, reduction):
    """Views that agree in one direction are the worst case; an x of zeros has gradient zero."""
    size, views, bound = 6, 4, 0.25
    x, y = torch.zeros(size, views, 5, dtype=torch.float64), torch.zeros(size, dtype=torch.long)
    x[3] = 1e3

    def moved(rows):
        sums = []
        for data in (x, torch.zeros_like(x)):
            torch.manual_seed(0)
            model = nn.Linear(5, 3, bias=False).double()
            options = {"mode": mode, "rows": rows, "reduction": reduction, "max_grad_norm": bound}
            sums.append(release(model, TensorDataset(data, y), views=views, **options)[0])
        return float((sums[0] - sums[1]).norm())

    assert moved(consecutive) == pytest.approx(bound, rel=1e-5)
    assert moved(consecutive) <= bound
    # The bound is about rows in order: fed otherwise, an example is in several means.
    with pytest.raises(RuntimeError, match="belong to another example"):
        moved(strided)


@pytest.mark.parametrize("mode", WITH_GRADIENTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_broken_view_takes_its_example_out_and_no_other(mode, bad):
    data = viewed()
    x, y = (t.clone() for t in data.tensors)
    x[2, 1, 0, 0, 0] = bad
    model = small_net().double()
    expected = one_by_one(copy.deepcopy(model), data, 0.5, skip={2})
    found, private = release(model, TensorDataset(x, y), views=3, mode=mode)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert private.nonfinite_examples == 1


def test_weights_are_per_example_and_padding_counts_nothing():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    rows = torch.tensor([[3.0, 0], [1, 0], [7, 7], [7, 7], [0, 0.2], [0, 0.4]])
    for padding in (7.0, float("nan")):
        rows[2:4] = padding
        p.grad_sample = rows.double()
        clipper = PerExampleClipper([p], views=2)
        weights = torch.tensor([1.0, 0.0, 1.0])
        (total,) = clipper.clipped_sum(max_grad_norm=1.0, weights=weights)
        # Means (2, 0) and (0, 0.3): the first is clipped to norm 1.
        expected = torch.tensor([1.0, 0.3], dtype=torch.float64)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
        assert clipper.nonfinite_examples == 0


def test_half_precision_views_are_averaged_in_float32():
    """In bfloat16, 256 + 1 is 256: of 2 views of 256 and 1 the mean is 128.5."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    p.grad_sample = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    (total,) = PerExampleClipper([p], views=2).clipped_sum(max_grad_norm=1e6, weights=torch.ones(1))
    assert total.dtype == torch.float32
    assert float(total[0]) == 128.5


def test_empty_batches_with_views_release_noise_only():
    model = small_net().double()
    scheme = Poisson(probability=1e-9, dataset_size=9, steps=2)
    found, private = release(model, viewed(), views=3, scheme=scheme, noise_multiplier=1.0)
    assert private.steps_executed == 2
    assert bool(torch.isfinite(found).all())
    assert bool((found != 0).all())


@pytest.mark.parametrize("mode", WITH_GRADIENTS)
def test_another_number_of_rows_is_refused(mode):
    def first_view(x, y):
        return x[:, 0], y

    with pytest.raises(RuntimeError, match=r"9 per-row .* 9 examples with views=3. .* 27 rows"):
        release(small_net().double(), viewed(), views=3, mode=mode, rows=first_view)
    with pytest.raises(RuntimeError, match="27 per-example gradients for a batch of 9 rows"):
        release(small_net().double(), viewed(), views=1, mode=mode)


def test_bad_numbers_of_views():
    data, scheme = viewed(), everything_every_step(9, 1)
    with pytest.raises(ValueError, match="views=0"):
        make(small_net().double(), data, scheme=scheme, views=0)
    for value in (True, 2.0, "2"):
        with pytest.raises(TypeError, match="views="):
            make(small_net().double(), data, scheme=scheme, views=value)


def test_a_checkpoint_knows_the_views():
    data, scheme = viewed(), everything_every_step(9, 1)
    runs = [make(small_net().double(), data, scheme=scheme, views=k) for k in (1, 3)]
    for one, other in itertools.permutations(runs):
        with pytest.raises(ValueError, match="views="):
            other.load_state_dict(one.state_dict())
        other.load_state_dict(other.state_dict())
