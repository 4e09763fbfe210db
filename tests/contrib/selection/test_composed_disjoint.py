"""Runs on data sets that share nobody, by enumeration; and curves read at a δ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dptrain.accounting import ComposedRuns
from dptrain.accounting.losses import gaussian
from dptrain.contrib.selection import delta_at, epsilon_at
from tests.contrib.selection.mechanisms import (
    exact_trade_off,
    gaussian_trade_off,
    hockey_stick,
    random_pair,
)


def test_disjoint_runs_cost_what_the_dearest_does():
    """The second run is swapped for its mirror image where the first came out as its output 0."""
    generator = np.random.default_rng(11)
    for _ in range(60):
        (p, q), (r, s) = random_pair(generator), random_pair(generator)
        runs = [exact_trade_off(p, q), exact_trade_off(r, s)]
        together = ComposedRuns(runs, disjoint=True)
        kernels = {way: [law[::-1] if i == 0 else law for i in range(p.size)] for way, law in
                   (("with", r), ("without", s))}  # fmt: skip

        def joint(first, kernel):
            return np.concatenate([first[i] * kernel[i] for i in range(first.size)])

        # Somebody of the first data set changes the first law only; of the second, the kernel only.
        pairs = [
            (joint(p, kernels["without"]), joint(q, kernels["without"])),
            (joint(p, kernels["with"]), joint(q, kernels["with"])),
            (joint(p, kernels["with"]), joint(p, kernels["without"])),
            (joint(q, kernels["with"]), joint(q, kernels["without"])),
        ]
        for epsilon in (0.0, 0.2, 0.7, 1.5):
            remove, add = together.delta(epsilon)
            assert max(hockey_stick(*pair, epsilon) for pair in pairs) <= remove + 1e-12
            assert max(hockey_stick(*pair[::-1], epsilon) for pair in pairs) <= add + 1e-12
            # And no less than what one of them costs by itself.
            alone = max(hockey_stick(p, q, epsilon), hockey_stick(r, s, epsilon))
            assert remove <= max(delta_at(run, np.array(epsilon), remove=True) for run in runs)
            assert remove >= alone - 1e-12


def test_somebody_in_both_data_sets_costs_more_than_disjoint_runs_say():
    p, q = np.array([0.7, 0.3]), np.array([0.3, 0.7])
    run = exact_trade_off(p, q)
    claimed = ComposedRuns([run, run], disjoint=True).delta(0.5)[0]
    truth = hockey_stick(np.outer(p, p).ravel(), np.outer(q, q).ravel(), 0.5)
    assert truth > claimed + 0.05
    assert ComposedRuns([run, run]).delta(0.5)[0] >= truth - 1e-12


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_epsilon_of_a_curve_is_the_gaussians(mu):
    run = gaussian_trade_off(mu)
    for delta in (1e-2, 1e-5, 1e-9):
        truth = gaussian.epsilon(delta, mu)
        assert truth * (1 - 1e-12) <= epsilon_at(run, delta) <= truth * 1.001
        assert ComposedRuns([run]).epsilon(delta) == epsilon_at(run, delta)


def test_epsilon_and_delta_of_a_curve_are_each_others_inverse():
    generator = np.random.default_rng(3)
    for _ in range(50):
        run = exact_trade_off(*random_pair(generator))
        for delta in (0.02, 0.1, 0.25):
            at = epsilon_at(run, delta)
            if math.isfinite(at):
                sides = [float(delta_at(run, np.array(at), remove=way)) for way in (True, False)]
                assert max(sides) <= delta * (1 + 1e-12)
                less = [
                    float(delta_at(run, np.array(max(at - 1e-6, 0.0)), remove=way))
                    for way in (True, False)
                ]
                assert at == 0.0 or max(less) > delta
            else:
                assert max(run.remove[-1], run.add[-1]) > delta * (1 - 1e-12)


def test_refusals():
    with pytest.raises(ValueError, match="at least one"):
        ComposedRuns([])
    with pytest.raises(TypeError, match="disjoint"):
        ComposedRuns([gaussian_trade_off(1.0)], disjoint="yes")
