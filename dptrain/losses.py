"""Losses of sequences and classes that leave every example by itself.

The usual reductions divide by a number that the whole batch decides: the targets that are not
ignored, or their class weights. An example's gradient then depends on the others' lengths and
labels *before* it is clipped, and no clipping bounds what one example does. Here each example's own
tokens are reduced first, and only then is the mean or the sum over the examples taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["causal_cross_entropy", "reduce_examples", "token_cross_entropy"]

IGNORED = -100  # torch's and Hugging Face's mark of a token without a target


def reduce_examples(
    losses: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    within: str | float = "mean",
    reduction: str = "mean",
) -> torch.Tensor:
    """One loss an example, from one for each of its parts (tokens, labels, pixels), and reduced.

    Args:
        losses: shape (rows, ...), the examples in the first dimension.
        mask: of the same shape, or of its first dimensions; parts with 0 or ``False`` do not count.
            Numbers are weights. ``None``: all count.
        within: how an example's parts are reduced: ``"mean"`` over those that count (the weighted
            mean, for weights), ``"sum"``, or a positive number: the sum divided by it, a public
            constant such as the longest length.
        reduction: over the examples: ``"mean"``, ``"sum"`` or ``"none"``, which leaves them as
            they are, of shape (rows,). An example of which nothing counts is 0, and is counted.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    _check_choices(within, reduction)
    if losses.dim() == 0:
        raise ValueError(
            "losses has no dimension, so it is already reduced: compute it with reduction='none'"
        )
    if mask is None:
        examples = _own_sums(losses)
        if within == "mean":
            examples = examples / max(1, losses.shape[1:].numel())
    else:
        if mask.shape != losses.shape[: mask.dim()] or mask.dim() == 0:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} for losses of shape {tuple(losses.shape)}: "
                "must have the same shape, or its first dimensions"
            )
        weights = mask.to(losses)[(...,) + (None,) * (losses.dim() - mask.dim())]
        weights = weights.expand_as(losses)
        # 0 · inf is NaN: what does not count is taken out, not multiplied away.
        counted = torch.where(weights != 0, losses, 0.0) * weights
        examples = _own_sums(counted)
        if within == "mean":
            totals = _own_sums(weights)
            examples = examples / torch.where(totals == 0, torch.ones_like(totals), totals)
    if not isinstance(within, str):
        examples = examples / within
    if reduction == "none":
        return examples
    return examples.mean() if reduction == "mean" else examples.sum()


def token_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    within: str | float = "mean",
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of sequences, or of single labels, example by example.

    For masked language models and token classification, with the labels as Hugging Face has them.

    Args:
        logits: shape (rows, ..., classes): (rows, tokens, classes), or (rows, classes) for one
            label an example.
        labels: int64, shape (rows, ...); ``ignore_index`` where there is no target.
        weight: w, of the classes, shape (classes,): a token's loss is w_y times its cross entropy.
            Nothing is divided by weights, neither an example's nor, as torch does, the batch's.
        ignore_index: the label that does not count.
        label_smoothing: in [0, 1], as torch has it.
        within, reduction: as in ``reduce_examples``. ``within="mean"`` is over the example's
            own targets, and an example without any has loss 0.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if logits.dim() != labels.dim() + 1 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: "
            "must have the shape of the logits without the last dimension, the classes. If the "
            "classes are in dimension 1, use logits.movedim(1, -1)"
        )
    _check_choices(within, reduction)
    losses = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    ).view(labels.shape)
    return reduce_examples(losses, labels != ignore_index, within=within, reduction=reduction)


def causal_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    within: str | float = "mean",
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of a causal language model: the logits at a token are about the next one.

    Args:
        logits: shape (rows, tokens, classes), of a model that was *not* given the labels.
        labels: int64, shape (rows, tokens): the tokens themselves, not shifted, as Hugging Face
            has them; ``ignore_index`` where there is no target (padding, a prompt).
        weight, ignore_index, label_smoothing, within, reduction: as in
            ``token_cross_entropy``.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if logits.dim() != 3 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: "
            "must be (rows, tokens) for logits of shape (rows, tokens, classes)"
        )
    return token_cross_entropy(
        logits[:, :-1],
        labels[:, 1:],
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        within=within,
        reduction=reduction,
    )


class TokenCrossEntropy(nn.Module):
    """``token_cross_entropy``, or with ``shift`` ``causal_cross_entropy``, as a module.

    Args:
        class_weights: w, shape (classes,), a buffer; ``None``: all 1.
        ignored: the label that does not count.
        label_smoothing: in [0, 1].
        shift: whether the logits at a token are about the next one.
        within: ``"mean"``, ``"sum"`` or a positive number, over an example's own tokens.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` over the examples; ``Gradients(loss=...)``
            takes it from here.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    class_weights: torch.Tensor | None

    def __init__(
        self,
        class_weights: torch.Tensor | None = None,
        *,
        ignored: int = IGNORED,
        label_smoothing: float = 0.0,
        shift: bool = False,
        within: str | float = "mean",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        _check_choices(within, reduction)
        self.register_buffer("class_weights", class_weights)
        self.ignored, self.label_smoothing, self.shift = ignored, label_smoothing, shift
        self.within, self.reduction = within, reduction

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss; see the functions."""
        loss = causal_cross_entropy if self.shift else token_cross_entropy
        return loss(
            logits,
            labels,
            weight=self.class_weights,
            ignore_index=self.ignored,
            label_smoothing=self.label_smoothing,
            within=self.within,
            reduction=self.reduction,
        )


def _own_sums(parts: torch.Tensor) -> torch.Tensor:
    return parts.flatten(1).sum(1) if parts.dim() > 1 else parts


def _check_choices(within: str | float, reduction: str) -> None:
    if isinstance(within, bool) or not isinstance(within, str | int | float):
        raise TypeError(f"within={within!r}: must be 'mean', 'sum' or a positive number")
    if isinstance(within, str) and within not in ("mean", "sum"):
        raise ValueError(f"within={within!r}: must be 'mean', 'sum' or a positive number")
    if not isinstance(within, str) and not 0 < within < float("inf"):
        raise ValueError(f"within={within!r}: must be 'mean', 'sum' or a positive, finite number")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'")
