"""The loss of a model's head, reduced example by example, and whether a user's loss is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.auto import modeling_auto

from dptrain.core import in_float64
from dptrain.losses import causal_cross_entropy, reduce_examples, token_cross_entropy

_CAUSAL, _TOKENS, _CLASSES = "causal", "tokens", "classes"
_HEADS = (
    (_CLASSES, "SEQUENCE_CLASSIFICATION"),
    (_CLASSES, "IMAGE_CLASSIFICATION"),
    (_CLASSES, "AUDIO_CLASSIFICATION"),
    (_CLASSES, "VIDEO_CLASSIFICATION"),
    (_TOKENS, "TOKEN_CLASSIFICATION"),
    (_CAUSAL, "CAUSAL_LM"),
    (_TOKENS, "MASKED_LM"),
)
_REMEDY = (
    "override compute_loss(model, inputs, return_outputs=False, **_) or pass compute_loss_func=, "
    "and return the mean over the rows of one loss per row, as dptrain.losses.reduce_examples "
    "computes it"
)
_ROWS = 8  # of a batch on which a user's loss is looked at
_TIMES = 4  # batches with at least two examples


def bare(model: nn.Module) -> nn.Module:
    """The model within the adapters of peft."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def head_of(model: nn.Module) -> str:
    """The kind of head of a model, which says with which loss it is trained.

    Heads are refused whose loss is not known example by example.
    """
    model = bare(model)
    config = getattr(model, "config", None)
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model is a {name}, an encoder-decoder, for which dptrain has no loss that treats "
            f"each example by itself: {_REMEDY} (and make decoder_input_ids from the labels there)"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"model is a {name} with output_router_logits=True: its load-balancing loss counts the "
            "tokens of the whole batch, so each example's gradient depends on the others. Set "
            "model.config.output_router_logits = False"
        )
    classes = {base.__name__ for base in type(model).__mro__}
    heads = {head for head, task in _HEADS if classes & _classes_of(task)}
    if len(heads) == 1:
        return heads.pop()
    raise ValueError(
        f"model is a {name}, for which dptrain has no loss that treats each example by itself: "
        f"{_REMEDY}"
    )


def _classes_of(task: str) -> set[str]:
    names: Mapping[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    each = ({known} if isinstance(known, str) else set(known) for known in names.values())
    return set().union(*each)


def example_loss(
    head: str, model: nn.Module, logits: torch.Tensor, labels: torch.Tensor, *, smoothing: float
) -> torch.Tensor:
    """The mean over the rows of each row's own loss.

    Args:
        head: what ``head_of`` said.
        model: whose ``config`` says what kind of classes they are.
        logits: shape (rows, ..., classes).
        labels: as Hugging Face has them.
        smoothing: ``label_smoothing_factor``.
    """
    if head == _CAUSAL:
        return causal_cross_entropy(logits, labels, label_smoothing=smoothing)
    if head == _TOKENS:
        return token_cross_entropy(logits, labels, label_smoothing=smoothing)
    config: Any = getattr(bare(model), "config", None)
    problem = getattr(config, "problem_type", None)
    if problem is None:  # as transformers finds it
        whole = labels.dtype in (torch.long, torch.int)
        single = "single_label_classification" if whole else "multi_label_classification"
        problem = "regression" if logits.shape[-1] == 1 else single
    if problem == "regression":
        targets = labels.to(logits.dtype).view(logits.shape)
        return reduce_examples(F.mse_loss(logits, targets, reduction="none"))
    if problem == "multi_label_classification":
        targets = labels.to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return reduce_examples(losses)
    return token_cross_entropy(logits, labels.view(-1), label_smoothing=smoothing)


class LossCheck:
    """A check that a loss function gives a few rows together what it gives each of them alone.

    A mean over rows of one loss for each does. A mean over the tokens of the batch, a contrast of
    rows or a loss with weights of the whole batch does not, unless the rows happen to be alike: it
    is looked at on several batches.

    Args:
        loss: as ``compute_loss_func``, of the outputs and the labels.
        reduction: ``"mean"`` or ``"sum"`` over the rows.
        called: what the user knows the loss as.
    """

    def __init__(
        self, loss: Callable[..., torch.Tensor], reduction: str, called: str = "compute_loss_func"
    ) -> None:
        self._loss, self._reduction, self._called = loss, reduction, called
        self._left = _TIMES

    @torch.no_grad()
    def look_at(self, outputs: Any, labels: Any, rows: int) -> None:
        """Look at some rows of a batch, while it has not been seen often enough.

        Args:
            labels: tensors, or a mapping or sequence of them.
            rows: how many rows of the batch are examples.
        """
        few = min(rows, _ROWS)
        if self._left <= 0 or few < 2:
            return
        self._left -= 1
        total = _rows_of(labels)
        alone = torch.stack(
            [in_float64(self._of(outputs, labels, slice(k, k + 1), total)) for k in range(few)]
        )
        together = in_float64(self._of(outputs, labels, slice(0, few), total))
        expected = alone.mean() if self._reduction == "mean" else alone.sum()
        found = torch.finfo(_dtype_of(outputs)).eps
        close = torch.isclose(together, expected, rtol=64 * found, atol=64 * found)
        if not close and bool(torch.isfinite(alone).all()):
            raise RuntimeError(
                f"{self._called} for {few} examples together does not give the {self._reduction} "
                "of its values for each example alone. Like a mean over all tokens, it ties the "
                "examples of a batch together, so clipping does not bound the influence of one "
                "example. Reduce each example by itself first, for instance with "
                "dptrain.losses.reduce_examples"
            )

    def _of(self, outputs: Any, labels: Any, some: slice, total: int) -> torch.Tensor:
        chosen = _chosen(outputs, some, total)
        return self._loss(chosen, _chosen(labels, some, total), num_items_in_batch=None).float()


def _rows_of(value: Any) -> int:
    for leaf in _leaves(value):
        return len(leaf)
    return 0


def _dtype_of(value: Any) -> torch.dtype:
    return next((v.dtype for v in _leaves(value) if v.is_floating_point()), torch.float32)


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return []


def _chosen(value: Any, some: slice, total: int) -> Any:
    """Some rows of whatever has as many rows as the batch."""
    if isinstance(value, torch.Tensor):
        return value[some].detach() if value.dim() and len(value) == total else value
    if isinstance(value, Mapping):
        made = {key: _chosen(item, some, total) for key, item in value.items()}
        return (
            type(value)(**made) if not isinstance(value, dict) or type(value) is not dict else made
        )
    if isinstance(value, tuple):
        return tuple(_chosen(item, some, total) for item in value)
    if isinstance(value, list):
        return [_chosen(item, some, total) for item in value]
    return value
