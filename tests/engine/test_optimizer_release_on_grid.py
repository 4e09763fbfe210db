"""What leaves the machine is a whole number of the grid, and rounding to it is paid for by R."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dptrain import BLT, BandMF
from dptrain.core.randomness import split_seed
from dptrain.engine.sealed import seal
from dptrain.individual import GDPFilter
from dptrain.noise import Rounding, noise_stream
from dptrain.strategies import Identity, Tree
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import everything_every_step, images, make, small_net, wire
from tests.helpers.individual_runs import watch

STEPS = 6
STRATEGIES = {
    "independent": Identity(),
    "banded": BandMF(bands=3),
    "buffered": BLT(buffers=2, max_participations=1),
    "tree": Tree(),
}


class Linear(nn.Module):
    """A loss whose gradient by the weights is the example itself."""

    def __init__(self, size, dtype):
        super().__init__()
        self.layer = nn.Linear(size, 1, bias=False, dtype=dtype)

    def forward(self, x):
        return self.layer(x)


def start(examples, sigma, *, strategy=None, bound=1.0, dtype=torch.float64, **options):
    data = TensorDataset(torch.as_tensor(examples, dtype=dtype))
    torch.manual_seed(0)
    model = Linear(len(examples[0]), dtype)
    return wire(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data=data,
        scheme=everything_every_step(len(data), STEPS),
        strategy=strategy or BandMF(bands=3),
        noise_multiplier=sigma,
        max_grad_norm=bound,
        loss_reduction="sum",  # so that a release is a noisy sum
        seed=5,
        **options,
    )


def releases(private):
    found = []
    model, optimizer, loader = private
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        (p,) = optimizer.params
        found.append(p.grad.detach().flatten().clone())
    return found


def grid_of(private, sigma, bound=1.0):
    return math.ldexp(sigma * bound, -private.optimizer.noise.grid_bits)


def noise_of(private):
    """The whole numbers that the seed stands for, by a stream of their own."""
    like = [torch.empty_like(p) for p in private.optimizer.params]
    strategy, seed = private.mechanism.strategy, split_seed(5)[1]
    stream = noise_stream(strategy, steps=STEPS, like=like, seed=seed)
    return [next(stream)[0].flatten().double() for _ in range(STEPS)]


def clipped_sum(examples, limit):
    norms = np.linalg.norm(examples, axis=1, keepdims=True)
    return (examples * np.minimum(1.0, limit / (norms + 1e-6))).sum(axis=0)


@pytest.mark.parametrize("bound", [1.0, 0.37])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_release_is_a_whole_number_of_the_grid_and_the_sum_is_rounded_to_it(name, bound):
    examples = np.random.default_rng(1).normal(size=(7, 50))
    sigma = 2.3
    private = start(examples, sigma, strategy=STRATEGIES[name], bound=bound)
    total = clipped_sum(examples, bound * (1 - private.optimizer.rounding.pad))
    grid = grid_of(private, sigma, bound)
    for release, noise in zip(releases(private), noise_of(private), strict=True):
        units = release / grid
        whole = units.round()
        assert torch.all((units - whole).abs() <= 2.0**-51 * whole.abs())  # of the quotient
        on_grid = (whole - noise).numpy() * grid
        # The sum is of float64 throughout: within 1e-13 of that one.
        assert np.all(np.abs(on_grid - total) <= 0.5 * grid + 1e-13)


def test_float32_releases_are_the_whole_numbers_rounded():
    examples = np.random.default_rng(1).normal(size=(7, 50)).astype(np.float32)
    private = start(examples, 2.3, dtype=torch.float32)
    total = clipped_sum(examples.astype(np.float64), 1 - private.optimizer.rounding.pad)
    grid = grid_of(private, 2.3)
    for release, noise in zip(releases(private), noise_of(private), strict=True):
        # Those of k that the float32 sum of seven rows may be rounded to.
        low, high = (
            np.rint((total + sign * 7 * 2.0**-22) / grid).astype(np.int64) for sign in (-1, 1)
        )
        for value, n, first, last in zip(release, noise.tolist(), low, high, strict=True):
            found = torch.tensor([(k + n) * grid for k in range(first, last + 1)]).double().float()
            assert value in found


def test_half_of_the_releases_of_the_old_sum_were_off_the_grid():
    """The test above would have found it: S + σR z in floating point is no such number."""
    examples = np.random.default_rng(1).normal(size=(7, 50))
    private = start(examples, 2.3)
    grid = grid_of(private, 2.3)
    total = torch.from_numpy(clipped_sum(examples, 1.0))
    units = (total + noise_of(private)[0] * grid) / grid
    assert torch.sum((units - units.round()).abs() > 0.01) > 40  # of 50


# -- the pad -------------------------------------------------------------------------------------

COARSE = 1e6  # σ for which 2^-26 or so of it is a hundredth of R
SIZE = 400


def neighbors(private, share):
    """A row of half a unit and less, and the whole sums with and without one more row.

    The row is ``share`` of a unit in every coordinate: the most that rounding adds.
    """
    grid = grid_of(private, COARSE)
    return np.full((1, SIZE), 0.4999 * grid), np.full((1, SIZE), share * grid)


def rounded_sums(examples, *, pad=None):
    private = start(examples, COARSE)
    if pad is not None:
        private.optimizer._pad = pad
    grid = grid_of(private, COARSE)
    return [
        (release / grid).round() - noise
        for release, noise in zip(releases(private), noise_of(private), strict=True)
    ]


@pytest.mark.parametrize("share", [1e-3, 0.5003, 2.0003, 3.0003, 60.0])
def test_sums_with_and_without_a_row_differ_by_r_at_most_on_the_grid(share):
    private = start(np.zeros((2, SIZE)), COARSE)
    limit = 1 / grid_of(private, COARSE)
    base, row = neighbors(private, share)
    with_it = rounded_sums(np.concatenate([base, row]))
    without = rounded_sums(np.concatenate([base, np.zeros_like(row)]))
    apart = [float((a - b).norm()) for a, b in zip(with_it, without, strict=True)]
    assert max(apart) <= limit
    assert min(apart) >= math.sqrt(SIZE)  # every coordinate moved


def test_without_the_pad_they_would_differ_by_more():
    """A row of norm below R, and sums that are further apart: what the pad is for."""
    private = start(np.zeros((2, SIZE)), COARSE)
    limit = 1 / grid_of(private, COARSE)
    base, row = neighbors(private, 3.0003)
    assert np.linalg.norm(row) < 1
    with_it = rounded_sums(np.concatenate([base, row]), pad=0.0)
    without = rounded_sums(np.concatenate([base, np.zeros_like(row)]), pad=0.0)
    assert all(float((a - b).norm()) > limit for a, b in zip(with_it, without, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_sum_on_the_grid_moves_further_than_the_pad(seed):
    """At random sizes: sums near half units, rows with many tiny entries and a few large ones."""
    rng = np.random.default_rng(seed)
    entries, sigma = int(rng.integers(1, 3000)), 10.0 ** rng.uniform(-2, 5)
    options = {"grid_bits": 27, "steps": 9, "examples": 1000, "error": 0.0}
    rounding = Rounding(entries=entries, noise_multiplier=sigma, **options)
    grid = math.ldexp(sigma, -27)
    row = rng.normal(size=entries) * 10.0 ** rng.uniform(-4, 0, size=entries)
    row *= (1 - rounding.pad) / np.linalg.norm(row) * rng.choice([1.0, 1e-3])
    total = grid * (rng.integers(-1000, 1000, entries) + 0.5)
    total -= np.sign(row) * grid * 1e-9  # on the near side of a half, where any row moves it
    moved = np.rint((total + row) * (1 / grid)) - np.rint(total * (1 / grid))
    assert np.linalg.norm(moved) * grid <= 1
    assert np.all(np.abs(moved) >= 1)
    assert np.linalg.norm(moved) * grid > np.linalg.norm(row)


def test_a_pad_of_half_of_r_is_refused_when_the_run_is_made():
    with pytest.raises(
        ValueError, match=r"noise_multiplier=1e\+08 with 400 parameters: the noise is rounded"
    ):
        start(np.zeros((2, SIZE)), 1e8)
    start(np.zeros((2, SIZE)), 1e8, strategy=Identity())  # nothing is kept: a finer grid
    start(np.zeros((2, SIZE)), 1e8, strategy=BLT(buffers=2, max_participations=1))  # in float64


@pytest.mark.parametrize("size", [0.2, 3.0])
def test_an_individual_filter_charges_the_pad(size):
    """An example pays for its gradient and for how far rounding may move the sum."""
    examples = np.random.default_rng(2).normal(size=(1, SIZE))
    examples *= size / np.linalg.norm(examples)
    generous = GDPFilter(target_epsilon=1e3, target_delta=1e-3, max_steps=50)
    private = start(
        np.concatenate([examples, np.zeros_like(examples)]),
        COARSE,
        strategy=Identity(),
        individual=generous,
    )
    # Independent noise has a fine grid: charge as on a coarse one.
    private.optimizer._pad = pad = 0.125
    ratios, admit = [], private.individual.admit

    def admitting(**options):
        ratios.append(np.array(options["ratios"]))
        return admit(**options)

    private.individual.admit = admitting
    sums = watch(private)
    releases(private)
    added = min(size, 1 - pad)
    for charged, total in zip(ratios, sums, strict=True):
        assert float(total.norm()) == pytest.approx(added, rel=1e-5)
        assert added + pad - 1e-5 <= charged[0] <= min(1.0, added + pad + 1e-5)
        assert charged[1] in (0, pad)  # its norm is 0, or the least number that is not


def test_the_guarantee_says_what_rounding_takes():
    private = start(np.zeros((2, SIZE)), COARSE, target_delta=1e-3)
    (note,) = (n for n in private.guarantee().notes if "is a multiple of" in n)
    bits = private.optimizer.noise.grid_bits
    share = 100 * math.sqrt(SIZE) * COARSE * 2.0**-bits
    assert f"2^-{bits} σR" in note
    assert f"norm {share:.2g} % below R" in note
    silent = start(np.zeros((2, SIZE)), 0.0, target_delta=1e-3)
    assert not any("is a multiple of" in n for n in silent.guarantee().notes)


# -- checkpoints of before -----------------------------------------------------------------------


def old_generator(layout):
    layout["generator"] = "AES-256-CTR by chunk (Philox on CUDA), one draw"
    del layout["grid_bits"]


def without_grid(layout):
    del layout["grid_bits"]


def other_grid(layout):
    layout["grid_bits"] += 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (old_generator, "earlier version"),
        (without_grid, "earlier version"),
        (other_grid, "grid_bits="),
    ],
)
def test_a_checkpoint_with_noise_off_this_grid_is_refused(change, says):
    common = {"scheme": everything_every_step(24, 4), "strategy": BandMF(bands=2)}
    private = make(small_net(), images(), **common)
    next(iter(private.loader))
    state = through_disk(private.state_dict())
    change(state["private"]["noise"]["layout"])
    other = make(small_net(), images(), **common)
    with pytest.raises(ValueError, match=says):
        other.load_state_dict(seal(state))
    assert other.steps_executed == 0
