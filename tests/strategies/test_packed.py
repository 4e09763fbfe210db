"""Lower-triangular matrices as text."""

import base64
import struct

import numpy as np
import pytest

from dptrain.strategies.packed import pack, unpack


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_round_trip_is_bit_for_bit(n):
    matrix = np.tril(np.random.default_rng(n).normal(size=(n, n)))
    again = unpack(pack(matrix))
    assert again.dtype == np.float64
    np.testing.assert_array_equal(again, matrix)


def test_text_is_the_rows_of_the_triangle():
    raw = struct.pack("<3d", 1.0, 2.5, -3.0)
    assert pack([[1.0, 0.0], [2.5, -3.0]]) == base64.b64encode(raw).decode()
    assert pack([[1.0, -0.0], [-0.0, 1.0]]) == pack(np.eye(2))


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones(3), r"mine has the shape \(3,\)"),
        (np.ones((2, 3)), r"mine has the shape \(2, 3\)"),
        (np.zeros((0, 0)), r"mine has the shape \(0, 0\)"),
        ([[1.0, 0.5], [0.0, 1.0]], r"mine\[0, 1\]=0.5: must be lower triangular"),
        ([[1.0, 0.0], [np.nan, 1.0]], r"mine\[1, 0\]=nan: every entry must be finite"),
        ([[1.0, np.inf], [0.0, 1.0]], r"mine\[0, 1\]=inf"),
    ],
)
def test_refuses_what_is_no_lower_triangle(matrix, message):
    with pytest.raises(ValueError, match=message):
        pack(matrix, "mine")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        "é",
        base64.b64encode(b"seven b").decode(),
        base64.b64encode(struct.pack("<2d", 1, 2)).decode(),
        base64.b64encode(struct.pack("<1d", np.nan)).decode(),
        7,
    ],
)
def test_refuses_text_that_no_matrix_has(text):
    with pytest.raises(ValueError, match="mine: not a packed lower-triangular matrix"):
        unpack(text, "mine")
