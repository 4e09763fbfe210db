"""Workloads against the optimizer they stand for and against dense matrices."""

import json

import numpy as np
import pytest
import torch

from dptrain.strategies.momentum import MomentumSGD
from dptrain.strategies.packed import pack
from dptrain.strategies.workloads import PREFIX_SUMS, DenseWorkload, PrefixSums, Workload

N = 9
RATES = (0.5, 0.0, 1.0, 2.0, 0.25, 0.25, 1.5, 0.75, 0.125)
WORKLOADS = [
    PrefixSums(),
    MomentumSGD(),
    MomentumSGD(momentum=0.0),
    MomentumSGD(momentum=0.5, learning_rates=0.3),
    MomentumSGD(momentum=0.7, learning_rates=RATES),
    MomentumSGD(momentum=0.0, learning_rates=RATES),
    MomentumSGD(momentum=0.9, learning_rates=0.5, weight_decay=0.2),
    MomentumSGD(momentum=0.8, learning_rates=RATES, weight_decay=0.3),
    DenseWorkload(entries=np.tril(np.random.default_rng(0).normal(size=(N, N)))),
]


def torch_workload(workload):
    """A of shape (N, N): -θ_t after torch.optim.SGD got the unit gradient e_j, started at 0."""
    weights = torch.nn.Parameter(torch.zeros(N, dtype=torch.float64))  # one coordinate for every j
    sgd = torch.optim.SGD(
        [weights], lr=1.0, momentum=workload.momentum, weight_decay=workload.weight_decay
    )
    rows = []
    for t in range(N):
        rate = workload.learning_rates
        sgd.param_groups[0]["lr"] = rate[t] if isinstance(rate, tuple) else rate
        weights.grad = torch.eye(N, dtype=torch.float64)[t].clone()
        sgd.step()
        rows.append(-weights.detach().numpy().copy())
    return np.array(rows)


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if isinstance(w, MomentumSGD)])
def test_momentum_is_what_torch_does(workload):
    np.testing.assert_allclose(workload.matrix(N), torch_workload(workload), rtol=1e-12, atol=1e-14)


def test_momentum_by_the_sum_of_its_definition():
    beta = 0.7
    expected = np.zeros((N, N))
    for t in range(N):
        for j in range(t + 1):
            expected[t, j] = sum(RATES[s] * beta ** (s - j) for s in range(j, t + 1))
    workload = MomentumSGD(momentum=beta, learning_rates=RATES)
    np.testing.assert_allclose(workload.matrix(N), expected, rtol=1e-13, atol=1e-15)


def test_no_momentum_is_prefix_sums():
    np.testing.assert_array_equal(MomentumSGD(momentum=0.0).matrix(N), PREFIX_SUMS.matrix(N))
    assert not np.any(np.triu(MomentumSGD().matrix(N), 1))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_apply_and_adjoint_are_products(workload):
    workload.check(N)
    dense = workload.matrix(N)
    assert dense.shape == (N, N)
    assert not np.any(np.triu(dense, 1))
    rng = np.random.default_rng(1)
    for shape in ((N,), (N, 1), (N, 4)):
        x = rng.normal(size=shape)
        assert workload.apply(x).shape == shape
        assert workload.adjoint(x).shape == shape
        np.testing.assert_allclose(workload.apply(x), dense @ x, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(workload.adjoint(x), dense.T @ x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_arguments_are_left_alone(workload):
    x = np.random.default_rng(2).normal(size=(N, 2))
    kept = x.copy()
    workload.apply(x)
    workload.adjoint(x)
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_is_toeplitz_says_so(workload):
    dense = workload.matrix(N)
    constant = all(np.allclose(np.diag(dense, -k), dense[k, 0]) for k in range(N))
    assert workload.is_toeplitz == constant
    if workload.is_toeplitz:  # then also for any other n
        np.testing.assert_allclose(workload.matrix(4), dense[:4, :4], rtol=1e-13)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_json_round_trip(workload):
    again = Workload.from_dict(json.loads(json.dumps(workload.to_dict())))
    assert again == workload
    assert hash(again) == hash(workload)
    np.testing.assert_array_equal(again.matrix(N), workload.matrix(N))


@pytest.mark.slow
def test_long_runs_take_no_matrix():
    n = 200_000  # an n×n matrix would have 320 GB
    rates = tuple(np.linspace(1, 0, n).tolist())
    # The sum of a unit impulse at 0: Σ_s η_s β^s in the long run, here with η_s ≈ 1.
    impulse = np.eye(1, n)[0]
    for decay in (0.0, 1e-30):
        last = MomentumSGD(learning_rates=rates, weight_decay=decay).apply(impulse)[-1]
        assert last == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0 must be"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"momentum": float("nan")}, "momentum=nan"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"weight_decay": float("inf")}, "weight_decay=inf"),
        ({"learning_rates": ()}, "learning_rates is empty"),
        ({"learning_rates": ((1.0,), (2.0,))}, r"learning_rates\[0\]=\(1.0,\) must be a number"),
        ({"learning_rates": (1.0, -0.5)}, "-0.5 at step 1"),
        ({"learning_rates": (1.0, float("inf"))}, "learning_rates\\[1\\]=inf"),
        ({"learning_rates": (0.0, 0.0)}, "all zero"),
        ({"learning_rates": 0.0}, "all zero"),
        ({"learning_rates": 4.0, "weight_decay": 1.0, "momentum": 0.5}, "diverge"),
    ],
)
def test_momentum_refuses(fields, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MomentumSGD(**fields)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (np.ones((2, 3)), r"entries has the shape \(2, 3\)"),
        (np.ones((2, 2)), r"entries\[0, 1\]=1: must be lower triangular"),
        ([[np.nan]], "entries.*finite"),
        (np.zeros((3, 3)), "entries are all zero"),
        ("garbage", "entries: not a packed"),
        (pack(np.eye(2001)), "matrix of 2001 steps: at most 2000"),
    ],
)
def test_dense_refuses(entries, message):
    with pytest.raises(ValueError, match=message):
        DenseWorkload(entries=entries)


@pytest.mark.parametrize("workload", [w for w in WORKLOADS if not w.is_toeplitz])
def test_refuses_another_run_length(workload):
    for call in (
        lambda: workload.check(N + 1),
        lambda: workload.apply(np.ones(N - 1)),
        lambda: workload.adjoint(np.ones((N + 1, 2))),
        lambda: workload.matrix(3),
    ):
        with pytest.raises(ValueError, match=f"{N} (entries|steps)"):
            call()
