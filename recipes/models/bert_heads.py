"""Training tasks of a BERT: batches of token rows, and one loss for every example.

Every loss is a function of its own example alone. The usual masked-language loss is not: it divides
by the number of masked tokens of the *batch*, so that one example changes the weight of all others,
and clipping its own gradient no longer bounds what it does to the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dptrain.losses import IGNORED, token_cross_entropy

Batch = dict[str, torch.Tensor]
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
SCORED = "scored_positions"
MASKED_SHARE = 0.15
HIDDEN, RANDOM = 0.8, 0.1  # of the masked positions; the rest keeps its token


def forward(module: nn.Module, batch: Batch) -> torch.Tensor:
    """Logits: (rows, length, vocabulary) or (rows, classes), by the model's head.

    Of a batch that names the positions to score, (rows, positions, vocabulary).
    """
    inputs = {name: batch[name] for name in (*INPUTS, SCORED) if name in batch}
    logits: torch.Tensor = module(**inputs).logits
    return logits


def target(batch: Batch) -> torch.Tensor:
    """The targets that the criterion compares the logits with."""
    return batch["labels"]


class RowLoss(nn.Module):
    """A criterion made of one loss per row; ``reduction`` is ``"mean"``, ``"sum"``, ``"none"``."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One loss per row, shape (rows,)."""
        raise NotImplementedError

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The losses, reduced over the rows."""
        losses = self.rows(logits, labels)
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


class MaskedTokenLoss(RowLoss):
    """Mean cross entropy over the row's own masked positions; 0 for a row without one."""

    def rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses of logits (rows, length, vocabulary), with labels (rows, length)."""
        return token_cross_entropy(logits, labels, reduction="none")


class ClassLoss(RowLoss):
    """Cross entropy of the row's class."""

    def rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Losses of logits (rows, classes), with labels (rows,)."""
        return cross_entropy(logits, labels, reduction="none")


def masked_token_metrics(logits: torch.Tensor, batch: Batch) -> Batch:
    """``loss`` and ``accuracy`` of every row, over its own masked positions; 0 where none is."""
    labels = batch["labels"]
    hits = (logits.argmax(-1) == labels) & (labels != IGNORED)
    share = hits.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)
    return {"loss": MaskedTokenLoss().rows(logits, labels), "accuracy": share}


def class_metrics(logits: torch.Tensor, batch: Batch) -> Batch:
    """``loss`` and ``accuracy`` (0 or 1) of every row."""
    labels = batch["labels"]
    hits = (logits.argmax(-1) == labels).to(logits.dtype)
    return {"loss": ClassLoss().rows(logits, labels), "accuracy": hits}


def _stacked(samples: Sequence[Any], column: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([sample[column] for sample in samples])).long()


def class_batch(samples: Sequence[Any]) -> Batch:
    """Collate function for classification: int64 inputs (rows, length) and labels (rows,)."""
    batch = {name: _stacked(samples, name) for name in INPUTS}
    return {**batch, "labels": _stacked(samples, "label")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskTokens:
    """Collate function for masked language modelling: int64 inputs and labels, (rows, length).

    Every token of text is masked with probability 15 %, and in a row where none is, one of them,
    drawn uniformly. Of the masked, 80 % show the mask token, 10 % a token drawn uniformly from the
    vocabulary, 10 % themselves (Devlin et al. 2019). Labels are ``IGNORED`` elsewhere. All is
    drawn from torch's global generator, which the private loader seeds for every batch.

    Scores of a whole vocabulary are most of what a small model costs, and only masked positions
    have a loss. With ``most`` the batch names them: ``scored_positions`` and ``labels`` are
    (rows, most), or (rows, length) where that is less, and rows of fewer are filled up with
    position 0 and ``IGNORED``. The number is the same in every row and batch, so that a row's
    shapes tell nothing of the others.

    Args:
        mask_id: the mask token.
        vocabulary: number of tokens.
        special_ids: tokens that are never masked.
        most: masked tokens of a row at most; of more, as many, each subset being as likely.
            ``None``: any number, and the head scores every position.

    Raises:
        ValueError: if ``most`` is below 1.
    """

    mask_id: int
    vocabulary: int
    special_ids: tuple[int, ...]
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ValueError(f"most={self.most}: must be at least 1, or None")

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """The batch."""
        batch = {name: _stacked(samples, name) for name in INPUTS}
        ids = batch["input_ids"]
        special = torch.isin(ids, torch.tensor(self.special_ids, dtype=ids.dtype))
        text = (batch["attention_mask"] == 1) & ~special
        draw = torch.rand(ids.shape).masked_fill(~text, torch.inf)
        # A row's smallest draw is masked as well: where all are above the share, it is uniform.
        least = draw.argmin(1, keepdim=True)
        masked = ((draw < MASKED_SHARE) | torch.zeros_like(text).scatter(1, least, True)) & text
        positions = None
        if self.most is not None:
            # The smallest draws of what is masked: given which those are, any subset is as likely.
            order = draw.masked_fill(~masked, torch.inf).argsort(1)[:, : self.most]
            kept = masked.gather(1, order)
            masked = torch.zeros_like(masked).scatter(1, order, kept)
            positions = torch.where(kept, order, 0)
        shown = torch.rand(ids.shape)
        anything = torch.randint(self.vocabulary, ids.shape)
        replaced = torch.where(shown < HIDDEN, self.mask_id, anything)
        batch["input_ids"] = torch.where(masked & (shown < HIDDEN + RANDOM), replaced, ids)
        if positions is None:
            batch["labels"] = torch.where(masked, ids, IGNORED)
        else:
            batch[SCORED] = positions
            batch["labels"] = torch.where(kept, ids.gather(1, positions), IGNORED)
        return batch
