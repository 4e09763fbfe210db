"""Rounding at random to bfloat16: neighbors only, unbiased, by bits that nothing else uses."""

import numpy as np
import pytest
import torch

from dptrain.noise.generators.normals import CHUNK, Normals
from dptrain.noise.streams.layout import Block
from dptrain.noise.streams.rows import round_randomly


def rounded(values, *, seed=1, step=0, index=0, start=0, size=None, group=0):
    out = torch.empty(len(values), dtype=torch.bfloat16)
    stop = start + len(values)
    block = Block(group=group, start=start, stop=stop, size=stop if size is None else size)
    round_randomly(values, out, seed=seed, step=step, index=index, block=block)
    return out


def normals(size, step=0):
    out = torch.empty(size, dtype=torch.float64)
    Normals(9).fill(out, group=0, step=step, bits=43)
    return (out * 2.0**-43).float()


def neighbors(values):
    """The largest bfloat16 numbers not above, and the smallest not below, in magnitude."""
    low = (values.view(torch.int32) & -65536).view(torch.float32)
    high = (low.view(torch.int32) + 65536).view(torch.float32)
    return low, torch.where(low == values, low, high)


def test_goes_to_one_of_the_two_neighbors():
    values = torch.cat([normals(50_000), normals(1000) * 1e-30, torch.tensor([0.0, -0.0, 1.0])])
    result = rounded(values).float()
    low, high = neighbors(values)
    assert torch.all((result == low) | (result == high))
    assert torch.all((result - values).abs() <= 2.0**-7 * values.abs())
    assert torch.equal(low.bfloat16().float(), low)  # the test's own neighbors exist


@pytest.mark.parametrize("value", [1 + 2.0**-9, -1.3, 3.14159, 1.9999, -0.7e-3, 255.99])
def test_is_unbiased(value):
    values = torch.full((CHUNK,), value, dtype=torch.float32)
    exact = values[0].item()
    low, high = (v[0].item() for v in neighbors(values))
    share = (exact - low) / (high - low)
    ups = (rounded(values).float() == high).double().mean().item()
    assert abs(ups - share) < 6 * np.sqrt(share * (1 - share) / CHUNK)


def test_standard_deviation_is_at_most_half_an_ulp():
    values = normals(CHUNK)
    error = (rounded(values).float() - values).double() / values.abs()
    assert error.abs().max() < 2.0**-7
    assert error.std() < 2.0**-8


def test_is_unbiased_given_the_value_over_steps():
    values = normals(2000)
    mean = sum(rounded(values, step=t).double() for t in range(400)) / 400
    low, high = (v.double() for v in neighbors(values))
    share = (values - low) / (high - low).where(high != low, 1.0)
    deviation = (high - low).abs() * (share * (1 - share)).sqrt() / 20
    # 400 draws of a share near 0 are not normal yet: those count through their sum.
    common = (share > 0.1) & (share < 0.9)
    assert torch.all(((mean - values).abs() < 6 * deviation)[common])
    total = (mean - values).sum().abs()
    assert total < 6 * deviation.square().sum().sqrt()


def test_a_slice_rounds_as_the_whole_row_does():
    size = 2 * CHUNK + 1001
    values = torch.cat([normals(CHUNK), normals(CHUNK, 1), normals(1001, 2)])
    for chunk in range(3):
        begin, end = chunk * CHUNK, min((chunk + 1) * CHUNK, size)
        whole = rounded(values[begin:end], start=begin, size=size)
        for a, b in ((0, 1), (1, 6), (3, 1000), (127, end - begin)):
            part = rounded(values[begin + a : begin + b], start=begin + a, size=size)
            assert torch.equal(part, whole[a:b])


@pytest.mark.parametrize(
    "change", [{"step": 1}, {"index": 1}, {"group": 1}, {"seed": 1 | 1 << 64}, {"start": CHUNK}]
)
def test_everything_that_names_a_row_changes_the_bits(change):
    values = torch.full((20_000,), 1 + 2.0**-8)  # up with probability one half
    a, b = rounded(values) == 1, rounded(values, **change) == 1
    agree = (a == b).double().mean().item()
    assert abs(agree - 0.5) < 6 * 0.5 / np.sqrt(20_000)


def test_the_bits_are_not_those_of_the_normals():
    # The radius of an entry comes from the word that would decide its rounding were they shared.
    values = torch.full((CHUNK,), 1 + 2.0**-8)
    up = (rounded(values, seed=9) != 1).double() - 0.5
    for z in (normals(CHUNK).double(), normals(CHUNK).double().abs()):
        product = up * (z - z.mean())
        assert abs(product.mean()) < 6 * product.std() / np.sqrt(CHUNK)
