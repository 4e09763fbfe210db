"""The schemes that are known by name, ours and those that strangers register."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from dptrain.core import checked_member
from dptrain.sampling.scheme import Scheme

S = TypeVar("S", bound=Scheme)

_CONSTANTS = ("dataset_size", "steps", "min_sep")
_KNOWN: dict[str, type[Scheme]] = {}


def register_scheme(scheme: type[S]) -> type[S]:
    """Make a sampling scheme known by the name of its class, as all of dptrain's own are.

    From then on configurations and the command line take ``type: ItsName`` with a batch size and
    the other arguments of its ``for_batch_size``, mechanisms and checkpoints that hold its values
    can be read, and the support table and ``dptrain plan`` ask it for its ``representatives`` and
    ``proposals``. The engine, the loader and the unamplified Gaussian accountant need nothing more:
    they go by what ``Scheme`` declares. Amplification by its randomness has to be proven, by an
    accountant of your own (``register_accountant``); no other accountant takes the scheme for one
    that it knows.

    Test the class with ``dptrain.testing.SchemeContract``, or ``ExchangeableSchemeContract``. It is
    final: a subclass is refused, since an accountant of the class would cover other draws too.

    Args:
        scheme: a concrete, frozen, keyword-only dataclass derived from ``Scheme`` or
            ``ExchangeableScheme`` (or ``AnySizeScheme``, ``UserScheme``), with

            - ``dataset_size``, ``steps`` and ``min_sep``, as fields or as properties,
            - ``rate`` and ``stream(seed)``, whose batches a ``SeededStream`` draws,
            - a class method ``for_batch_size(*, batch_size, dataset_size, steps, ...)``, with
              ``epochs`` beside or in place of ``steps`` where it runs whole epochs, and with
              ``graph`` in place of ``dataset_size`` where its units are users: what
              configurations call.

    Returns:
        The class, so that the function can be used as a decorator.

    Raises:
        TypeError: if it is no such class, is abstract, or lacks one of these.
        ValueError: if a scheme of that name is known, or was in an earlier layout.

    Example:
        >>> @register_scheme
        ... @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Everybody(Scheme):
        ...     dataset_size: int
        ...     steps: int
        ...     min_sep: int = 1
        ...     rate = 1.0
        ...
        ...     @classmethod
        ...     def for_batch_size(cls, *, batch_size, dataset_size, steps):
        ...         return cls(dataset_size=dataset_size, steps=steps)
        ...
        ...     def stream(self, seed):
        ...         return EverybodyStream(self, seed)
        >>> Scheme.from_dict({"type": "Everybody", "dataset_size": 9, "steps": 3})
        Everybody(dataset_size=9, steps=3, min_sep=1)
    """
    checked_member(scheme, Scheme, call="register_scheme")
    start = f"register_scheme({scheme.__name__})"
    if scheme.__name__ in Scheme.former_names:
        raise ValueError(
            f"{start}: files of an earlier format use this name for another scheme; choose another"
        )
    fields = dataclasses.fields(scheme)  # type: ignore[arg-type]  # checked above
    declared = {field.name for field in fields}
    for name in _CONSTANTS:
        if name not in declared and not hasattr(scheme, name):
            raise TypeError(
                f"{start}: the class lacks {name}; add a field or a property of that name"
            )
    if positional := [f.name for f in fields if f.init and not f.kw_only]:
        raise TypeError(
            f"{start}: {positional[0]!r} can be passed by position, so two numbers that are "
            "confused give another guarantee; decorate with @dataclasses.dataclass(frozen=True, "
            "kw_only=True)"
        )
    make = getattr(scheme, "for_batch_size", None)
    known = set(inspect.signature(make).parameters) if callable(make) else set()
    if "batch_size" not in known or not known & {"steps", "epochs"}:
        raise TypeError(
            f"{start}: configurations give a batch size; add a class method for_batch_size(*, "
            "batch_size, dataset_size, steps, ...) that returns the scheme"
        )
    _KNOWN[scheme.__name__] = scheme
    return scheme


def scheme_types() -> Mapping[str, type[Scheme]]:
    """The registered classes by name, in alphabetical order."""
    Scheme.family_members()
    return MappingProxyType(dict(sorted(_KNOWN.items())))
