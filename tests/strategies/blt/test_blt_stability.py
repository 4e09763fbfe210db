"""BLTs whose C^-1 grows: refused where it blows up within the run, exact where it does not."""

import math

import numpy as np
import pytest

from dptrain.strategies.blt.blt import BLT
from dptrain.testing.strategy_contract import StrategyContract
from tests.oracles import strategy_matrices as matrices


class TestGrowingInverse(StrategyContract):
    steps = 8

    def make_strategy(self):
        return BLT(buffers=1, theta=(0.2,), omega=(1.4,))


class TestGrowingInverseOfTwoBuffers(StrategyContract):
    def make_strategy(self):
        return BLT(buffers=2, theta=(0.9, 0.1), omega=(1.1, 1.3))


@pytest.mark.parametrize(
    ("theta", "omega"),
    [
        ((0.5, 0.1), (1.2, 0.6)),
        ((0.5, 0.1), (2.0, 1.0)),
        ((0.5, 0.1), (30.0, 0.0)),
        ((0.2,), (1.4,)),  # after 90 steps
        ((0.2,), (1e7,)),  # at once
        ((0.9999, 0.3, 0.1), (1.0, 2e5, 9e5)),  # several θ̂ with weights
    ],
)
def test_an_inverse_that_blows_up_names_the_step(theta, omega):
    n = 200
    unbound = BLT(buffers=len(theta), theta=theta, omega=omega)
    with pytest.raises(ValueError, match=r"omega=.*diverges.*lower omega") as caught:
        unbound.bind(n)
    step = int(str(caught.value).split("at step ")[1].split()[0])
    g = np.abs(matrices.inverse(matrices.blt(theta, omega, n))[:, 0])
    assert step == np.flatnonzero(g > 1e6)[0]
    assert unbound.bind(step).steps == step  # a run that ends before is as good as any
    with pytest.raises(ValueError, match=f"at step {step} "):
        unbound.bind(step + 1)
    with pytest.raises(ValueError, match=f"at step {step} "):
        unbound.bind(10**8)


def test_growth_within_bounds():
    assert BLT(buffers=1, theta=(0.5,), omega=(1.5,)).bind(10).inverse_column(10)[
        1:
    ] == pytest.approx(
        -1.5 * (-1.0) ** np.arange(9)  # θ̂ = -1 never decays, and never grows
    )
    # θ̂ = -1.2: the closed forms hold where terms grow.
    n, theta, omega = 40, (0.2,), (1.4,)
    blt = BLT(buffers=1, theta=theta, omega=omega).bind(n)
    c = matrices.blt(theta, omega, n)
    np.testing.assert_allclose(blt.inverse_column(n), matrices.inverse(c)[:, 0], rtol=1e-11)
    errors = np.linalg.norm(np.tril(np.ones((n, n))) @ matrices.inverse(c), axis=1)
    assert blt.rmse(n) == pytest.approx(math.sqrt(np.mean(errors**2)), rel=1e-10)
    assert blt.max_error(n) == pytest.approx(errors.max(), rel=1e-10)
