"""The banded program where a number could not tell its states apart: (A+1)^(p-1) above 2^63."""

import numpy as np
import pytest

from dptrain.accounting.renyi.banded_program import banded_log_sums


@pytest.mark.sample(every=7)
@pytest.mark.parametrize(("bandwidth", "bins"), [(32, 98), (45, 100), (50, 101)])
def test_pairs_and_triples_of_wide_bands(bandwidth, bins):
    rng = np.random.default_rng(bandwidth)
    apart = np.abs(np.subtract.outer(np.arange(bins), np.arange(bins)))
    a = rng.random((bins, bins))
    a = (a + a.T) / 2
    a[np.minimum(apart, bins - apart) >= bandwidth] = 0.0
    largest = 3 if bandwidth < 40 else 2  # more triples than a test should wait for
    found = banded_log_sums(a, bandwidth, largest)
    # T_m is the sum over ordered m-tuples of bins of Π_{i<j} e^{a}, over m! b^m.
    weights = np.exp(a)
    assert found[2] == pytest.approx(np.log(weights.sum() / (2 * bins**2)), abs=1e-12)
    if largest == 3:
        triples = np.einsum("ij,ik,jk->", weights, weights, weights, optimize=True)
        assert found[3] == pytest.approx(np.log(triples / (6 * bins**3)), abs=1e-12)
