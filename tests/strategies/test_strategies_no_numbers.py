"""Arguments that are no numbers are refused by name, in every constructor that takes numbers."""

import numpy as np
import pytest

from dptrain.core import checks
from dptrain.strategies import BandInvMF, BandMF, Dense, DenseWorkload, MomentumSGD


def test_numbers_are_floats():
    assert checks.number("x", np.float32(0.5)) == 0.5
    assert checks.numbers("x", np.array([1, 2])) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: BandMF(bands=2, coefficients=5), "coefficients=5 must be a sequence"),
        (lambda: BandMF(bands=2, coefficients=("a", 1)), r"coefficients\[\d\]=.* must be a number"),
        (lambda: BandInvMF(inverse_bands=1, coefficients=3.0), "coefficients=3.0 must be a seq"),
        (
            lambda: BandInvMF(inverse_bands=2, coefficients=(1, None)),
            r"coefficients\[\d\]=.* must be a number",
        ),
        (lambda: MomentumSGD(momentum="a"), "momentum='a' must be a number"),
        (lambda: MomentumSGD(weight_decay=None), "weight_decay=None must be a number"),
        (
            lambda: MomentumSGD(learning_rates="x"),
            "learning_rates='x' must be a sequence of numbers",
        ),
        (lambda: Dense(matrix=[[1, 0], [1]]), "matrix: is not a matrix of real numbers"),
        (lambda: Dense(matrix=np.array([[1, 0], [1j, 1]])), "matrix: .*complex"),
        (lambda: DenseWorkload(entries=object()), "entries: is not a matrix of real numbers"),
    ],
)
def test_what_is_no_number_is_named(build, match):
    with pytest.raises((TypeError, ValueError), match=match):
        build()
