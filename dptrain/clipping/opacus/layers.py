"""The layers that Opacus's rules alone would treat wrongly, and the inputs that these get."""

from __future__ import annotations

import functools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.layers.dp_rnn import DPGRU, DPLSTM, DPRNN, DPRNNBase
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from dptrain.clipping.bookkeeping.rules.normalization import over_positions

_REENTRANT = checkpoint.CheckpointFunction.backward.__code__
_OTHER = ("recompute_fn", checkpoint.__file__)
_HOLDERS = (DPRNN, DPLSTM, DPGRU)  # get no hooks: their parameters are those of layers inside


def layer_norm_gradients(
    layer: nn.LayerNorm, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[nn.Parameter, torch.Tensor]:
    """Per-example gradients of a LayerNorm, which may have no bias; Opacus's signature.

    Args:
        activations: its input, shape (rows, ..., *normalized_shape).
        backprops: gradient of the loss by its output, of the same shape.

    Returns:
        Shape (rows, *normalized_shape) for each trainable parameter.
    """
    found: dict[nn.Parameter, torch.Tensor] = {}
    if layer.weight.requires_grad:
        normalized = nn.functional.layer_norm(activations[0], layer.normalized_shape, eps=layer.eps)
        found[layer.weight] = over_positions(layer, normalized * backprops)
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = over_positions(layer, backprops)
    return found


class OpacusLayers(GradSampleHooks):
    """Mixin before Opacus's modules: layers are found once, and rules see what they expect.

    Opacus walks through the tree of modules and gives a layer that two modules hold two hooks, so
    that all its calls count twice. Its rule for convolutions takes images for contiguous, and its
    rules for embeddings do not know ``padding_idx``, as torch's own gradients do.
    """

    GRAD_SAMPLERS: ClassVar[Mapping[type[nn.Module], Callable[..., Any]]] = ChainMap(
        {nn.LayerNorm: layer_norm_gradients}, GradSampleHooks.GRAD_SAMPLERS
    )

    def __init__(self, m: nn.Module, **kwargs: Any) -> None:
        super().__init__(m, **kwargs)
        self._one_id_each: set[nn.Module] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's module."""
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            if "created inside a custom Function" not in str(error):
                raise
            layers = [n for n, m in self._module.named_modules() if getattr(m, "inplace", False)]
            named = f" (layers with inplace=True: {layers})" if layers else ""
            raise RuntimeError(
                "a layer's output is modified in place, which torch forbids for outputs with "
                f"hooks{named}: use inplace=False, replace h += x by h = h + x, clone h before "
                "assigning to a part of it, or use Gradients(mode='bookkeeping')"
            ) from error

    def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
        """The layers that get hooks, each once."""
        found = dict.fromkeys(super().iterate_submodules(module))  # calls this for the children
        names = {layer: name for name, layer in self._module.named_modules()}
        for layer in found:
            if type(layer) in self.GRAD_SAMPLERS or type(layer) in _HOLDERS:
                continue
            for inner in layer.modules():
                if inner is not layer and inner in found:
                    raise ValueError(
                        f"layer {names[inner]!r} is a part of {names[layer]!r}, a "
                        f"{type(layer).__name__} with parameters of its own, and also of another "
                        "module, so its gradients would be counted twice. Move the parameters "
                        f"of {names[layer]!r} into a module of their own, or use a separate "
                        "layer in each place"
                    )
        yield from found

    def refuse_shared_ids(self, module: nn.Module, rows: int) -> None:
        """Refuse an embedding's call on positions that all examples share, one for each row.

        Row i would hold the gradient of position i from all examples, clipped as if it were that of
        example i: every row changes with one example. A layer that was called on as many ids that
        do not follow one another has one an example, and may have any from then on.
        """
        if type(module) is not nn.Embedding or module in self._one_id_each:
            return
        calls: Any = module.activations
        ids = calls[-1][0]
        if ids.dim() != 1 or len(ids) != rows or rows == 1:
            return
        if not bool((ids.diff() == 1).all()):
            self._one_id_each.add(module)
            return
        raise RuntimeError(
            f"an embedding looks up {rows} consecutive ids in a batch of {rows} rows, which may be "
            "positions that all examples share or one id per example. Give positions the shape of "
            "the batch, ids[None].expand(rows, -1), and ids of the examples the shape (rows, 1)"
        )

    def rearrange_grad_samples(
        self, *, module: nn.Module, backprops: torch.Tensor, loss_reduction: str, batch_first: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The input of a layer's call and the gradient of its output, as its rule needs them.

        Inputs are made contiguous, and an embedding's padding, which torch does not train, has no
        gradients. Where output gradients lie in memory is nothing that Opacus's rules depend on.
        """
        activations, backprops = super().rearrange_grad_samples(
            module=module,
            backprops=backprops,
            loss_reduction=loss_reduction,
            batch_first=batch_first,
        )
        if type(module) is nn.Embedding and module.padding_idx is not None:
            padding = activations[0] == module.padding_idx
            backprops = backprops.masked_fill(padding[..., None], 0)
        return [a.contiguous() for a in activations], backprops


def refuse_reordered_rows(module: nn.Module) -> list[RemovableHandle]:
    """Make recurrent layers refuse packed sequences that were sorted by length on the way in.

    ``pack_padded_sequence(..., enforce_sorted=False)`` sorts the rows for the recurrent layer only.
    Its per-example gradients are then in that order and those of all other layers in the batch's,
    so that "row i" is made of two examples: clipped to R, removing one example moves the sum by up
    to 2R (measured: 1.4R), and an individual filter charges the wrong one.
    """

    def check(name: str, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        packed = inputs[0] if inputs else named.get("input")
        if not (layer.training and torch.is_grad_enabled() and isinstance(packed, PackedSequence)):
            return
        order = packed.sorted_indices
        if order is None or torch.equal(order.cpu(), torch.arange(len(order))):
            return
        raise RuntimeError(
            f"layer {name!r} is called on a packed sequence with enforce_sorted=False, which "
            "reorders the rows for this layer only, so per-example gradients would mix "
            "examples. Use padded tensors, or, without an individual filter, let collate_fn "
            "sort the rows by length and pack them with enforce_sorted=True"
        )

    return [
        layer.register_forward_pre_hook(functools.partial(check, name), with_kwargs=True)
        for name, layer in module.named_modules()
        if isinstance(layer, DPRNNBase)
    ]


def recomputation() -> Literal["reentrant", "non-reentrant"] | None:
    """Kind of ``torch.utils.checkpoint`` that runs this layer anew in a backward pass, or ``None``.

    The non-reentrant kind has run it with gradients before, and differentiates that pass: what is
    computed anew only fills in what was not kept. The reentrant kind has run it without, and
    differentiates the new pass. Of several, one within the other, it is the innermost.

    torch does not say so, but its stack does.
    """
    if torch._C._current_graph_task_id() == -1:  # no backward pass is under way
        return None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _REENTRANT:
            return "reentrant"
        if (code.co_name, code.co_filename) == _OTHER:
            return "non-reentrant"
        frame = frame.f_back  # type: ignore[assignment]
    return None
