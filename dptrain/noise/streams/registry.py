"""The stream that draws the noise of each strategy: ours, and those that others register."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dptrain.core import checks
from dptrain.noise.streams.flat import FlatStream
from dptrain.strategies import Strategy

_STREAMS: dict[type, type[FlatStream]] = {}

N = TypeVar("N", bound=type[FlatStream])


def register_noise_stream(*strategies: type) -> Callable[[N], N]:
    """Make a class of streams draw the noise of some classes of strategies.

    A strategy is served by the stream of the first class in its method resolution order that has
    one, which is the nearest: a stream for a stranger's own class is taken before ours for its
    base, whatever the order of the imports. A class has one stream at most, and a strategy of
    another package that is served already keeps its stream: importing a package changes no noise
    that was drawn without it.

    ``BandedToeplitz`` and ``LowerTriangular`` are served by back-substitution over the last rows,
    ``Toeplitz`` by convolution; a strategy derived from one of them needs no stream of its own,
    unless that can be cheaper. Test the stream with ``dptrain.testing.NoiseStreamContract``: what
    it draws has to be C^-1 Z, or the guarantee is false.

    Args:
        strategies: what the stream serves; an abstract base stands for all that derive from it.

    Returns:
        A decorator of a concrete ``FlatStream`` that is made with the same arguments.

    Raises:
        TypeError: if a class is of another kind, or the stream abstract.
        ValueError: if no strategy is named, one has a stream already, or one of another package is
            served.

    Example:
        >>> @register_noise_stream(Halves)
        ... class HalvesStream(ConvolutionStream):
        ...     pass
    """
    call = "register_noise_stream"
    if not strategies:
        raise ValueError(
            f"{call}(): name the classes of strategies for which the stream draws noise"
        )
    for kind in strategies:
        if not isinstance(kind, type) or not issubclass(kind, Strategy) or kind is Strategy:
            raise TypeError(
                f"{call}: strategies={checks.shown(kind)} must be subclasses of Strategy, for "
                "instance @register_noise_stream(MyStrategy)"
            )

    def register(stream: N) -> N:
        name = getattr(stream, "__name__", checks.shown(stream))
        if not isinstance(stream, type) or not issubclass(stream, FlatStream):
            raise TypeError(f"{call}: {name} must be a subclass of FlatStream")
        if missing := sorted(stream.__abstractmethods__):
            raise TypeError(f"{call}: {name} is abstract, it lacks {', '.join(missing)}")
        for kind in strategies:
            known = _serving(kind) if _package(kind) != _package(stream) else _STREAMS.get(kind)
            if known is not None and _origin(known) != _origin(stream):
                raise ValueError(
                    f"{call}: the noise of {kind.__name__} is drawn by {_origin(known)}; derive a "
                    "strategy of your own from one of its bases"
                )
        _STREAMS.update(dict.fromkeys(strategies, stream))
        return stream

    return register


def _serving(kind: type) -> type[FlatStream] | None:
    """The stream of the nearest class, if one has any."""
    return next((_STREAMS[base] for base in kind.__mro__ if base in _STREAMS), None)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _origin(stream: type) -> str:
    """The place a class comes from; a module that is loaded again has the same."""
    return f"{stream.__module__}.{stream.__qualname__}"


def stream_class(strategy: type[Strategy]) -> type[FlatStream]:
    """The stream that serves a class of strategies, as ``register_noise_stream`` says.

    Raises:
        ValueError: if none does.
    """
    if (found := _serving(strategy)) is not None:
        return found
    served = ", ".join(sorted(kind.__name__ for kind in _STREAMS))
    raise ValueError(
        f"strategy={strategy.__name__}: no noise stream supports it; supported are {served}. "
        "Derive it from one of these, or register a stream with dptrain.register_noise_stream()"
    )
