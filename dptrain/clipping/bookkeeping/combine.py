"""Norms of the sum of all uses of a parameter."""

from __future__ import annotations

import torch

from dptrain.clipping.base.linear_norms import gram_squares, pad
from dptrain.clipping.bookkeeping.uses.gathered import Gathered
from dptrain.clipping.bookkeeping.uses.outer import OuterProducts
from dptrain.clipping.bookkeeping.uses.uses import Use, chunked_norms, chunks


def merge(uses: list[Use]) -> list[Use]:
    """The same sum with as few uses as their forms allow."""
    merged: list[Use] = []
    for use in uses:
        for k, other in enumerate(merged):
            together = other.merged(use)
            if together is None:
                together = use.merged(other)
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
    if table is None or len(others) > 1 or not isinstance(others[0], OuterProducts):
        return chunked_norms(uses)
    return _with_table(table, others[0])


def _with_table(table: Gathered, other: OuterProducts) -> torch.Tensor:
    """Norms for weights tied between an embedding and an output layer.

    ‖E + H‖² = ‖E‖² + ‖H‖² + 2⟨E, H⟩, and the inner product only needs the rows of H that E has.
    Where E and H cancel, that is a difference of large numbers: it is computed in float64 and
    rounded up, as ``outer_norms`` is.
    """
    many = other.positions
    terms = sum(table.shape) + 2 * (table.ids.shape[1] + many)
    found = [torch.empty(0, dtype=torch.float64, device=table.ids.device)]
    for start, stop in chunks(table.rows, 2 * many * max(many, table.ids.shape[1])):
        ids, b = table.ids[start:stop], table.gradients[start:stop].double()
        squares = Gathered(ids, b, table.shape[0]).squares()
        lengths = b.square().sum(2).sqrt().sum(1)
        left, right = other.left[start:stop].double(), other.right[start:stop].double()
        own, own_lengths = gram_squares(left, right)
        inner = _inner_outer(ids, b, left, right)
        whole = (squares + own + 2 * inner).clamp(min=0)
        found.append(whole + pad(table.gradients.dtype, terms) * (lengths + own_lengths).square())
    return torch.cat(found).sqrt().to(table.gradients.dtype)


def _inner_outer(
    ids: torch.Tensor, b: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """⟨E, H⟩ = Σ_{t,s} l_s[k_t] ⟨b_t, r_s⟩ of every row."""
    products = torch.bmm(b, right.transpose(1, 2))
    picked = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))
    return (products * picked.transpose(1, 2)).sum(2).sum(1)
