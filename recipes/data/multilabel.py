"""Examples with several labels at once, each 0 or 1, and groups of them to look at."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import TensorDataset

Groups = Mapping[str, torch.Tensor]  # name -> row numbers, int64, ascending


class LabelledRows(TensorDataset):
    """Rows of a table: features and labels.

    Args:
        features: float32, (rows, d), finite.
        labels: float32, (rows, L), each 0 or 1.

    Raises:
        ValueError: for tensors of other types, shapes or values.
    """

    def __init__(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        for name, tensor in (("features", features), ("labels", labels)):
            if tensor.dtype != torch.float32 or tensor.dim() != 2 or not tensor.shape[1]:
                raise ValueError(
                    f"{name} are {tensor.dtype} of shape {tuple(tensor.shape)}; give float32 of "
                    "shape (rows, columns) with at least one column"
                )
        if len(features) != len(labels) or not len(features):
            raise ValueError(
                f"{len(features)} rows of features and {len(labels)} of labels: give as many of "
                "both, and at least one"
            )
        if not features.isfinite().all():
            raise ValueError("features hold NaN or infinite values; fill or leave out those rows")
        if not ((labels == 0) | (labels == 1)).all():
            raise ValueError("labels hold other values than 0 and 1")
        super().__init__(features, labels)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all features and labels; private, as it recognizes the training set."""
        sha = hashlib.sha256(str([tuple(tensor.shape) for tensor in self.tensors]).encode())
        for tensor in self.tensors:
            sha.update(tensor.contiguous().numpy().data)
        return sha.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabel:
    """A training set, a held-out test set, and what is known about both.

    Attributes:
        train, test: the rows.
        features: names of the columns of the features.
        labels: names of the columns of the labels.
        train_groups, test_groups: groups to report on, in one order of names; disjoint. Who is in a
            training group is private.
    """

    train: LabelledRows
    test: LabelledRows
    features: tuple[str, ...]
    labels: tuple[str, ...]
    train_groups: Groups
    test_groups: Groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConditionGroups:
    """Five groups for two conditions, as in Koskela et al. 2023 (arXiv 2209.15596), section 6.

    They are, in the order in which they are filled: rows with no label at all; rows with the first
    condition; rows without it; rows with the second; rows without it. Each takes at most its size,
    at random, from the rows that no group before it took. So "without" the first condition may
    hold rows with the second, and rows with no label that the first group had no room for. Where
    every row has a label, as one-hot classes have, there is no group of rows without.

    Args:
        conditions: names of labels; two in the paper. No names make no groups.
        size, test_size: the most training and test rows of a group; 1000 and 400 in the paper.
        seed: of the draw; public.
    """

    conditions: Sequence[str]
    size: int = 1000
    test_size: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "test_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a group has at least one row")
        if len(set(self.conditions)) != len(self.conditions):
            raise ValueError(f"conditions={list(self.conditions)}: name each condition once")

    def draw(
        self, labels: torch.Tensor, names: Sequence[str], *, test: bool, unlabelled: bool = True
    ) -> Groups:
        """The groups of one part.

        Args:
            labels: 0 or 1, (rows, L).
            names: of the L labels.
            test: whether it is the test set, with its own size.
            unlabelled: whether there is a group of rows with no label at all.

        Raises:
            ValueError: if a condition is no label, or a group stays empty.
        """
        for condition in self.conditions:
            if condition not in names:
                raise ValueError(
                    f"conditions: {condition!r} is no label; the labels are {', '.join(names)}. "
                    "Name one or more of them, or none ([]) for no groups"
                )
        members = {}
        if unlabelled and self.conditions:
            members["no condition"] = (labels == 0).all(1)
        for condition in self.conditions:
            present = labels[:, list(names).index(condition)] == 1
            members |= {f"with {condition}": present, f"without {condition}": ~present}
        generator = torch.Generator().manual_seed(self.seed)
        free = torch.ones(len(labels), dtype=torch.bool)
        groups = {}
        for name, mask in members.items():
            rows = (mask & free).nonzero().flatten()
            if not len(rows):
                part, field = ("test", "test_size") if test else ("training", "size")
                raise ValueError(
                    f"no {part} row is left for the group {name!r} ({int(mask.sum())} fit it, and "
                    f"the groups before it took them); lower {field}={getattr(self, field)}, or "
                    "name other conditions"
                )
            order = torch.randperm(len(rows), generator=generator)
            limit = self.test_size if test else self.size
            groups[name] = rows[order[:limit]].sort().values
            free[groups[name]] = False
        return groups


def grouped(
    train: LabelledRows,
    test: LabelledRows,
    *,
    features: Sequence[str],
    labels: Sequence[str],
    groups: ConditionGroups,
) -> MultiLabel:
    """The data set of two parts, with the groups of each drawn."""
    # Of one-hot labels no row is without: a group of those would be empty in every such data set.
    unlabelled = any(bool((part.tensors[1] == 0).all(1).any()) for part in (train, test))
    return MultiLabel(
        train=train,
        test=test,
        features=tuple(features),
        labels=tuple(labels),
        train_groups=groups.draw(train.tensors[1], labels, test=False, unlabelled=unlabelled),
        test_groups=groups.draw(test.tensors[1], labels, test=True, unlabelled=unlabelled),
    )
