"""Per-example gradient norms of a linear layer from its inputs and output gradients, rounded up."""

from __future__ import annotations

import torch
from torch import nn

from dptrain.clipping.weights import row_norms

# Rounding errors of a Gram sum, in units of S² and of the unit roundoff, are below 4.2 (measured:
# up to 1024 positions and 4096 features; random, equal, positive, cancelling, of unequal lengths).
_ROUNDING = 16.0


def linear_norms(
    layer: nn.Linear, activations: list[torch.Tensor], backprops: torch.Tensor
) -> dict[torch.Tensor, torch.Tensor]:
    """Norms of the per-example gradients of weight and bias, never too small; Opacus's signature.

    With positions t, inputs a_t and output gradients b_t the gradient of the weight is Σ b_t a_tᵀ,
    its square is Σ_{s,t} ⟨a_s, a_t⟩⟨b_s, b_t⟩ (ghost clipping). Where positions cancel, this
    difference of large numbers comes out anywhere between 0 and its rounding error, which is of the
    order of S² u with S = Σ_t ‖a_t‖‖b_t‖ and u = 6e-8 in float32: a gradient of norm S/4000 may
    look like 0, and be neither clipped nor charged for. So the error is added to the square.
    Without cancellation that is a few 1e-6 of the norm (1e-4 for 500 positions).

    Args:
        layer: the layer.
        activations: its input, shape (rows, in) or (rows, positions, in).
        backprops: gradient of the loss by its output, shape (rows, out) or (rows, positions, out).

    Returns:
        Shape (rows,) for each trainable parameter; nothing for inputs of more dimensions.
    """
    inputs = activations[0].to(backprops.dtype)
    if backprops.dim() not in (2, 3):
        return {}
    found: dict[torch.Tensor, torch.Tensor] = {}
    if layer.weight.requires_grad:
        found[layer.weight] = _weight_norms(inputs, backprops)
    if layer.bias is not None and layer.bias.requires_grad:
        found[layer.bias] = _bias_norms(backprops)
    return found


def _weight_norms(inputs: torch.Tensor, backprops: torch.Tensor) -> torch.Tensor:
    if backprops.dim() == 2:
        return row_norms(inputs) * row_norms(backprops)
    lengths = _lengths(inputs) * _lengths(backprops)
    gram = torch.einsum("ntk,nsk->nts", backprops, backprops)
    gram *= torch.einsum("ntj,nsj->nts", inputs, inputs)
    # One dimension after the other: torch sums T² numbers at once less exactly than T times T.
    squares = gram.sum(2).sum(1).clamp(min=0)
    return (squares + _ROUNDING * _unit(backprops) * lengths.sum(1).square()).sqrt()


def _bias_norms(backprops: torch.Tensor) -> torch.Tensor:
    if backprops.dim() == 2:
        return row_norms(backprops)
    # A sum, as the release has it, but perhaps in another order.
    error = _ROUNDING * _unit(backprops) * _lengths(backprops).sum(1)
    return row_norms(backprops.sum(1)) + error


def _lengths(vectors: torch.Tensor) -> torch.Tensor:
    """Norms of the vectors at every position, shape (rows, positions)."""
    return row_norms(vectors.flatten(0, 1)).view(vectors.shape[:2])


def _unit(tensor: torch.Tensor) -> float:
    """The unit roundoff u of the tensor's dtype."""
    return torch.finfo(tensor.dtype).eps / 2
