import math

import pytest

from dptrain.accounting.losses.search import least_scale, least_true


@pytest.mark.parametrize("root", [0.0, 1e-7, 0.3, 0.9999])
def test_least_true_rounds_up(root):
    found = least_true(lambda x: x >= root, low=0.0, high=1.0, tolerance=1e-9)
    assert root <= found <= root + 1e-9


@pytest.mark.parametrize("root", [2e-3, 0.77, 1.0, 31.0, 4e5])
@pytest.mark.parametrize(
    "shape", [lambda t: -t, lambda t: -math.sinh(t), lambda t: -1.0 if t >= 0 else math.inf]
)
def test_least_scale_brackets_the_root_from_above(root, shape):
    calls = []

    def excess(s):
        calls.append(s)
        return shape(math.log(s / root)) if s != root else 0.0

    found = least_scale(excess, start=1.0, relative_tolerance=1e-4, smallest=1e-3, largest=1e6)
    assert root <= found <= root * (1 + 1.0001e-4)
    assert len(calls) < 45


def test_least_scale_at_the_ends():
    options = {"start": 1.0, "relative_tolerance": 1e-4, "smallest": 1e-3, "largest": 1e6}
    assert least_scale(lambda s: 1.0, **options) is None
    assert least_scale(lambda s: -1.0, **options) == 1e-3
