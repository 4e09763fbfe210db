"""The strategies that are known by name, ours and those that strangers register."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, overload

from dptrain.core import checked_member, checks
from dptrain.strategies.strategy import RunShape, Strategy

S = TypeVar("S", bound=Strategy)


@dataclasses.dataclass(frozen=True)
class _Registered:
    """The arguments with which a class was registered."""

    strategy: type[Strategy]
    planned: bool


_KNOWN: dict[str, _Registered] = {}


@overload
def register_strategy(strategy: type[S], *, planned: bool = False) -> type[S]: ...


@overload
def register_strategy(*, planned: bool = False) -> Callable[[type[S]], type[S]]: ...


def register_strategy(strategy: Any = None, *, planned: bool = False) -> Any:
    """Make a class of strategies known by its name, as all of dptrain's own are.

    From then on configurations and the command line take ``type: ItsName`` with its fields,
    mechanisms and checkpoints that hold its values can be read, and
    ``dptrain strategies`` lists what its ``proposals`` offers. The accountants need nothing more:
    they work with the matrix that the methods describe. Which noise stream draws its noise follows
    from its base class, or from ``register_noise_stream``.

    Test the class with ``dptrain.testing.StrategyContract`` and
    ``dptrain.testing.NoiseStreamContract``. It is final: a subclass is refused, since what is
    registered for a class would serve other matrices too.

    Args:
        strategy: a concrete frozen dataclass derived from ``Strategy``, or from a base that does
            most of the work: ``BandedToeplitz``, ``Toeplitz`` (``dptrain.strategies.toeplitz``),
            ``LowerTriangular`` (``dptrain.strategies.matrices``).
        planned: whether ``dptrain plan`` also tries its ``proposals``, with every scheme that they
            suit.

    Returns:
        The class, or without one a decorator.

    Raises:
        TypeError: if it is no such class, or abstract.
        ValueError: if a strategy of that name is known.

    Example:
        >>> @register_strategy
        ... @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Halves(BandedToeplitz):
        ...     bands: int = 2
        ...
        ...     def bind(self, steps):
        ...         checks.steps(steps)
        ...         return self
        ...
        ...     def first_column(self, steps):
        ...         return np.array([1.0, 0.5])[:steps]
        >>> Strategy.from_dict({"type": "Halves"})
        Halves(bands=2)
    """
    checks.flag("planned", planned, owner="register_strategy")

    def register(member: type[S]) -> type[S]:
        checked_member(member, Strategy, call="register_strategy")
        _KNOWN[member.__name__] = _Registered(member, planned)
        return member

    return register if strategy is None else register(strategy)


def strategy_types() -> Mapping[str, type[Strategy]]:
    """The registered classes by name, in the order of their registration."""
    return MappingProxyType({name: known.strategy for name, known in _KNOWN.items()})


def proposals(run: RunShape, *, planned: bool = False) -> list[Strategy]:
    """The strategies that the registered classes offer for a run, not bound.

    Args:
        run: its shape.
        planned: only classes that were registered as ``planned``.

    Raises:
        TypeError: if a class offers something other than strategies.
    """
    found: list[Strategy] = []
    for known in _KNOWN.values():
        if planned and not known.planned:
            continue
        offered: Iterable[Strategy] = known.strategy.proposals(run)
        for strategy in offered:
            name = f"{known.strategy.__name__}.proposals()"
            found.append(checks.instance(name, strategy, Strategy, example="BandMF(bands=16)"))
    return found
