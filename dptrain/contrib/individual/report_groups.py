"""Individual privacy by group: what the examples of each group have spent, and their mean loss."""

from __future__ import annotations

import csv
import dataclasses
import io
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dptrain.core import Array, aligned
from dptrain.individual import Indices, Mask
from dptrain.reporting import MARK, WARNING, free_path, has_line_break, in_place

DEFAULT_NAME = "group_privacy_NOT_FOR_RELEASE.csv"
_SHOWN = 5  # examples that an error names

Groups = Mapping[str, npt.ArrayLike]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRow:
    """One group.

    Attributes:
        group: its name.
        size: number of examples.
        mean_epsilon: mean of what its examples have spent.
        share_active: part of them that can still take part, in [0, 1].
        mean_loss: mean of the losses that were given, or ``None``.
    """

    group: str
    size: int
    mean_epsilon: float
    share_active: float
    mean_loss: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupTable:
    """The result of ``IndividualReport.by_group``; ``print`` it, or read its ``rows``.

    Means of private numbers are private as well: not for release.

    Attributes:
        delta: δ of the ε.
        rows: one a group, in the order of the user's mapping.
    """

    delta: float
    rows: tuple[GroupRow, ...]

    @property
    def has_losses(self) -> bool:
        """True if losses were given."""
        return any(row.mean_loss is not None for row in self.rows)

    def to_markdown(self) -> str:
        """A Markdown table; not for release."""
        head = ["group", "examples", "mean ε", "active"] + ["mean loss"] * self.has_losses
        lines = [head, ["---"] * len(head)]
        for row in self.rows:
            cells = [
                row.group.replace("|", "/"),
                f"{row.size:,}",
                f"{row.mean_epsilon:.4g}",
                f"{row.share_active:.1%}",
            ]
            if row.mean_loss is not None:
                cells.append(f"{row.mean_loss:.4g}")
            lines.append(cells)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def __str__(self) -> str:
        return (
            f"{MARK}: computed from the raw training examples\n"
            f"ε at δ = {self.delta:g} by group\n{aligned(self.to_markdown())}"
        )

    def __repr__(self) -> str:
        return f"GroupTable({len(self.rows)} groups; {MARK}, print() shows the numbers)"

    def save(self, path: str | pathlib.Path, *, overwrite: bool = False) -> pathlib.Path:
        """Write a CSV that says that it is private, readable by its owner only.

        Args:
            path: a file, or a folder that is there.
            overwrite: replace a file that is there.

        Returns:
            The path of the file.

        Raises:
            ValueError: if the folder is missing, or the file is there.
        """
        path = free_path(path, DEFAULT_NAME, overwrite=overwrite)
        text = io.StringIO()
        text.write(f"# {WARNING}\n# delta = {self.delta!r}\n")
        writer = csv.writer(text, lineterminator="\n")
        fields = [field.name for field in dataclasses.fields(GroupRow)]
        writer.writerow([*fields, "note"])
        for row in self.rows:
            values = [getattr(row, name) for name in fields]
            shown = [repr(v) if isinstance(v, float) else v for v in values]
            writer.writerow([*("" if v is None else v for v in shown), MARK])
        with in_place(path) as temporary:
            temporary.write_text(text.getvalue(), encoding="utf-8", newline="")
        return path


def group_table(
    groups: Groups, losses: npt.ArrayLike | None, *, epsilon: Array, active: Mask, delta: float
) -> GroupTable:
    """A table of each group's spending, and of the mean of its losses.

    Args:
        groups, losses: as of ``IndividualReport.by_group``.
        epsilon: that each example has spent at ``delta``, shape (N,).
        active: which examples can still take part, shape (N,).
        delta: of every ε.
    """
    if not groups:
        raise ValueError("groups={}: name at least one, for instance {'no condition': mask}")
    values = None if losses is None else _losses(losses, len(epsilon))
    rows = []
    for name, given in groups.items():
        members = _members(str(name), given, len(epsilon))
        if has_line_break(str(name)):
            raise ValueError(f"groups: {name!r} has a line break; name it in one line")
        loss = None
        if values is not None:
            loss = _mean_loss(str(name), values, members)
        rows.append(
            GroupRow(
                group=str(name),
                size=len(members),
                mean_epsilon=float(epsilon[members].mean()),
                share_active=float(active[members].mean()),
                mean_loss=loss,
            )
        )
    return GroupTable(delta=delta, rows=tuple(rows))


def plain(values: Any) -> npt.NDArray[Any]:
    """An array of what may be a tensor on any device."""
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def _members(name: str, given: Any, size: int) -> Indices:
    """Indices of a group's examples."""
    array, what = plain(given), f"groups[{name!r}]"
    if array.ndim != 1:
        raise ValueError(f"{what} has shape {array.shape}: give a list of indices or a mask")
    if array.size == 0:
        raise ValueError(f"{what} is empty, and has no mean: leave it out")
    if array.dtype == bool:
        if len(array) != size:
            raise ValueError(
                f"{what} is a mask of {len(array)} entries, but there are {size} examples: must "
                "have one entry per example"
            )
        if not array.any():
            raise ValueError(f"{what} selects no example, and has no mean: leave it out")
        return np.flatnonzero(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{what} holds {array.dtype}: give indices (integers) or a boolean mask")
    unknown = array[(array < 0) | (array >= size)]
    if unknown.size:
        raise ValueError(
            f"{what} contains {_some(unknown)}, which do not exist: examples are numbered 0 to "
            f"{size - 1}"
        )
    found, counts = np.unique(array, return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"{what} contains example {_some(found[counts > 1])} twice: list each once"
        )
    return found.astype(np.int64)


def _losses(losses: npt.ArrayLike, size: int) -> Array:
    array = plain(losses)
    if array.shape != (size,):
        raise ValueError(
            f"losses has shape {array.shape}: must have one loss per example of the training set, "
            f"({size},), in its order"
        )
    return array.astype(np.float64)


def _mean_loss(name: str, losses: Array, members: Indices) -> float:
    missing = members[np.isnan(losses[members])]
    if missing.size:
        raise ValueError(
            f"losses: NaN for example {_some(missing)} of group {name!r}; leave these out of the "
            "group, or compute their losses"
        )
    return float(losses[members].mean())


def _some(indices: npt.NDArray[Any]) -> str:
    """The first few of them."""
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return ", ".join(str(int(i)) for i in indices[:_SHOWN]) + more
