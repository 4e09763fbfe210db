"""From per-example gradient norms to the factors of the clipped sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dptrain.clipping.base.rows import check_rows, row_norms, summing_dtype
from dptrain.clipping.base.styles import FLAT, PROVEN, STABILITY, ClippingStyle

__all__ = [
    "STABILITY",
    "check_rows",
    "clip_factors",
    "group_norms",
    "row_norms",
    "summing_dtype",
    "total_norms",
]

_ROUNDING = 1e-6  # of float32 factors and norms, relative


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

    Raises:
        ValueError: if a style that is none of dptrain's breaks what ``ClippingStyle.clip`` states.
    """
    finite = (norms < math.inf).all(dim=1)  # NaN is not
    factors, contributed = style.clip(norms, max_grad_norm)
    if type(style) not in PROVEN:
        _check_clipped(style, norms, max_grad_norm, factors, contributed, finite)
    factors = weights[:, None] * factors
    if admit is not None:
        shares = admit(torch.where(finite, contributed, torch.zeros_like(contributed)))
        factors = factors * shares[:, None]
    # Below the least normal number factors lose digits: times a gradient of 1e38, one that was
    # rounded up could exceed R.
    kept = finite[:, None] & (factors >= torch.finfo(factors.dtype).tiny)
    return torch.where(kept, factors, 0.0), finite


def by_row(unit: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """A number, or one for each row of ``like``, as what its columns can be multiplied by."""
    return unit if isinstance(unit, float) else unit.to(like)[:, None]


def per_reported(factors: torch.Tensor, unit: float | torch.Tensor) -> torch.Tensor:
    """Factors on gradients as they were reported, of which g is ``unit`` times as long.

    The unit may be one for each row. Factors that come out below the least normal number are 0, as
    in ``clip_factors``.
    """
    scaled = factors * by_row(unit, factors)
    return torch.where(scaled >= torch.finfo(scaled.dtype).tiny, scaled, 0.0)


def _check_clipped(
    style: ClippingStyle,
    norms: torch.Tensor,
    max_grad_norm: float,
    factors: torch.Tensor,
    contributed: torch.Tensor,
    finite: torch.Tensor,
) -> None:
    """Refuse factors under which the sensitivity of the sum would not be R.

    The norms are private, so the message holds none.

    Raises:
        ValueError: saying which of its promises the style breaks.
    """
    start = f"clipping={style}: its clip()"
    if factors.shape != norms.shape or contributed.shape != norms.shape[:1]:
        raise ValueError(
            f"{start} returned the shapes {tuple(factors.shape)} and {tuple(contributed.shape)} "
            f"for norms of shape {tuple(norms.shape)}; return (rows, groups) and (rows,)"
        )
    slack = 1.0 + _ROUNDING
    left = torch.linalg.vector_norm(factors.double() * norms.double(), dim=1)[finite]
    stated = contributed.double()[finite]
    if not bool((left <= stated * slack + torch.finfo(norms.dtype).tiny).all()):
        raise ValueError(
            f"{start} leaves more of an example's gradient than the norm that it states: its "
            "second value must be at least the norm of what the factors leave"
        )
    if not bool((stated <= max_grad_norm * slack).all()):
        raise ValueError(
            f"{start} leaves an example's gradient longer than max_grad_norm={max_grad_norm:g}, "
            "for which the noise is too little; shorten it, for instance as Flat() does"
        )
    first, _ = style.clip(norms[:1], max_grad_norm)
    if bool(finite[:1].all()) and not torch.allclose(first, factors[:1], rtol=1e-5, atol=0.0):
        raise ValueError(
            f"{start} gives an example another factor when it is alone: a factor must follow from "
            "that example's norms only, or one example moves what others contribute"
        )
