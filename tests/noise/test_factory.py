"""The factory and the ring-buffer stream beyond the contract."""

import numpy as np
import pytest
import torch

from dptrain.noise import FlatStream, noise_stream
from dptrain.strategies import BSR, BandMF, Identity, Strategy
from dptrain.testing.noise_checks import units


def test_refuses_what_is_no_strategy():
    with pytest.raises(TypeError, match="strategy='BSR'"):
        noise_stream("BSR", steps=3, like=[torch.zeros(2)], seed=0)


def test_refuses_a_strategy_that_no_stream_serves():
    class _Unserved(Strategy):
        bind = columns = apply = solve = column_norms = None
        sensitivity = sensitivity_is_exact = None

    with pytest.raises(ValueError, match=r"_Unserved: no noise stream.*BandedToeplitz"):
        noise_stream(_Unserved(), steps=3, like=[torch.zeros(2)], seed=0)


def test_refuses_more_bands_than_steps():
    with pytest.raises(ValueError, match="at most bands=3"):
        noise_stream(BSR(bands=4), steps=3, like=[torch.zeros(2)], seed=0)


def test_refuses_a_strategy_bound_to_another_length():
    with pytest.raises(ValueError, match="bound to 5 steps"):
        noise_stream(BandMF(bands=2).bind(5), steps=6, like=[torch.zeros(2)], seed=0)


def test_refuses_devices_without_a_generator():
    with pytest.raises(ValueError, match="meta"):
        noise_stream(Identity(), steps=3, like=[torch.zeros(2, device="meta")], seed=0)


def test_a_declared_and_a_bound_strategy_give_the_same_noise():
    like = [torch.zeros(7)]
    declared = noise_stream(BandMF(bands=3), steps=9, like=like, seed=4)
    bound = noise_stream(BandMF(bands=3).bind(9), steps=9, like=like, seed=4)
    assert isinstance(declared, FlatStream)
    for _ in range(9):
        assert torch.equal(next(declared)[0], next(bound)[0])
    assert declared.state_dict()["strategy"] == bound.state_dict()["strategy"]


def test_default_dtype_of_torch_does_not_matter():
    like = [torch.zeros(7, dtype=torch.float32)]

    def first():
        stream = noise_stream(BSR(bands=2), steps=9, like=like, seed=4)
        return next(stream)[0], *stream.release([torch.ones(7, dtype=torch.float32)], 0.7)

    expected = first()
    torch.set_default_dtype(torch.float64)
    try:
        found = first()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.dtype for each in found] == [torch.int64, torch.float32]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_memory_is_one_row_less_than_bands():
    like = [torch.zeros(30), torch.zeros(20)]
    buffers = noise_stream(BSR(bands=5), steps=9, like=like, seed=0).state_dict()["buffers"]
    assert [[tuple(b.shape) for b in group] for group in buffers] == [[(4, 50)]]
    assert (
        noise_stream(Identity(), steps=9, like=like, seed=0).state_dict()["buffers"][0][0].numel()
        == 0
    )


@pytest.mark.slow
def test_a_long_run_stays_exact():
    # C^-1 of the square root is summable, so rounding does not build up over many turns.
    strategy = BSR(bands=8)
    stream = noise_stream(strategy, steps=2000, like=[torch.zeros(20)], seed=5)
    plain = noise_stream(Identity(), steps=2000, like=[torch.zeros(20)], seed=5)
    noise, z = (
        np.array([units(next(each)[0], each) for _ in range(2000)]) for each in (stream, plain)
    )
    # C_tt is 1, so both draw the same numbers up to the finest grid; a row is rounded by half a
    # unit of the coarser one.
    moved = 0.5 * 2.0**-stream.grid_bits + stream.rounding_error + 2.0**-plain.grid_bits
    assert abs(strategy.apply(noise) - z).max() <= moved + 1e-13
