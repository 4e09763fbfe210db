"""The privacy of a run, as far as the files that dptrain writes of it tell."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from dptrain.accounting import Profile, TradeOff, account, trade_off
from dptrain.accounting.base import told_once
from dptrain.commands.outputs import read_json
from dptrain.commands.several.ledger import LedgerEntry
from dptrain.core import Adjacency, Guarantee, Kind, Unit, digest
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import STATEMENT, read_profile
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy

# Profiles are read so far below δ that what is beyond them does not add up to it.
_BELOW, _LEAST, _POINTS = 1e-6, 1e-12, 801
_BY_SIMULATION = (Kind.CONFIDENCE, Kind.VERIFIED)
_SIZES = ("dataset_size", "nominal_size", "graph")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownRun:
    """A run of which a mechanism or a guarantee was given.

    Attributes:
        name: what tables call it.
        limits: δ(ε) as far as it is known: a curve, or one (ε, δ).
        guarantee: as it was stated, or as ``account`` states it of a bare mechanism.
        stated: True if a file stated the guarantee.
    """

    name: str
    limits: TradeOff
    guarantee: Guarantee
    stated: bool

    @property
    def unit(self) -> Unit:
        """The unit of privacy: an example, or a user."""
        return self.guarantee.unit

    @property
    def adjacency(self) -> Adjacency:
        """The neighboring relation of the guarantee."""
        return self.guarantee.adjacency

    @property
    def data(self) -> dict[str, Any]:
        """The data set, as the scheme describes it: sizes, and a digest of a graph of users."""
        scheme = self.guarantee.scheme
        found = {name: scheme[name] for name in _SIZES if scheme.get(name) is not None}
        if "graph" in found:
            found["graph"] = digest(found["graph"])[:12]
        return found

    @property
    def failure_probability(self) -> float | None:
        """Chance over the accountant's draws that the statement is false; ``None`` if unknown.

        Of a verified guarantee it is part of δ, and counts where the curve at the noise that was
        found is used as well (docs/theory/selection.md#thm-budget-filter;
        ``test_a_curve_at_verified_noise_adds_its_chance_of_failure``).
        """
        counts = (Kind.CONFIDENCE,) if len(self.limits.epsilon) == 1 else _BY_SIMULATION
        if self.guarantee.kind not in counts:
            return 0.0
        told = (self.guarantee.certificate or {}).get("failure_probability")
        return float(told) if isinstance(told, int | float) else None


def how_shown(kind: Kind, chances: Sequence[float | None]) -> str:
    """The proof or estimate behind a statement about several runs, in words.

    Args:
        kind: of the weakest of them.
        chances: ``failure_probability`` of each.
    """
    known = [chance for chance in chances if chance is not None]
    if len(known) < len(chances):
        return f"{kind.sentence}; the runs' chances of a false statement add up"
    if not any(known):
        return kind.sentence
    total = f"{sum(known):.2g} over all accountants' draws"
    return f"{kind.sentence}; false with probability at most {total}"


def read_runs(
    paths: Sequence[pathlib.Path], *, delta: float | None, adjacency: Adjacency | None
) -> list[KnownRun]:
    """The runs of these files, in order.

    Args:
        paths: mechanisms, statements or summaries as JSON, or folders of runs.
        delta: at which a bare mechanism is accounted for where only a simulation answers.
        adjacency: of bare mechanisms; by default the mechanism's.
    """
    read = [(path, _read(path)) for path in paths]
    found = []
    for path, each in tqdm(read, "curves of the runs", unit="run", delay=2, leave=False):
        try:
            found.append(_known(f"{path}", each, delta, adjacency))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return found


_Read = MatrixMechanism | tuple[Guarantee, Profile | None]


def _read(path: pathlib.Path) -> _Read:
    if path.is_dir():
        path = path / STATEMENT
        if not path.is_file():
            raise ValueError(
                f"{path.parent}: there is no {STATEMENT} in this folder; for an unfinished run, "
                "create it with dptrain report FOLDER --json"
            )
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    try:
        return _parsed(value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parsed(value: Any) -> _Read:
    if isinstance(value, dict):
        if {"scheme", "strategy", "noise_multiplier", "format"} == set(value):
            return MatrixMechanism.from_dict(value)
        if value.get("simulation") is True:
            raise ValueError("it is the summary of a simulated run, which is not private")
        if isinstance(value.get("guarantee"), dict):
            return _guarantee(value["guarantee"]), _profile(value)
        if isinstance(told := value.get("guarantees"), list) and told:
            return _guarantee(told[0]), None  # one run may state several of itself
        if {"epsilon", "delta", "unit", "adjacency"} <= set(value):
            return _guarantee(value), None
        if "request" in value and "noise_multiplier" in value:
            raise ValueError(
                "it is a certificate, which does not state who is protected: give the statement "
                "of its run, or the file that dptrain calibrate wrote with --json or --out"
            )
    raise ValueError(
        "it does not describe the privacy of a run: give a mechanism (calibrate --out), a "
        f"statement ({STATEMENT}, calibrate --json, account --json) or a summary (train --json, "
        "report --json)"
    )


def _guarantee(value: Any) -> Guarantee:
    return Guarantee.from_json(json.dumps(value))


def _profile(value: dict[str, Any]) -> Profile | None:
    """The profile beside the guarantee, if there is one."""
    return read_profile(value["profile"]) if isinstance(value.get("profile"), dict) else None


def _known(name: str, read: _Read, delta: float | None, adjacency: Adjacency | None) -> KnownRun:
    if isinstance(read, MatrixMechanism):
        if read.noise_multiplier == 0:
            raise ValueError("noise_multiplier=0: without noise there is nothing to compose")
        at = 1 / (2 * read.scheme.population) if delta is None else delta
        with told_once():
            guarantee = account(read, delta=at, adjacency=adjacency)
            limits = _curve(read, guarantee)
        return KnownRun(name=name, limits=limits, guarantee=guarantee, stated=False)
    guarantee, profile = read
    if not math.isfinite(guarantee.epsilon):
        raise ValueError("ε = ∞: the run has no guarantee to compose")
    mechanism = _mechanism(guarantee)
    if mechanism is not None:
        with told_once():
            limits = _curve(mechanism, guarantee)
    else:
        limits = TradeOff.of(guarantee, profile)  # which leaves out what is not proven
    return KnownRun(name=name, limits=limits, guarantee=guarantee, stated=True)


def _curve(mechanism: MatrixMechanism, guarantee: Guarantee) -> TradeOff:
    floor = min(max(_LEAST, guarantee.delta * _BELOW), 0.25)
    return trade_off(mechanism, guarantee, floor=floor, points=_POINTS)


def _mechanism(guarantee: Guarantee) -> MatrixMechanism | None:
    """The mechanism of a guarantee that says all of it; ``None`` else, and of a filter's budget."""
    said = (guarantee.accountant, *guarantee.notes)
    if any(text.startswith(("individual ", "An individual filter ")) for text in said):
        return None
    if guarantee.unit.kind == "user":
        return None  # its graph may not be here as it was
    try:
        found = MatrixMechanism(
            scheme=Scheme.from_dict(guarantee.scheme),
            strategy=Strategy.from_dict(guarantee.strategy),
            noise_multiplier=guarantee.noise_multiplier,
        )
    except ValueError:
        return None  # a private size is left out of it, or the scheme is another package's
    return found if found.hash == guarantee.mechanism_hash else None


