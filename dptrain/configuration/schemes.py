"""Any sampling scheme of dptrain from the ``scheme`` group of a configuration."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dptrain.configuration.typed import named_in_errors, named_type, required_of, stated_fields
from dptrain.sampling import (
    AttributionGraph,
    Scheme,
    UserScheme,
    public_size,
    scheme_types,
)

SIZES = ("batch_size", "epoch_length")
"""Fields that every scheme has in a configuration, of which exactly one is stated."""

_FROM_RUN = ("dataset_size", "steps", "epochs", "graph")  # known without being stated

_STAND_IN = 4096  # examples of the graph that stands in for one that has not been read
_LARGEST = 1 << 20  # of a stated number that the stand-in follows


def expected_batch_size(settings: Mapping[str, Any], dataset_size: int) -> float:
    """B̄, stated as ``batch_size`` or by ``epoch_length`` = N/B̄ (N: ``stated_size``).

    Raises:
        ValueError: unless exactly one is given and positive.
    """
    given: dict[str, Any] = {
        name: settings[name] for name in SIZES if settings.get(name) is not None
    }
    if len(given) != 1:
        raise ValueError(
            f"scheme.batch_size={settings.get('batch_size')} and scheme.epoch_length="
            f"{settings.get('epoch_length')}: give exactly one of them (epoch_length is N divided "
            "by the expected batch size) and set the other to null"
        )
    ((name, value),) = given.items()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and value > 0 and math.isfinite(value)):
        raise ValueError(f"scheme.{name}={value!r}: must be a positive number")
    if name == "batch_size":
        return float(value)
    return stated_size(settings, dataset_size) / value


def stated_size(settings: Mapping[str, Any], dataset_size: int) -> int:
    """N, or the scheme's ``nominal_size``, which stands for it where it is private.

    Raises:
        ValueError: if that is no positive integer.
    """
    return public_size("scheme", dataset_size, settings.get("nominal_size"))


def check_scheme(
    settings: Mapping[str, Any], *, users: bool | None = None, steps: int | None = None
) -> None:
    """Refuse what can be seen to be wrong without the data, which may take minutes to read.

    That is the type, names of fields and the batch size; of a scheme of users also the values of
    its fields, which it is made with over a small graph that stands in for the real one. What only
    ``for_batch_size`` reads is not checked, as finding a probability may take long.

    Args:
        settings: as for ``build_scheme``.
        users: whether the users of the examples will be known; ``None``: not known yet.
        steps: n, if it is known already.

    Raises:
        ValueError: naming the field, the value and what is known instead.
    """
    _, parameters, stated = _stated(settings)
    expected_batch_size(settings, 1)
    if users is not None:
        _check_users(settings["type"], parameters, users=users)
    if "graph" not in parameters:
        return
    member = scheme_types()[settings["type"]]
    # The smallest batches of ever so many examples: what the real graph decides is left to it.
    values = list(stated.values())
    for value in stated.values():
        values += value.values() if isinstance(value, Mapping) else ()
    most = max([_STAND_IN, *(v for v in values if type(v) is int and v <= _LARGEST)])
    known = {"batch_size": 1, "probability": 1.0, "graph": _stand_in(most)}
    known["steps"] = steps or 1_000_000
    own = inspect.signature(member).parameters
    fields = {key: value for key, value in {**known, **stated}.items() if key in own}
    make: Any = member
    lacking = any(own[key].default is inspect.Parameter.empty and key not in fields for key in own)
    # Such as a scheme of users, which a configuration names and the constructor takes made.
    both = [key for key in stated if key in own and key in parameters]
    if lacking or any(own[key].annotation != parameters[key].annotation for key in both):
        known["steps"] = most  # a whole epoch of batches of one
        make = member.for_batch_size  # type: ignore[attr-defined]  # every registered one has it
        fields = {key: v for key, v in {**known, **stated}.items() if key in parameters}
    with named_in_errors("scheme"):
        make(**fields)


@functools.cache
def _stand_in(size: int) -> AttributionGraph:
    """A graph of so many users with one example each."""
    own = np.arange(size)
    return AttributionGraph.from_pairs(own.tolist(), own.tolist(), dataset_size=size)


def _check_users(name: str, parameters: Mapping[str, Any], *, users: bool) -> None:
    """Refuse a scheme of users where none are known, and one of examples where they are."""
    if "graph" in parameters and not users:
        raise ValueError(
            f"scheme.type={name} needs the users of every example, but this data set has none; "
            "choose another scheme"
        )
    if users and "graph" not in parameters:
        of_users = [each for each, kind in scheme_types().items() if issubclass(kind, UserScheme)]
        raise ValueError(
            f"scheme.type={name} would protect single examples, but the users of this data set "
            f"have several; choose {' or '.join(of_users)}"
        )


def _stated(settings: Mapping[str, Any]) -> tuple[Any, Mapping[str, inspect.Parameter], dict]:
    """The maker of the scheme, its parameters, and the stated ones (without the batch size)."""
    member = named_type("scheme", settings, scheme_types(), Scheme.former_names)
    make: Any = member.for_batch_size  # type: ignore[attr-defined]  # every registered one has it
    parameters = inspect.signature(make).parameters
    own = {name: p for name, p in parameters.items() if name not in (*SIZES, *_FROM_RUN)}
    allowed = [*SIZES, *own]
    given = stated_fields("scheme", settings, allowed=allowed, required=required_of(own))
    return make, parameters, {name: v for name, v in given.items() if name not in SIZES}


def steps_of_epoch(
    settings: Mapping[str, Any], *, dataset_size: int, graph: AttributionGraph | None = None
) -> int | None:
    """Steps of an epoch of a scheme that runs whole ones; ``None`` for any other.

    Args:
        settings, dataset_size, graph: as for ``build_scheme``.

    Raises:
        ValueError: as ``build_scheme``.
    """
    make, parameters, fields = _stated(settings)
    if "epochs" not in parameters:
        return None
    fields["batch_size"] = _sized(parameters, expected_batch_size(settings, dataset_size))
    known = {"dataset_size": dataset_size, "graph": graph, "epochs": 1}
    fields |= {key: value for key, value in known.items() if key in parameters}
    with named_in_errors("scheme"):
        return make(**fields).steps


def _sized(parameters: Mapping[str, inspect.Parameter], size: float) -> float:
    """The B̄ that the scheme takes: a whole number if its batches are of one size."""
    return round(size) if parameters["batch_size"].annotation in ("int", int) else size


def build_scheme(
    settings: Mapping[str, Any],
    *,
    dataset_size: int,
    steps: int,
    graph: AttributionGraph | None = None,
    divisor: float = 1.0,
) -> Scheme:
    """The scheme of class ``settings["type"]`` with B̄ and the other entries as its fields.

    Args:
        settings: ``type``, ``batch_size`` or ``epoch_length``, and fields of that type.
        dataset_size: N.
        steps: n.
        graph: users of the examples, for the schemes that need them.
        divisor: divides the expected and the largest batch size (for simulations).

    Raises:
        ValueError: naming the field of the configuration, the value, and what is known instead.
    """
    make, parameters, fields = _stated(settings)
    name = settings["type"]
    _check_users(name, parameters, users=graph is not None)
    # Batches of a scheme with groups count users, and an epoch is one of users.
    counted = graph.users if graph is not None and "group_size" in parameters else dataset_size
    size = expected_batch_size(settings, counted) / divisor
    fields["batch_size"] = _sized(parameters, size)
    if divisor != 1:
        fields = _divided(fields, divisor)
    known: dict[str, Any] = {"dataset_size": dataset_size, "graph": graph}
    if "epochs" not in parameters:
        known["steps"] = steps
    fields |= {key: value for key, value in known.items() if key in parameters}
    with named_in_errors("scheme"):
        if "epochs" not in parameters:
            return make(**fields)
        epoch = make(**fields, epochs=1).steps
        if steps % epoch and divisor != 1:
            raise ValueError(_unfit_factor(make, fields, size * divisor, steps, divisor))
        if steps % epoch:
            raise ValueError(
                f"steps={steps}: {name} with an expected batch size of {size:g} runs whole epochs "
                f"of {epoch} steps; use a multiple of {epoch}"
            )
        return make(**fields, epochs=steps // epoch)


def _divided(fields: Mapping[str, Any], divisor: float) -> dict[str, Any]:
    """The fields with largest batches divided, within a scheme of users' participation too."""
    found: dict[str, Any] = {
        name: _divided(value, divisor) if isinstance(value, Mapping) else value
        for name, value in fields.items()
    }
    if isinstance(found.get("max_batch_size"), int):
        found["max_batch_size"] = math.ceil(found["max_batch_size"] / divisor)
    return found


def _unfit_factor(
    make: Any, fields: Mapping[str, Any], full: float, steps: int, divisor: float
) -> str:
    """The reason why batches of ``full/divisor`` fill no whole epochs, and the factors that do.

    Changing the number of steps, the remedy for a real run, would simulate another one.
    """

    def epoch(factor: float) -> int:
        size = round(full / factor) if isinstance(fields["batch_size"], int) else full / factor
        return make(**{**fields, "batch_size": size}, epochs=1).steps

    usable = [
        factor
        for factor in range(2, int(min(steps // epoch(1), full)) + 1)
        if steps % epoch(factor) == 0
    ]
    remedy = f"use one of {', '.join(map(str, usable))}" if usable else "no whole number does"
    return (
        f"simulate={divisor:g} makes epochs of {epoch(divisor)} steps, and steps={steps} is not a "
        f"multiple of that, as it must be here; {remedy}"
    )
