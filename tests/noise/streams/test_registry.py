"""Which stream serves which strategy: the nearest in the order of the bases."""

from __future__ import annotations

from abc import ABC

import pytest

from dptrain.noise import FlatStream, register_noise_stream
from dptrain.noise.streams import (
    BLTStream,
    ConvolutionStream,
    RingBufferStream,
    TreeStream,
    registry,
    stream_class,
)
from dptrain.strategies import Strategy, strategy_types
from dptrain.strategies.matrices import LowerTriangular
from dptrain.strategies.toeplitz import BandedToeplitz, Toeplitz


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Undo what a test registers."""
    monkeypatch.setattr(registry, "_STREAMS", dict(registry._STREAMS))


OURS = {
    "Identity": RingBufferStream,
    "BSR": RingBufferStream,
    "BandMF": RingBufferStream,
    "ColumnNormalizedBandMF": RingBufferStream,
    "Dense": RingBufferStream,
    "BLT": BLTStream,
    "BISR": ConvolutionStream,
    "BandInvMF": ConvolutionStream,
    "LambdaCGD": ConvolutionStream,
    "SquareRoot": ConvolutionStream,
    "Tree": TreeStream,
    "TreeRestart": TreeStream,
}


def test_ours():
    mine = {n for n, member in strategy_types().items() if member.__module__[:8] == "dptrain."}
    assert set(OURS) == mine
    assert {name: stream_class(strategy_types()[name]) for name in OURS} == OURS


def test_the_nearest_base_wins_whatever_the_order_of_registration():
    near = type("_Near", (BandedToeplitz, ABC), {"__module__": __name__})
    nearer = type("_Nearer", (near,), {})

    @register_noise_stream(near)
    class Quick(RingBufferStream):
        pass

    assert stream_class(nearer) is Quick
    assert stream_class(type("_Far", (BandedToeplitz,), {})) is RingBufferStream
    assert stream_class(type("_Farther", (Toeplitz,), {})) is ConvolutionStream
    assert stream_class(type("_Lower", (LowerTriangular,), {})) is RingBufferStream


def test_a_class_has_one_stream():
    with pytest.raises(ValueError, match=r"noise of BandedToeplitz is drawn by .*RingBuffer"):

        @register_noise_stream(BandedToeplitz)
        class Another(RingBufferStream):
            pass

    register_noise_stream(BandedToeplitz)(RingBufferStream)  # as when a module is loaded again


@pytest.mark.parametrize("name", sorted(OURS))
def test_another_package_cannot_draw_the_noise_of_ours(name):
    """Importing it would change every run; BandMF has no stream by itself, only by its base."""
    with pytest.raises(ValueError, match=f"the noise of {name} is drawn by dptrain"):

        @register_noise_stream(strategy_types()[name])
        class Another(RingBufferStream):
            pass

    assert stream_class(strategy_types()[name]) is OURS[name]


@pytest.mark.parametrize("kind", [3, "BandMF", int, Strategy])
def test_refuses_what_is_no_class_of_strategies(kind):
    with pytest.raises(TypeError, match="must be subclasses of Strategy"):
        register_noise_stream(kind)
    with pytest.raises(ValueError, match="name the classes"):
        register_noise_stream()


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (3, "3 must be a subclass of FlatStream"),
        (dict, "dict must be a subclass of FlatStream"),
        (FlatStream, "FlatStream is abstract, it lacks _allocate, _correlate"),
    ],
)
def test_refuses_what_is_no_stream(stream, says):
    with pytest.raises(TypeError, match=says):
        register_noise_stream(type("_Mine", (BandedToeplitz,), {}))(stream)
