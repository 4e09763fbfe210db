"""Runs with an individual filter, and Algorithm 1 of Koskela et al. 2023 in plain Python."""

import itertools
import math

import numpy as np
import torch
from torch import nn

from dptrain.individual import GDPFilter
from tests.helpers.engine import everything_every_step, images, make, small_net, wire

BOUND, SIGMA, STEPS = 2.0, 1.5, 9
FILTER = GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=50)  # about 4 full norms
STABILITY = 1e-6  # what Opacus, and dptrain with it, adds to a norm that it divides by


def precise(size=12):
    """The small net and its images in float64, where a release can be compared to 1e-10."""
    data = images(size)
    data.tensors = (data.tensors[0].double(), data.tensors[1])
    return small_net().double(), data


def gradient(module, x, y, loss=nn.functional.cross_entropy):
    """The gradient of one example, by one autograd call."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(module(x[None]), y[None]), parameters)
    return torch.cat([g.flatten() for g in found])


def bare(module):
    """A small net with the same parameters, in which nothing hooks."""
    net = small_net().to(next(module.parameters()).dtype)
    net.load_state_dict(module.state_dict())
    for mine, theirs in zip(net.parameters(), module.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    return net


def gradients(module, data, loss=nn.functional.cross_entropy):
    """Of all examples, at the parameters that the private module has now."""
    module = bare(module)
    return [gradient(module, x, y, loss) for x, y in data]


class Algorithm1:
    """Koskela et al. 2023, Alg. 1, by the example; Feldman & Zrnic 2021, Alg. 3, if it is scaled.

    Attributes:
        squares: Σ μ² of every example.
        history: for every step, the share of each example.
        margin: least relative distance of a decision from the other one.
    """

    def __init__(self, budget, sigma, size, full_consumption=False):
        self.budget, self.sigma, self.full_consumption = budget, sigma, full_consumption
        self.squares = [0.0] * size
        self.history = []
        self.margin = math.inf

    def step(self, found, bound):
        """The sum that is released for these gradients, and what it costs."""
        total, shares = torch.zeros_like(found[0]), []
        for i, g in enumerate(found):
            norm = float(g.norm())
            if not math.isfinite(norm):
                shares.append(0.0)
                continue
            clipped = g * min(1.0, bound / (norm + STABILITY))
            cost = (min(norm, bound) / (self.sigma * bound)) ** 2
            left = self.budget**2 - self.squares[i]
            share = 1.0 if cost <= left else 0.0
            if cost > 0 and left > 0:
                self.margin = min(self.margin, abs(cost / left - 1.0))
            if cost > left and self.full_consumption and left > 0:
                share = math.sqrt(left / cost)
            self.squares[i] += share**2 * cost
            if 0 < share < 1:
                self.squares[i] = self.budget**2
            total += share * clipped
            shares.append(share)
        self.history.append(shares)
        return total

    @property
    def returned(self):
        """How many examples took part again after they had been left out."""
        columns = list(zip(*self.history, strict=True))
        return sum(any(a == 0 < b for a, b in itertools.pairwise(c)) for c in columns)


def watch(private):
    """A list that gets the clipped sum of every step, as it is before the noise is added."""
    sums, optimizer = [], private.optimizer
    add_noise = optimizer.add_noise

    def add():
        sums.append(
            torch.cat(
                [
                    torch.zeros(p.numel(), dtype=p.dtype)
                    if p.summed_grad is None
                    else p.summed_grad.flatten().clone()
                    for p in optimizer.params
                ]
            )
        )
        add_noise()

    optimizer.add_noise = add
    return sums


def filtered(module, data, individual, mode="hooks", *, steps=8, sigma=1.0, **options):
    """A private run of full batches with a filter."""
    return make(
        module,
        data,
        mode,
        scheme=everything_every_step(len(data), steps),
        noise_multiplier=sigma,
        individual=individual,
        **options,
    )


def make_with(optimizer, module, data, individual, mode, *, steps, sigma, **options):
    """A filtered run with an optimizer of the test's own."""
    return wire(
        module=module,
        optimizer=optimizer,
        data=data,
        scheme=everything_every_step(len(data), steps),
        noise_multiplier=sigma,
        individual=individual,
        seed=5,
        grad_sample_mode=mode,
        **options,
    )


EXACT = {"rtol": 1e-9, "atol": 1e-9}
NORM_PAD = 1e-6  # by which charges are above the norms


def run(private, before_step, rows):
    """The user's loop; ``before_step()`` is called at the beginning of every logical step."""
    model, optimizer, loader = private
    criterion = nn.CrossEntropyLoss(reduction=optimizer.loss_reduction)
    for x, y in loader:
        if loader.current.part == 0:
            before_step()
        optimizer.zero_grad()
        x, y = rows(x, y)
        criterion(model(x), y).backward()
        optimizer.step()


def as_they_are(x, y):
    return x, y


def check_against_algorithm_1(
    private, data, individual, found_gradients, bounds=None, rows=as_they_are, broken=0
):
    """Release and charges of every step; returns the reference."""
    reference = Algorithm1(
        individual.budget,
        private.optimizer.noise_multiplier,
        len(data),
        individual.full_consumption,
    )
    sums, expected = watch(private), []

    def before_step():
        bound = float(private.optimizer.max_grad_norm) if bounds is None else bounds.pop(0)
        private.optimizer.max_grad_norm = bound
        expected.append(reference.step(found_gradients(), bound))

    run(private, before_step, rows)
    assert len(sums) == len(expected) == private.steps_executed
    # A share of full consumption is a hair (1e-6) below what is left.
    close = (
        {"rtol": 2e-6, "atol": 1e-6 * private.optimizer.max_grad_norm * len(data)}
        if individual.full_consumption
        else EXACT
    )
    for found, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(found, wanted, **close)
    spent = private.individual.spent**2
    np.testing.assert_allclose(spent, reference.squares, rtol=3 * NORM_PAD)
    assert (spent <= individual.budget**2).all()
    active = [broken + sum(share > 0 for share in shares) for shares in reference.history]
    assert private.individual.active_counts == active
    assert reference.margin > 1e-4  # no decision hangs on rounding
    return reference
