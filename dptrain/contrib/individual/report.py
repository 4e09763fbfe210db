"""The spending of every example, as a value and a file: on request only, never for release.

The CSV of an individual report: warning, head as JSON, one line an example.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import pathlib
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from dptrain.contrib.individual.report_groups import Groups, GroupTable, group_table, plain
from dptrain.core import Array, Kind
from dptrain.individual import Mask
from dptrain.reporting import MARK, WARNING, free_path, in_place

if TYPE_CHECKING:
    from dptrain.engine import PrivateTraining


FORMAT = 1
_COLUMNS = ["example", "epsilon", "active", "note"]
MEANING = (
    "What is guaranteed is the bound. ε of one example is how much of it the releases so far have "
    "used, by that example's own gradients"
)


def write_report(report: IndividualReport, path: pathlib.Path) -> None:
    """Replace ``path`` by the report's file."""
    head = {
        "note": f"{MARK}. {MEANING}",
        "format": FORMAT,
        "examples": report.size,
        "delta": repr(report.delta),
        "filter": report.filter,
        "kind": report.kind.value,
        "condition": report.condition,
        "bound": None if report.bound is None else repr(float(report.bound)),  # also "inf"
        "active_counts": report.active_counts,
    }
    with in_place(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {WARNING}\n# {json.dumps(head, ensure_ascii=False)}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        epsilon = map(repr, report.epsilon.tolist())  # reads back to the same float
        active, every = map(int, report.active.tolist()), range(report.size)
        writer.writerows(zip(every, epsilon, active, itertools.repeat(MARK), strict=False))


def read_report(path: pathlib.Path) -> dict[str, Any]:
    """The fields of the report that ``write_report`` wrote."""
    if not path.is_file():
        raise ValueError(f"path={path}: there is no such file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            warning, head = file.readline(), file.readline()
            if not warning.startswith("# NOT FOR RELEASE") or not head.startswith("# {"):
                raise ValueError("it does not start like a file of IndividualReport.save()")
            return _fields(json.loads(head[2:]), list(csv.reader(file)))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ValueError(
            f"path={path} cannot be read as an individual report ({error}); save it again with "
            "IndividualReport.save()"
        ) from error


def _fields(head: dict[str, Any], rows: list[list[str]]) -> dict[str, Any]:
    if head["format"] != FORMAT:
        raise ValueError(f"format {head['format']!r} is not {FORMAT}")
    columns, lines = (rows[0], rows[1:]) if rows else ([], [])
    if columns != _COLUMNS:
        raise ValueError(f"its columns are {columns}, not {_COLUMNS}")
    if len(lines) != head["examples"]:
        raise ValueError(f"it has {len(lines)} of {head['examples']} examples")
    for i, line in enumerate(lines):
        if len(line) != len(columns) or line[0] != str(i) or line[-2] not in ("0", "1"):
            raise ValueError(f"the line of example {i} is damaged")
    bound = head["bound"]
    return {
        "epsilon": np.array([float(line[-3]) for line in lines]),
        "delta": float(head["delta"]),
        "active": np.array([line[-2] == "1" for line in lines]),
        "active_counts": tuple(head["active_counts"]),
        "filter": head["filter"],
        "kind": Kind(head["kind"]),
        "condition": head["condition"],
        "bound": None if bound is None else float(bound),
    }


DEFAULT_NAME = "individual_privacy_NOT_FOR_RELEASE.csv"
_QUANTILES = {0.0: "least", 0.05: "5 %", 0.25: "25 %", 0.5: "median", 0.75: "75 %", 0.95: "95 %"}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndividualReport:
    """Each example's spending of its budget: private data, for the trainer's eyes.

    ``of`` makes one of a run; nothing makes one unasked. ``repr`` holds no number of an
    example, so that a value that ends in a log gives nothing away.

    Attributes:
        epsilon: ε_i at δ, shape (N,); ``inf`` is allowed.
        delta: δ in (0, 1), the same for all.
        active: which examples can still take part, at least with a small gradient, shape (N,).
        active_counts: how many examples could take part in each step.
        filter: name of the filter.
        kind: how the filter's bound was shown.
        condition: what the bound rests on, in one sentence.
        bound: ε at δ that the filter keeps for every example; ``None`` where none ran.

    Raises:
        ValueError: if shapes differ, or a number is out of range.
    """

    epsilon: Array
    delta: float
    active: Mask
    active_counts: tuple[int, ...]
    filter: str
    kind: Kind
    condition: str
    bound: float | None = None

    def __post_init__(self) -> None:
        epsilon = np.array(plain(self.epsilon), dtype=np.float64)  # a copy
        active = np.array(plain(self.active))
        if epsilon.ndim != 1 or not len(epsilon):
            raise ValueError(
                f"epsilon has shape {epsilon.shape}: must have one number per example, (N,)"
            )
        if wrong := np.flatnonzero(~(epsilon >= 0)).tolist():
            raise ValueError(f"epsilon: negative or NaN for example {wrong[0]}")
        if active.shape != epsilon.shape or active.dtype != bool:
            raise ValueError(
                f"active has type {active.dtype} and shape {active.shape}: must have one boolean "
                f"per example, {epsilon.shape}"
            )
        if not 0 < self.delta < 1:
            raise ValueError(f"delta={self.delta}: must lie strictly between 0 and 1")
        for name, array in (("epsilon", epsilon), ("active", active)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "delta", float(self.delta))
        object.__setattr__(self, "active_counts", tuple(int(n) for n in self.active_counts))

    @classmethod
    def of(cls, private: PrivateTraining, delta: float | None = None) -> Self:
        """Read a run's record: what was committed so far.

        Args:
            private: a run with an individual filter.
            delta: δ of the ε; ``None`` is the filter's target.

        Raises:
            TypeError: if it is no run.
            ValueError: if the run has no individual filter, or δ is not in (0, 1).
        """
        if not hasattr(private, "guarantee"):
            raise TypeError(
                f"IndividualReport.of({type(private).__name__}): must be the result of make_private"
            )
        record, stated = private.individual, private.stated_individual
        individual = private.individual_filter
        assert individual is not None
        delta = individual.target_delta if delta is None else delta
        return cls(
            epsilon=record.epsilons(delta),
            delta=delta,
            active=record.active,
            active_counts=tuple(record.active_counts),
            filter=individual.name,
            kind=individual.kind,
            condition=stated.condition,
            bound=stated.epsilon_bound(delta),
        )

    @property
    def size(self) -> int:
        """N."""
        return len(self.epsilon)

    def __repr__(self) -> str:
        return (
            f"IndividualReport({self.size} examples, delta={self.delta:g}, {self.filter!r}; "
            f"{MARK}, summary() shows the numbers)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndividualReport):
            return NotImplemented
        return all(
            np.array_equal(mine, getattr(other, name))
            if isinstance(mine, np.ndarray)
            else mine == getattr(other, name)
            for name, mine in vars(self).items()
        )

    __hash__ = None  # type: ignore[assignment]

    def summary(self) -> str:
        """The distribution of ε in a few lines, for the trainer's eyes.

        Quantiles are values of examples, the larger neighbor where one lies between two.
        """
        levels = [*_QUANTILES, 1.0]
        values = np.quantile(self.epsilon, levels, method="higher")
        quantiles = [
            f"{label} {value:.4g}"
            for label, value in zip([*_QUANTILES.values(), "most"], values, strict=True)
        ]
        still = int(self.active.sum())
        lines = [
            f"{MARK}: computed from the raw training examples",
            f"{self.filter}, δ = {self.delta:g}: what {self.size:,} examples have spent in "
            f"{len(self.active_counts):,} steps",
            f"ε: {', '.join(quantiles)}",
            f"active: {still:,} of {self.size:,} ({still / self.size:.1%}) can still take part, at "
            "least with a small gradient",
        ]
        if counts := self.active_counts:
            lines[-1] += f"; {counts[0]:,} could in the first step, {counts[-1]:,} in the last"
        if self.bound is not None:
            lines.append(f"bound of the run: ε = {self.bound:.4g}, {self.kind.sentence}")
        return "\n".join([*lines, f"{MEANING}.", f"{self.condition.rstrip('.')}."])

    def by_group(self, groups: Groups, losses: npt.ArrayLike | None = None) -> GroupTable:
        """Mean ε, share of active examples and mean loss of groups that the user names.

        Args:
            groups: by name, the indices of the examples or a boolean mask of shape (N,). Groups
                may overlap.
            losses: one loss an example of the training set, shape (N,); NaN where an example is in
                no group.

        Raises:
            ValueError: naming the group and the examples, where one is empty, names an example
                that is not there or one twice, or lacks a loss; if a length is wrong.
        """
        spent = {name: getattr(self, name) for name in ("epsilon", "active", "delta")}
        return group_table(groups, losses, **spent)

    def save(self, path: str | pathlib.Path, *, overwrite: bool = False) -> pathlib.Path:
        """Write a CSV that says that it is private, readable by its owner only.

        Comment lines begin with ``#``: the warning, then the rest of the report as JSON. Columns
        are ``example``, ``epsilon``, ``active`` (1 or 0) and ``note``, which repeats the warning in
        every line.

        Args:
            path: a file, or a folder that is there; the file's default name is
                ``individual_privacy_NOT_FOR_RELEASE.csv``.
            overwrite: replace a file that is there.

        Returns:
            The path of the file.

        Raises:
            ValueError: if the folder is missing, or the file is there.
        """
        path = free_path(path, DEFAULT_NAME, overwrite=overwrite)
        write_report(self, path)
        return path

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Read what ``save`` wrote, to an equal value.

        Raises:
            ValueError: if it is no such file, or a line is missing or damaged.
        """
        return cls(**read_report(pathlib.Path(path)))