_APART = "if nobody is in two of them, --disjoint"


def check_same(
    runs: Sequence[KnownRun | LedgerEntry],
    *,
    overlapping: bool,
    disjoint: bool,
    apart: str = _APART,
) -> None:
    """Refuse runs of which no one statement can be made.

    Args:
        runs: all of them.
        overlapping: the user says that data sets of different sizes share units.
        disjoint: the user says that they share none.
        apart: what to do where they share none.
    """
    first = runs[0]
    for each in runs[1:]:
        if first.unit != each.unit:
            raise ValueError(
                f"{first.name} protects a {first.unit.noun} and {each.name} a {each.unit.noun}, so "
                "no single statement covers both; compose runs with the same unit"
            )
        if first.adjacency is not each.adjacency:
            raise ValueError(
                f"{first.name} has adjacency={first.adjacency.value!r} and {each.name} "
                f"{each.adjacency.value!r}: account for all runs under one of them"
            )
        if first.data != each.data and not (overlapping or disjoint):
            raise ValueError(
                f"{first.name} has {_words(first.data)} and {each.name} {_words(each.data)}: if "
                "they are different sets of the same people's data, where nobody is more than one "
                f"unit in either, say --overlapping; {apart}"
            )


def _words(data: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in data.items()) or "no stated size"
