"""Norms of the sum of all uses of a parameter."""

from __future__ import annotations

import torch

from dptrain.clipping.bookkeeping.gathered import Gathered
from dptrain.clipping.bookkeeping.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses import Materialised, Use, chunked_norms, chunks
from dptrain.clipping.linear_norms import rounding
from dptrain.clipping.rows import row_norms


def merge(uses: list[Use]) -> list[Use]:
    """The same sum with as few uses as their forms allow."""
    merged: list[Use] = []
    for use in uses:
        for k, other in enumerate(merged):
            together = other.merged(use)
            if together is not None:
                merged[k] = together
                break
        else:
            merged.append(use)
    return merged


def norms_of_sum(uses: list[Use]) -> torch.Tensor:
    """‖Σ_u g_i^u‖₂, shape (rows,), without the gradients themselves where that can be.

    Args:
        uses: of one parameter.
    """
    uses = merge(uses)
    if len(uses) == 1:
        return uses[0].norms()
    table = next((use for use in uses if isinstance(use, Gathered)), None)
    others = [use for use in uses if use is not table]
    if table is None or len(others) > 1 or not isinstance(others[0], OuterProducts | Materialised):
        return chunked_norms(uses)
    return _with_table(table, others[0])


def _with_table(table: Gathered, other: OuterProducts | Materialised) -> torch.Tensor:
    """Norms for weights tied between an embedding and an output layer.

    ‖E + H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩, and the inner product only needs the rows of H that E has.
    """
    first, second = table.norms(), other.norms()
    if isinstance(other, OuterProducts):
        inner, lengths = _inner_outer(table, other)
    else:
        rows = torch.arange(table.rows, device=table.ids.device)[:, None]
        inner = (other.gradients[rows, table.ids] * table.gradients).sum(2).sum(1)
        lengths = second
    squares = first.square() + second.square() + 2 * inner
    # Where E and H cancel, the difference is as inexact as its parts.
    lengths = lengths + row_norms(table.gradients.flatten(0, 1)).view(table.ids.shape).sum(1)
    return (squares.clamp(min=0) + rounding(first, lengths)).sqrt()


def _inner_outer(table: Gathered, other: OuterProducts) -> tuple[torch.Tensor, torch.Tensor]:
    """⟨E, H⟩ = Σ_{t,s} l_s[k_t] ⟨b_t, r_s⟩, and the sum of the lengths of H's parts."""
    inner = []
    for start, stop in chunks(table.rows, table.ids.shape[1] * other.positions):
        ids = table.ids[start:stop]
        products = torch.bmm(table.gradients[start:stop], other.right[start:stop].transpose(1, 2))
        columns = ids[:, None, :].expand(-1, other.positions, -1)
        picked = other.left[start:stop].gather(2, columns)
        inner.append((products * picked.transpose(1, 2)).sum(2).sum(1))
    left, right = other.left.flatten(0, 1), other.right.flatten(0, 1)
    lengths = (row_norms(left) * row_norms(right)).view(-1, other.positions).sum(1)
    return torch.cat(inner), lengths
