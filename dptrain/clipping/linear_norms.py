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
    return outer_norms(backprops, inputs)


def outer_norms(left: torch.Tensor, right: torch.Tensor, most: int = 2**24) -> torch.Tensor:
    """Ghost norms ‖Σ_t l_t r_tᵀ‖ of every row, shape (rows,), rounded up.

    Args:
        left: l, shape (rows, positions, m).
        right: r, shape (rows, positions, n).
        most: numbers in the Gram matrices that are held at a time.
    """
    rows, positions = left.shape[:2]
    if positions == 1:
        return rank_one_norms(row_norms(left[:, 0]), row_norms(right[:, 0]))
    lengths = (_lengths(left) * _lengths(right)).sum(1)
    step = max(1, most // (2 * positions**2))
    found = []
    for start in range(0, rows, step):
        some_left, some_right = left[start : start + step], right[start : start + step]
        gram = torch.bmm(some_left, some_left.transpose(1, 2))
        gram *= torch.bmm(some_right, some_right.transpose(1, 2))
        # One dimension after the other: torch sums T² numbers at once less exactly than T times T.
        found.append(gram.sum(2).sum(1))
    squares = torch.cat(found).clamp(min=0) if found else lengths
    return (squares + rounding(left, lengths)).sqrt()


def rank_one_norms(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Norms ‖l rᵀ‖ of every row from ‖l‖ and ‖r‖, all of shape (rows,), rounded up."""
    return (left * right).mul_(1 + _ROUNDING * _unit(left))


def rounding(tensor: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What the square of a norm may have lost in a Gram sum.

    Args:
        tensor: of the dtype that was computed in.
        lengths: S, for every row the sum of the lengths of what was added up, shape (rows,).
    """
    return _ROUNDING * _unit(tensor) * lengths.square()


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
