"""Clipped sums by ghost clipping: norms in a first backward pass, the sum in a second one."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
from opacus.grad_sample.grad_sample_module import (
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from opacus.layers.dp_rnn import RNNLinear
from opacus.utils.module_utils import trainable_parameters
from torch import nn

from dptrain.clipping.graph import parameter_uses
from dptrain.clipping.linear_norms import linear_norms
from dptrain.clipping.opacus_layers import OpacusLayers, prepared
from dptrain.clipping.packed_rows import refuse_reordered_rows
from dptrain.clipping.weights import HALF, check_rows, row_norms
from dptrain.sampling import MicroBatch


class GhostModule(OpacusLayers, GradSampleModuleFastGradientClipping):
    """Opacus's ghost-clipping module, with non-finite examples cut out of the second pass.

    A zero factor does not remove an example whose activations hold NaN, because the second pass
    multiplies: 0 · NaN is NaN. When such an example turns up, the second pass runs with hooks that
    form each layer's sum from masked activations and masked output gradients. The activations kept
    for this are dropped as soon as all examples of the batch are known to be finite.

    The second pass is autograd's and takes in every use of a parameter, but norms only cover the
    uses that the hooks see, and ``F.linear(h, self.embedding.weight)`` is not one of them. A batch
    with a use that no norm covers is refused: its clipped sum would not be bounded by R an example.
    For a layer without a rule, Opacus gets per-example gradients by calling a copy of the layer on
    its first input; other inputs are lost there. Its sums are formed the same way as its norms.
    """

    # Opacus's norms of linear layers may come out far too small; see linear_norms.
    NORM_SAMPLERS: ClassVar[Mapping[type[nn.Module], Any]] = ChainMap(
        {nn.Linear: linear_norms}, GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    )

    at_hand: Callable[[], MicroBatch | None] = staticmethod(lambda: None)
    since: MicroBatch | None = None  # what was at hand in the forward pass

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        super().__init__(m, **kwargs)
        self._kept: dict[nn.Module, list[list[torch.Tensor]]] = {}
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self._finite: torch.Tensor | None = None
        self._rows = 0
        self._uses: set[tuple[Any, Any]] = set()
        self._names = {p: name for name, p in m.named_parameters()}
        self.autograd_grad_sample_hooks.extend(refuse_reordered_rows(m))

    def first_pass(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """Norms ‖g_i‖₂ of the per-example gradients of ``loss``, shape (rows,).

        Raises:
            RuntimeError: if they do not cover all that the loss does with the parameters.
        """
        self._kept.clear()
        self._rows = rows
        used = parameter_uses(loss.grad_fn)
        self._refuse(
            [node.variable for source, node in used if (source, node) not in self._uses],
            "outside the training-mode call of the layer that owns it (tied through "
            "torch.nn.functional, layer.forward(x), or a layer in eval mode)",
        )
        self._uses.clear()
        for p in self.trainable_parameters:
            p.grad_sample = None  # Opacus 1.5 deletes the attribute, then looks for it
        loss.backward(retain_graph=True)
        self._refuse(
            [n.variable for _, n in used if n.variable in self._names and _uncovered(n.variable)],
            "by several layers or calls that ghost norms cannot add up, or by a call that is no "
            "part of the loss",
        )
        seen = [p for p in self.trainable_parameters if hasattr(p, "_norm_sample")]
        if not seen:
            raise RuntimeError(
                "no per-example gradients: compute the loss from the private module's output, "
                "with the module in training mode"
            )
        parts = [p._norm_sample.flatten() for p in seen]
        for part in parts:
            check_rows(len(part), rows)
        for p in seen:  # a layer that takes no part next time must not leave its old norm behind
            del p._norm_sample
        return row_norms(torch.stack([part.to(parts[0].device) for part in parts], dim=1))

    def second_pass(self, loss: torch.Tensor, finite: torch.Tensor) -> None:
        """Leave in ``p.grad`` the gradient of ``loss``, without the examples not ``finite``."""
        whole = bool(finite.all())
        if whole:
            unruled = {p for m in self._kept if not self._has_rule(m) for p in m.parameters()}
            self._kept = {
                m: kept for m, kept in self._kept.items() if not unruled.isdisjoint(m.parameters())
            }
        if not self._kept:
            self.disable_hooks()
        self._finite = finite
        try:
            loss.backward()
            for p in self.trainable_parameters:
                p.grad = self._sums.get(p, p.grad if whole else None)
        finally:
            self.enable_hooks()
            self._forget()

    def _has_rule(self, module: nn.Module) -> bool:
        """Whether per-example gradients come from a formula and not from calling it again."""
        return type(module) in self.NORM_SAMPLERS or type(module) in self.GRAD_SAMPLERS

    def _forget(self) -> None:
        self._kept, self._sums, self._finite = {}, {}, None
        for layer in self._module.modules():  # calls whose output the loss did not need
            if hasattr(layer, "activations"):
                layer.activations = []
        for p in self.trainable_parameters:
            p._forward_counter = 0

    def _refuse(self, parameters: list[nn.Parameter], why: str) -> None:
        names = sorted({self._names[p] for p in parameters if p in self._names})
        if names:
            raise RuntimeError(
                f"parameter(s) {names} are used {why}: ghost clipping cannot bound such a "
                "gradient; use grad_sample_mode='hooks', or a layer with its own weight for every "
                "use"
            )

    def capture_activations_hook(
        self, module: nn.Module, forward_input: Any, forward_output: Any
    ) -> None:
        """Keep the layer's input, and note where the layer's own parameters enter the graph."""
        self.since = self.at_hand()
        before = len(getattr(module, "activations", ()))
        try:
            super().capture_activations_hook(module, forward_input, forward_output)
        except NotImplementedError:
            self._refuse(list(module.parameters()), "in two training-mode calls")
            raise
        if len(getattr(module, "activations", ())) == before:
            return  # a call that the hooks leave out
        own = set(module.parameters())  # Opacus differentiates a layer with all that is inside it
        inputs = {t.grad_fn for t in forward_input if isinstance(t, torch.Tensor)}
        outputs = forward_output if isinstance(forward_output, tuple | list) else [forward_output]
        for output in outputs:
            if isinstance(output, torch.Tensor):
                uses = parameter_uses(output.grad_fn, stop=inputs)
                self._uses.update(use for use in uses if use[1].variable in own)

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Any,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """First pass: norms. Second pass, if an example is not finite: sums without it."""
        if not self.hooks_enabled:
            return
        if self._finite is not None:
            if module not in self._kept:
                return
            self._sum_finite(module, forward_output[0].detach(), self._finite)
            return
        if forward_output[0].dtype in HALF:
            raise RuntimeError(
                f"{type(module).__name__} computes in {forward_output[0].dtype} (torch.autocast): "
                "ghost norms would be rounded to it, and gradients exceed R and what an individual "
                "filter charges for them; use grad_sample_mode='hooks', or leave autocast out"
            )
        # Calls are added up row by row: one on a row that all examples share would be no one's.
        if not isinstance(module, RNNLinear):
            check_rows(len(forward_output[0]), self._rows)
        self.refuse_shared_ids(module, self._rows)
        activations: Any = module.activations
        self._kept.setdefault(module, []).append(activations[-1])
        if type(module) in self.NORM_SAMPLERS:
            super().capture_backprops_hook(
                module, _forward_input, forward_output, loss_reduction, batch_first
            )
        else:
            self._norms_of_gradients(module, forward_output[0].detach(), loss_reduction)

    def _norms_of_gradients(
        self, module: nn.Module, backprops: torch.Tensor, loss_reduction: str
    ) -> None:
        """As Opacus does it, but with norms of long gradients that are not too small."""
        activations, backprops = self.rearrange_grad_samples(
            module=module, backprops=backprops, loss_reduction=loss_reduction, batch_first=True
        )
        for p, g in self._sampler(module)(module, activations, backprops).items():
            create_or_accumulate_grad_sample(
                param=p, grad_sample=g, max_batch_len=module.max_batch_len
            )
        for _, p in trainable_parameters(module):
            p._forward_counter -= 1
            if p._forward_counter == 0:  # the last of the layer's calls
                promote_current_grad_sample(p)
                p._norm_sample = row_norms(p.grad_sample.flatten(1))
                p.grad_sample = None
        if not module.activations and hasattr(module, "max_batch_len"):
            del module.max_batch_len

    def _sampler(self, module: nn.Module) -> Any:
        """What computes per-example gradients of one call of a layer."""
        if self.force_functorch:
            return ft_compute_per_sample_gradient
        return self.GRAD_SAMPLERS.get(type(module), ft_compute_per_sample_gradient)

    def _sum_finite(self, module: nn.Module, backprops: torch.Tensor, finite: torch.Tensor) -> None:
        # Both passes walk the graph in the same order, so uses of a layer match first to first.
        activations = [_masked(a, finite) for a in self._kept[module].pop(0)]
        activations, backprops = prepared(module, activations, _masked(backprops, finite))
        found = self._sampler(module)(module, activations, backprops)
        for p, g in found.items():
            total = g.sum(dim=0)
            self._sums[p] = self._sums[p] + total if p in self._sums else total


def _uncovered(p: nn.Parameter) -> bool:
    """Whether the first pass left a norm of ``p`` unfinished."""
    unfinished = p._forward_counter != 0 or hasattr(p, "_current_grad_sample")  # type: ignore[attr-defined]
    return p.requires_grad and (unfinished or not hasattr(p, "_norm_sample"))


def _masked(value: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """``value`` with zeros in the rows of examples that are not finite."""
    if not value.is_floating_point() or len(value) != len(finite):
        return value
    keep = finite.to(value.device).view(-1, *[1] * (value.dim() - 1))
    return torch.where(keep, value, value.new_zeros(()))
