"""The accountants that are known, and those of them that answer by themselves."""

from __future__ import annotations

import dataclasses
import importlib
import re
import threading
from collections.abc import Sequence
from typing import TypeVar

from dptrain.accounting.base.accountant import Accountant, Availability
from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.core import Adjacency, Kind, checks, did_you_mean
from dptrain.mechanism import MatrixMechanism

A = TypeVar("A", bound=Accountant)

_KNOWN: dict[str, Accountant] = {}
_AWAITED: list[tuple[str, str]] = []
_LOADING = threading.RLock()
_PLAIN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def register_when_asked(*places: tuple[str, str]) -> None:
    """Register accountants of dptrain's own once somebody asks for one, in this order.

    ``places`` gives module and class of each; the class is made without arguments.
    """
    _AWAITED.extend(places)


def _known() -> dict[str, Accountant]:
    """Registered accountants by name, dptrain's own first."""
    with _LOADING:
        while _AWAITED:
            module, name = _AWAITED[0]
            _register(getattr(importlib.import_module(module), name)())
            del _AWAITED[0]
    return _KNOWN


def register_accountant(accountant: A) -> A:
    """Make an accountant known: to ``account``, ``calibrate``, training and the command line.

    It is then found by its name, stands in ``accountants_for`` and in the support table, and
    answers by itself for mechanisms that it covers (``refusal`` is ``None``) and does not leave to
    be asked for by name (``reserved`` is ``None``), by this rule:

    1. Packages are asked in the order in which they first registered an accountant, dptrain
       first. (The package is that of the module which defines the accountant's class.) The first
       one with an accountant that answers by itself decides; accountants of later packages then
       answer by name only. So importing a package can add answers where there were none, but
       changes none that another package gives: an ε of dptrain's is never replaced unasked.
    2. Of that package's accountants, one that refines what deterministic ones prove
       (``refines``) answers instead of them; otherwise all deterministic ones do, with the least
       bound in each direction (``BestOf``); otherwise the first registered one that simulates.

    Every bound stands for itself: whether an accountant is right decides whether the guarantee is.
    Check it with ``dptrain.testing.AccountantContract``, and against a law that can be enumerated.

    Example:
        >>> class Mine(DeterministicAccountant):
        ...     name = "mine"
        ...     kind = Kind.UPPER_BOUND
        ...     def refusal(self, mechanism):
        ...         return None if isinstance(mechanism.scheme, MyScheme) else "it needs MyScheme"
        ...     def curve(self, mechanism):
        ...         return MyCurve(...)
        >>> dptrain.register_accountant(Mine())

    Args:
        accountant: with the options that it has where nobody gives others. It serves every
            adjacency of its ``adjacencies``. An accountant that a class of the same name in the
            same module registered before is replaced (a cell that is run again).

    Returns:
        The accountant.

    Raises:
        TypeError: if it is no accountant, its kind is none, or its options are no fields.
        ValueError: if its name is not plain, another accountant has it, or the same class did so
            with other options.
    """
    _known()
    return _register(accountant)


def _register(accountant: A) -> A:
    checks.instance("accountant", accountant, Accountant)
    name, made = accountant.name, type(accountant)
    checks.instance("name", name, str, owner=made.__name__)
    checks.instance("kind", getattr(made, "kind", None), Kind, owner=made.__name__)
    if not _PLAIN.fullmatch(name):
        raise ValueError(
            f"{made.__name__}: name={name!r} must be lower-case words joined by hyphens, for "
            "instance 'balls-in-bins-renyi'; the name for people is display"
        )
    try:
        for each in accountant.adjacencies:
            accountant.under(each)
    except TypeError as error:
        raise TypeError(
            f"{made.__name__}: it cannot be created for another adjacency ({error}); declare its "
            "options as fields, under @dataclasses.dataclass(frozen=True, kw_only=True), without "
            "an __init__ of its own"
        ) from error
    known = _KNOWN.get(name) or _formerly(name)
    if known is not None and _where(known) != _where(accountant):
        raise ValueError(
            f"{made.__name__}: name={name!r} is already used by {'.'.join(_where(known))}; choose "
            "another"
        )
    if known is not None and type(known) is made and known != accountant:
        raise ValueError(
            f"{made.__name__}: name={name!r} is registered with other options, which other runs "
            "may depend on; pass your instance as accountant= where it should be used"
        )
    _KNOWN[name] = accountant
    return accountant


def registered_accountants(adjacency: Adjacency | None = None) -> list[Accountant]:
    """All accountants about an adjacency, or about every one, in the order of registration."""
    relations = tuple(Adjacency) if adjacency is None else (adjacency,)
    return [
        member.under(each)
        for member in _known().values()
        for each in relations
        if each in member.adjacencies
    ]


def accountant_named(name: str, adjacency: Adjacency | None = None) -> Accountant:
    """The accountant that has or had that name, about an adjacency (default: its own).

    Raises:
        ValueError: if there is none, with the nearest name, or it has no theorems for the
            adjacency.
    """
    members = _known()
    known = members.get(name) or _formerly(name)
    if known is None:
        hint = did_you_mean(name.lower().replace(" ", "-"), members)
        raise ValueError(
            f"accountant={name!r} is unknown; {hint}available are {', '.join(members)}"
        )
    if adjacency is None:
        return known
    if adjacency not in known.adjacencies:
        raise ValueError(
            f"accountant={name!r} states {known.relations}, but adjacency={adjacency.value!r} was "
            "requested; leave accountant out or change the adjacency"
        )
    return known.under(adjacency)


def availabilities(mechanism: MatrixMechanism, adjacency: Adjacency) -> list[Availability]:
    """Availability for the mechanism of each accountant about the adjacency, with the reasons.

    Accountants of other packages than the first that answers do so by name only.
    """
    asked = mechanism.participants
    found = [Availability.of(each, asked) for each in registered_accountants(adjacency)]
    packages = list(dict.fromkeys(_package(member) for member in _known().values()))
    answering = {_package(each.accountant) for each in found if each.reason is None}
    if answering:
        first = min(answering, key=packages.index)
        found = [_behind(each, first) for each in found]
    return found


def _behind(found: Availability, first: str) -> Availability:
    if found.reason is not None or _package(found.accountant) == first:
        return found
    reserved = f"{first} has an accountant of its own; request it by name ({found.name!r})"
    return dataclasses.replace(found, reserved=reserved)


def answering(found: Sequence[Availability]) -> list[Accountant]:
    """Accountants that answer by themselves, of one package: rule 2 of ``register_accountant``."""
    members = [each.accountant for each in found if each.reason is None]
    if refining := [member for member in members if member.refines]:
        return refining[:1]
    proven = [member for member in members if isinstance(member, DeterministicAccountant)]
    return [*proven] or members[:1]


def _formerly(name: str) -> Accountant | None:
    """The accountant that proves what one of that name proved in earlier versions."""
    return next((each for each in _KNOWN.values() if name in each.formerly), None)


def _where(accountant: Accountant) -> tuple[str, str]:
    return type(accountant).__module__, type(accountant).__qualname__


def _package(accountant: Accountant) -> str:
    return type(accountant).__module__.partition(".")[0]
