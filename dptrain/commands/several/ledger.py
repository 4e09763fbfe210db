"""A ledger of releases of one data set: a file of JSON lines, each with the hash of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any

from dptrain.accounting import BudgetFilter, Charge, TradeOff
from dptrain.accounting.losses import gaussian
from dptrain.contrib.selection import least_slack
from dptrain.core import Adjacency, Kind, Unit, checks, parsed

_FORMAT = "dptrain budget ledger 1"
_NOTHING = "0" * 64  # before the first line
_SAME = 1e-9  # what figures of another processor may differ by; they were rounded by more


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One release that was charged.

    Attributes:
        date: when, in UTC.
        name: of its file.
        charge: (μ, d).
        limits: its curve, from which the charge follows.
        unit: who is protected.
        adjacency: what may differ.
        data: what its scheme says of the data set.
        overlapping: True if it was said that a data set of another size shares people.
        failure_probability: chance that its statement is false; ``None`` if unknown.
    """

    date: str
    name: str
    charge: Charge
    limits: TradeOff
    unit: Unit
    adjacency: Adjacency
    data: dict[str, Any]
    overlapping: bool
    mechanism_hash: str
    failure_probability: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        return {
            "what": "charged",
            "date": self.date,
            "name": self.name,
            "mu": self.charge.mu,
            "slack": self.charge.slack,
            "curve": json.loads(self.limits.to_json()),
            "unit": dataclasses.asdict(self.unit),
            "adjacency": self.adjacency.value,
            "data": self.data,
            "overlapping": self.overlapping,
            "mechanism_hash": self.mechanism_hash,
            "failure_probability": self.failure_probability,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LedgerEntry:
        """Read what ``to_dict`` gave."""
        chance = value["failure_probability"]
        about = {name: value[name] for name in ("unit", "adjacency")}  # which old curves do not say
        return cls(
            date=checks.text("date", value["date"]),
            name=checks.text("name", value["name"]),
            charge=Charge(mu=value["mu"], slack=value["slack"]),
            limits=TradeOff.from_json(json.dumps({**about, **value["curve"]})),
            unit=Unit(**value["unit"]),
            adjacency=Adjacency(value["adjacency"]),
            data=checks.instance("data", value["data"], dict),
            overlapping=checks.flag("overlapping", value["overlapping"]),
            mechanism_hash=checks.text("mechanism_hash", value["mechanism_hash"]),
            failure_probability=None if chance is None else checks.number("chance", chance),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerBudget:
    """The budget that a ledger was opened with.

    Attributes:
        date: when, in UTC.
        data_set: its name, or ``None``.
        epsilon: ε of everything together.
        delta: δ of everything together.
        mu: B of the filter.
        slack: Δ of the filter.
        unit: ``"example"`` or ``"user"``, if only such releases are taken.
        adjacency: of all releases, if only such are taken.
    """

    date: str
    data_set: str | None
    epsilon: float
    delta: float
    mu: float
    slack: float
    unit: str | None
    adjacency: Adjacency | None

    def __post_init__(self) -> None:
        for name in ("epsilon", "mu"):
            checks.number(name, getattr(self, name), above=0)
        checks.number("delta", self.delta, above=0, below=1)
        checks.number("slack", self.slack, above=0, below=self.delta)
        if self.unit is not None:
            checks.choice("unit", self.unit, ("example", "user"))
        rest = self.delta - self.slack
        if float(gaussian.log_delta(self.epsilon, self.mu)) > math.log(rest) + _SAME:
            raise ValueError(
                f"mu={self.mu} and slack={self.slack} do not keep epsilon={self.epsilon}, "
                f"delta={self.delta}"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value."""
        adjacency = None if self.adjacency is None else self.adjacency.value
        value = dataclasses.asdict(self) | {"adjacency": adjacency}
        return {"what": "opened", "format": _FORMAT, **value}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> LedgerBudget:
        """Read what ``to_dict`` gave."""
        found = {field.name: value[field.name] for field in dataclasses.fields(cls)}
        if found["adjacency"] is not None:
            found["adjacency"] = Adjacency(found["adjacency"])
        return cls(**found)


class BudgetLedger:
    """The contents of a ledger's file, every line of it checked.

    Each line has the SHA-256 of the line before, so that a line that was changed, moved or taken
    out of the middle does not fit to the next one. That the last line was changed, or lines were
    cut off at the end, shows only to somebody who has noted down the last hash.

    Attributes:
        budget: what it was opened with.
        entries: the releases, in order.
        hashes: of all lines, in order.
        filter: what is left of the budget.
    """

    def __init__(self, path: pathlib.Path, text: str) -> None:
        self.path = path
        self.entries: list[LedgerEntry] = []
        self.hashes: list[str] = []
        if not text:
            raise ValueError(f"{path} is empty; create a ledger with dptrain odometer open")
        *lines, rest = text.split("\n")
        if rest:
            raise ValueError(
                f"{path}: line {len(lines) + 1} is not complete: writing it was interrupted, so "
                "its release was not charged. Remove that line if nothing was released"
            )
        for number, line in enumerate(lines, 1):
            try:
                self._take(line)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else f"{error}"
                raise ValueError(f"{path}: line {number}: {reason}") from error

    def _take(self, line: str) -> None:
        value = parsed(line, "line of a ledger")
        if not isinstance(value, dict):
            raise ValueError("it is no line of a ledger")
        if not self.hashes and value.get("format") != _FORMAT:
            raise ValueError(f"it does not begin a ledger (format: {_FORMAT!r})")
        if value["previous"] != (self.hashes[-1] if self.hashes else _NOTHING):
            raise ValueError(
                "its hash of the previous line does not match that line: one of the two was "
                "changed, or lines were moved or removed. This ledger proves nothing"
            )
        if not self.hashes:
            self.budget = LedgerBudget.from_dict(value)
            self.filter = BudgetFilter(mu=self.budget.mu, slack=self.budget.slack)
        else:
            checks.choice("what", value["what"], ("charged",))
            self.take(LedgerEntry.from_dict(value))
        self.hashes.append(line_hash(line))

    def take(self, entry: LedgerEntry) -> None:
        """Charge a release, here and not in the file."""
        if entry.limits.kind is Kind.ESTIMATE:
            raise ValueError(f"the curve of {entry.name} is an estimate, which proves nothing")
        least = least_slack(entry.limits, entry.charge.mu)
        if least > entry.charge.slack * (1.0 + _SAME) + 1e-15:
            raise ValueError(f"the curve of {entry.name} takes d = {least:.6g} at its μ")
        self.filter.spend(entry.charge)
        self.entries.append(entry)

    @property
    def adjacency(self) -> Adjacency | None:
        """The neighboring relation of all releases, if that has been decided."""
        return self.entries[0].adjacency if self.entries else self.budget.adjacency


def line_hash(line: str) -> str:
    """SHA-256 of a line without its end, in hexadecimal."""
    return hashlib.sha256(line.encode()).hexdigest()


def now() -> str:
    """The time in UTC, to seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_ledger(path: pathlib.Path) -> BudgetLedger:
    """The ledger of a file."""
    with _opened(path, "rb") as file:
        return BudgetLedger(path, _text(path, file))


def open_ledger(path: pathlib.Path, budget: LedgerBudget) -> BudgetLedger:
    """Begin a ledger in a new file."""
    line = json.dumps({**budget.to_dict(), "previous": _NOTHING}, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            _write(file, line)
    except FileExistsError:
        raise ValueError(
            f"{path} already exists: a ledger is opened once for a data set; name another file"
        ) from None
    return read_ledger(path)


@contextlib.contextmanager
def locked_ledger(path: pathlib.Path) -> Iterator[tuple[BudgetLedger, IO[bytes]]]:
    """A ledger that nobody else writes meanwhile, and its file for ``append``."""
    import fcntl

    with _opened(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        yield BudgetLedger(path, _text(path, file)), file


def append(ledger: BudgetLedger, file: IO[bytes], entry: LedgerEntry) -> None:
    """Charge a release, in the ledger and on the disk.

    Nothing is written if the charge is refused.
    """
    ledger.take(entry)
    value = {**entry.to_dict(), "previous": ledger.hashes[-1]}
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    _write(file, line)
    ledger.hashes.append(line_hash(line))


def _opened(path: pathlib.Path, mode: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except FileNotFoundError:
        raise ValueError(
            f"there is no ledger {path}; create one with dptrain odometer open"
        ) from None


def _text(path: pathlib.Path, file: IO[bytes]) -> str:
    try:
        return file.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text ({error.reason}), so it is not a ledger") from error


def _write(file: IO[bytes], line: str) -> None:
    file.seek(0, os.SEEK_END)
    file.write(line.encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
