"""From per-example gradient norms to the factors of the clipped sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dptrain.clipping.base.rows import check_rows, row_norms, summing_dtype
from dptrain.clipping.base.styles import FLAT, STABILITY, ClippingStyle

__all__ = [
    "STABILITY",
    "check_rows",
    "clip_factors",
    "group_norms",
    "row_norms",
    "summing_dtype",
    "total_norms",
]


def group_norms(parts: Sequence[torch.Tensor | None], groups: Sequence[int]) -> torch.Tensor:
    """Norms of the groups' gradients from those of the parameters', shape (rows, groups).

    A group none of whose parameters took part has norm 0.

    Args:
        parts: for each parameter the norms of its per-example gradients, shape (rows,), or ``None``
            where it took no part; the result is on the first one's device, in the widest dtype.
        groups: the number, from 0, of each parameter's group; see ``ClippingStyle.groups``.

    Raises:
        ValueError: if no parameter took part, or there is not one group for every parameter.
    """
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError("parts: no parameter took part, so there are no norms")
    device, dtype = present[0].device, present[0].dtype
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    members: list[list[torch.Tensor]] = [[] for _ in range(max(groups) + 1)]
    for part, group in zip(parts, groups, strict=True):
        if part is not None:
            members[group].append(part.to(device=device, dtype=dtype))
    columns = [
        row_norms(torch.stack(own, dim=1)) if own else torch.zeros_like(present[0], dtype=dtype)
        for own in members
    ]
    return columns[0][:, None] if len(columns) == 1 else torch.stack(columns, dim=1)


def total_norms(norms: torch.Tensor) -> torch.Tensor:
    """‖g_i‖₂ over all groups, detached, from norms of shape (rows, groups)."""
    norms = norms.detach()
    return norms[:, 0] if norms.shape[1] == 1 else row_norms(norms)


def clip_factors(
    norms: torch.Tensor,
    max_grad_norm: float,
    weights: torch.Tensor,
    admit: Callable[[torch.Tensor], torch.Tensor] | None = None,
    style: ClippingStyle = FLAT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors w_i · a_i · f_ig, f_ig being the style's, and which examples are finite.

    An example whose norm is NaN or infinite in any group gets factor 0 in all of them: a function
    of that example alone, so the sensitivity stays R (docs/theory/clipping.md#thm-nonfinite;
    ``test_a_broken_example_counts_nothing_and_hurts_nobody``). The same goes for one whose factor
    is below the least normal number (norms of 1e35 and more).

    Args:
        norms: ‖g_ig‖₂ of example i in group g, shape (rows, groups).
        max_grad_norm: R > 0.
        weights: w_i in [0, 1], shape (rows,).
        admit: an individual filter, from bounds on the norms of what the examples contribute to
            a_i in [0, 1], both of shape (rows,); ``None``: 1. An example that is not finite
            contributes 0.
        style: how gradients are clipped.

    Returns:
        (factors, finite), of shapes (rows, groups) and (rows,).
    """
    finite = (norms < math.inf).all(dim=1)  # NaN is not
    factors, contributed = style.clip(norms, max_grad_norm)
    factors = weights[:, None] * factors
    if admit is not None:
        shares = admit(torch.where(finite, contributed, torch.zeros_like(contributed)))
        factors = factors * shares[:, None]
    # Below the least normal number factors lose digits: times a gradient of 1e38, one that was
    # rounded up could exceed R.
    kept = finite[:, None] & (factors >= torch.finfo(factors.dtype).tiny)
    return torch.where(kept, factors, 0.0), finite
