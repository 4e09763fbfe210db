"""The macro-averaged area under the ROC curve: the measure of multi-label tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
from sklearn.metrics import roc_auc_score


@dataclasses.dataclass(frozen=True)
class MacroAUC:
    """Areas under the ROC curve, label by label.

    Attributes:
        by_label: name to area, of the labels that have one. It is the probability that an example
            with the label is scored above one without, ties counted half; NaN if a score is NaN or
            infinite.
        left_out: labels that all examples have, or none; no area is defined for them.
    """

    by_label: Mapping[str, float]
    left_out: tuple[str, ...]

    @property
    def mean(self) -> float:
        """The plain mean over the labels that have an area."""
        return math.fsum(self.by_label.values()) / len(self.by_label)


def single_class(labels: torch.Tensor, names: Sequence[str]) -> tuple[str, ...]:
    """The labels that all examples have, or none.

    Args:
        labels: 0 or 1, (examples, L).
        names: of the L labels.

    Raises:
        ValueError: if that is so for every label.
    """
    constant = (labels == labels[:1]).all(0).tolist()
    if all(constant):
        raise ValueError(
            f"no label is 1 for some and 0 for others of the {len(labels)} examples: the area "
            "under the ROC curve is not defined; use more examples"
        )
    return tuple(name for name, same in zip(names, constant, strict=True) if same)


def macro_auc(scores: torch.Tensor, labels: torch.Tensor, names: Sequence[str]) -> MacroAUC:
    """The areas of all labels.

    Args:
        scores: (examples, L), larger where the label is likelier; logits will do.
        labels: 0 or 1, (examples, L).
        names: of the L labels.

    Raises:
        ValueError: if the shapes differ, or no label has an area.
    """
    if scores.shape != labels.shape:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} and labels of shape {tuple(labels.shape)}: "
            "give one score a label"
        )
    left_out = single_class(labels, names)
    areas = {}
    for index, name in enumerate(names):
        if name in left_out:
            continue
        column = scores[:, index].double()
        areas[name] = (
            float(roc_auc_score(labels[:, index].cpu().numpy(), column.cpu().numpy()))
            if column.isfinite().all()
            else math.nan
        )
    return MacroAUC(areas, left_out)
