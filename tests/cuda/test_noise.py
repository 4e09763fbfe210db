"""Noise on a GPU: its generators' law and determinism, and every stream under the contract."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dptrain.noise.generators import Normals, chunk_length
from dptrain.strategies import BandMF
from dptrain.testing import NoiseStreamContract
from tests.cuda.devices import needs_gpu
from tests.noise.streams import (
    test_blt_noise,
    test_convolution,
    test_ring_buffer,
    test_tree_noise,
)

SEED = 0x0123_4567_89AB_CDEF_FEDC_BA98_7654_3210
BITS = 43


def row(device, size, *, seed=SEED, group=0, step=0, secure=False, start=0, whole=None):
    """Whole numbers of 2^-43."""
    out = torch.empty(size, device=device, dtype=torch.float64)
    normals = Normals(seed, secure=secure)
    normals.fill(out, group=group, step=step, start=start, size=whole, bits=BITS)
    return out


@pytest.mark.parametrize("secure", [False, True])
def test_a_row_is_standard_normal(secure, device):
    """Six standard errors of the first six moments, and of the empirical distribution function."""
    size = 1 << 20
    z = row(device, size, secure=secure).cpu().numpy()
    assert np.array_equal(z, np.rint(z))
    z *= 2.0**-BITS
    # A dither of a uniform number over 2^-6 adds 2^-12/12 to the variance: 2e-5 of a moment or
    # less for each order, far below its standard error.
    for order in range(1, 7):
        mean = float(stats.norm.moment(order))
        variance = float(stats.norm.moment(2 * order)) - mean**2
        assert abs((z**order).mean() - mean) < 6 * math.sqrt(variance / size), order
    # P(√n sup|F_n - F| > x) ≤ 2 exp(-2 x²) (Massart 1990): 2e-9 at 3.22.
    assert stats.kstest(z, "norm").statistic * math.sqrt(size) < 3.22
    for lag in (1, 2, 64, size // 2):
        assert abs((z * np.roll(z, lag)).mean()) < 6 / math.sqrt(size)


@pytest.mark.parametrize("secure", [False, True])
def test_a_row_is_a_function_of_its_name_alone(secure, device):
    size = 5000
    first = row(device, size, secure=secure)
    torch.manual_seed(7)
    torch.randn(10, device=device)
    assert torch.equal(row(device, size, secure=secure), first)
    for other in ({"seed": SEED ^ 1}, {"seed": SEED ^ (1 << 100)}, {"group": 1}, {"step": 1}):
        z = row(device, size, secure=secure, **other)
        assert abs(float((z * first).mean())) * 4.0**-BITS < 6 / math.sqrt(size)


def test_drawing_leaves_the_global_generator_alone(device):
    torch.manual_seed(3)
    torch.randn(2, device=device)
    before = torch.get_rng_state(), [s.clone() for s in torch.cuda.get_rng_state_all()]
    row(device, 1000)
    assert torch.equal(torch.get_rng_state(), before[0])
    for one, other in zip(torch.cuda.get_rng_state_all(), before[1], strict=True):
        assert torch.equal(one, other)


def test_a_slice_is_the_same_entries_of_the_whole_row(device):
    """Also over the edge of a chunk, and in the shorter last one."""
    length = chunk_length(torch.device(device))
    size = length + 1001
    whole = row(device, size)
    for start, stop in ((0, 10), (length - 5, length + 5), (length, size), (length + 7, size - 3)):
        part = row(device, stop - start, start=start, whole=size)
        assert torch.equal(part, whole[start:stop])


@needs_gpu
def test_secure_normals_are_those_of_the_cpu():
    size = 2 * chunk_length(torch.device("cpu")) + 3
    assert torch.equal(row("cuda", size, secure=True).cpu(), row("cpu", size, secure=True))


@needs_gpu
def test_fast_normals_are_not_those_of_the_cpu_and_the_statement_says_which():
    """Another generator; a guarantee names it."""
    here, there = row("cpu", 5000), row("cuda", 5000).cpu()
    assert abs(float((here * there).mean())) * 4.0**-BITS < 6 / math.sqrt(5000)
    normals = Normals(SEED)
    assert "Philox" in normals.on({"cuda"})
    assert "Philox" not in normals.on({"cpu"})


@pytest.mark.parametrize("size", [0, 1, 2, 3, 8191, 8193])
def test_odd_lengths(size, device):
    z = torch.full((size,), math.nan, device=device, dtype=torch.float64)
    Normals(SEED).fill(z, group=0, step=0, bits=BITS)
    assert torch.isfinite(z).all()
    assert len(torch.unique(z)) == size


class _Both(NoiseStreamContract):
    """What only two devices can show."""

    def make_strategy(self):
        return BandMF(bands=5)

    def foreign_strategy(self):
        return BandMF(bands=4)

    def test_refuses_the_state_of_a_cpu_run(self):
        like = [tensor.cpu() for tensor in self.like()]
        self.assert_refuses(self.open(like=like).state_dict(), "devices")

    def test_parameters_on_both_devices(self):
        like = [torch.zeros(50), torch.zeros(50, device=self.device)]
        noise = self.rows(self.open(like=like), self.steps)
        assert [tensor.device.type for tensor in noise[0]] == ["cpu", "cuda"]
        first, second = (torch.stack([row[i].cpu() for row in noise]).double() for i in (0, 1))
        assert abs(float((first * second).mean())) < 6 * float(first.std() * second.std()) / (
            math.sqrt(first.numel())
        )


# The classes of the CPU, with their strategies, laws and refusals, on another device.
STREAMS = {
    name: type(name, (kind,), {"device": "cuda:0"})
    for module in (test_blt_noise, test_ring_buffer, test_convolution, test_tree_noise)
    for name, kind in vars(module).items()
    if name.startswith("Test") and issubclass(kind, NoiseStreamContract)
} | {"TestBothDevices": type("TestBothDevices", (_Both,), {"device": "cuda:0"})}
if torch.cuda.is_available():
    globals().update(STREAMS)


@needs_gpu
def test_streams_are_under_the_contract():
    """On a machine without a GPU this stands for their thousand tests."""
    assert set(STREAMS) <= set(globals())


def test_there_are_streams_to_check():
    assert len(STREAMS) > 10
