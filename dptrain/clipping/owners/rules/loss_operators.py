"""Losses, of which a mean may divide by what the whole batch holds."""

from __future__ import annotations

import torch

from dptrain.clipping.owners.maps import join, join_all, join_along, shared
from dptrain.clipping.owners.rules.along import without
from dptrain.clipping.owners.rules.calls import Call, Map, names, rule

_LOSSES = names("""
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss l1_loss kl_div
    binary_cross_entropy_with_logits
""")


@rule(*_LOSSES)
def loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Element by element, and all of them if they are reduced."""
    each = join(*call.maps())
    return [join_all(each) if call["reduction"] else each]


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by target; the total weight is all targets', where they are not alike in it."""
    self, target = call.map("self"), call.map("target")
    classes = min(1, self.dim() - 1)
    each = without(join_along(self, [classes]), [classes])
    each = join(each, target, join_all(call.map("weight")))
    reduction = call["reduction"]
    total = shared(())
    counts_all = call["weight"] is None and not bool((call["target"] == call["ignore_index"]).any())
    if reduction == 1 and not counts_all:
        total = join_all(target)
    return [join_all(each) if reduction else each, total]


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by target."""
    classes = min(1, results[0].dim() - 1)
    grad, target = call.map("grad_output"), call.map("target")
    if not target.dim():
        return [join(*(join_all(m) for m in call.maps(but=("self",))))]
    if grad.dim():
        grad = grad.unsqueeze(classes)
    total = call.map("total_weight") if call["reduction"] == 1 else shared(())
    weight = join_all(call.map("weight"))
    return [join(grad, target.unsqueeze(classes), weight, join_all(total))]


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def margin_loss(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by row."""
    self, target = call.map("self"), call.map("target")
    rows = join_along(self, [-1]).squeeze(-1) if self.dim() else self
    marks = join_along(target, [-1]).squeeze(-1) if target.dim() > rows.dim() else target
    if self.dim() == 1:
        rows, marks = join_all(self), join_all(target)
    each = join(rows, marks, join_all(call.map("weight")) if call.has("weight") else shared(()))
    found = [join_all(each) if call["reduction"] else each]
    inner = join(join_along(self, [-1]), join_along(target, [-1])) if len(results) > 1 else each
    return [*found, *(inner for _ in results[1:])]


@rule("multi_margin_loss_backward", "multilabel_margin_loss_backward")
def margin_loss_backward(call: Call, results: list[torch.Tensor]) -> list[Map]:
    """Owners by row."""
    self, target, grad = (call.map(n) for n in ("self", "target", "grad_output"))
    if self.dim() < 2:
        return [join(*(join_all(m) for m in call.maps()))]
    rows = [join_along(self, [1]), target if target.dim() > 1 else target.unsqueeze(1)]
    rows = [rows[0], join_along(rows[1], [1])]
    if call.has("is_target"):
        rows.append(join_along(call.map("is_target"), [1]))
    weight = join_all(call.map("weight")) if call.has("weight") else shared(())
    return [join(*rows, grad.unsqueeze(1) if grad.dim() else grad, weight)]
