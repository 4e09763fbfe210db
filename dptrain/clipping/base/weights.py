"""Factors of the clipped sum, from per-example gradient norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from dptrain.clipping.base.rows import row_norms
from dptrain.clipping.base.styles import FLAT, PROVEN, ClippingStyle
from dptrain.core import exact_device, in_float64

_ROUNDING = 1e-6  # of float32 factors and norms, relative
_ORDINARY = 2.0**27  # unit / R up to which lost squares are below 1e-6 R for 10^9 numbers
_LEAST_BOUND = 2.0**-60  # of R, whose square float32 has
_LEAST_REPORTED = 2.0**-100  # of S · R: products that were lost are below 2⁻⁵⁰ R each


def group_norms(parts: Sequence[torch.Tensor | None], groups: Sequence[int]) -> torch.Tensor:
    """Norms of the groups' gradients from those of the parameters', shape (rows, groups).

    A group none of whose parameters took part has norm 0.

    Args:
        parts: for each parameter the norms of its per-example gradients, shape (rows,), or ``None``
            where it took no part; the result is on the first one's device, in the widest dtype.
        groups: the number, from 0, of each parameter's group; see ``ClippingStyle.groups``.
    """
    present = [part for part in parts if part is not None]
    if not present:
        raise ValueError("parts: no parameter took part in the loss, so there are no norms")
    device, dtype = present[0].device, present[0].dtype
    for other in present[1:]:
        if other.dtype != dtype:
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

    Returns:
        (factors, finite), of shapes (rows, groups) and (rows,).
    """
    finite = norms < math.inf  # NaN is not
    finite = finite[:, 0] if norms.shape[1] == 1 else finite.all(dim=1)
    if type(style) in PROVEN:
        factors, contributed = style.clip(norms, max_grad_norm)
    else:
        factors, contributed = _clipped_alone(style, norms, max_grad_norm, finite)
        _check_clipped(style, norms, max_grad_norm, factors, contributed, finite)
    factors = weights[:, None] * factors
    if admit is not None:
        shares = admit(torch.where(finite, contributed, torch.zeros_like(contributed)))
        factors = factors * shares[:, None]
    # Below the least normal number factors lose digits: times a gradient of 1e38, one that was
    # rounded up could exceed R.
    kept = finite[:, None] & (factors >= torch.finfo(factors.dtype).tiny)
    return factors.masked_fill_(~kept, 0.0), finite


def by_row(unit: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """A number, or one for each row of ``like``, as what its columns can be multiplied by."""
    return unit if isinstance(unit, float) else unit.to(like)[:, None]


def enlargement(unit: float | torch.Tensor, max_grad_norm: float, loss_scale: float = 1.0) -> float:
    """A power of two to multiply gradients by before they are squared, 1 for ordinary ones.

    Of gradients that are far shorter as they are reported than in the unit that they are clipped
    in, squares would be below the least number that float32 has: such a gradient would have the
    norm 0, and be released ``unit`` times as long (docs/theory/clipping.md#thm-units;
    ``test_a_tiny_loss_scale_does_not_hide_a_gradient``).

    Args:
        unit: what reported gradients are multiplied by; also one for each row.
        max_grad_norm: R.
        loss_scale: S, part of the unit.
    """
    if max_grad_norm < _LEAST_BOUND or max_grad_norm * loss_scale < _LEAST_REPORTED:
        raise RuntimeError(
            f"max_grad_norm={max_grad_norm:g} with a loss multiplied by {loss_scale:g}: "
            "gradients this short cannot be clipped accurately in float32. Choose max_grad_norm "
            f"of at least {_LEAST_BOUND:.0e} and a loss scale (init_scale of GradScaler) of at "
            f"least {_LEAST_REPORTED:.0e} / max_grad_norm. This step released nothing"
        )
    ratio = (unit if isinstance(unit, float) else float(unit.max())) / max_grad_norm
    return 1.0 if ratio <= _ORDINARY else 2.0 ** math.floor(math.log2(ratio))


def per_reported(factors: torch.Tensor, unit: float | torch.Tensor) -> torch.Tensor:
    """Factors on gradients as they were reported, of which g is ``unit`` times as long.

    The unit may be one for each row. Factors that come out below the least normal number are 0, as
    in ``clip_factors``, and so are those that are above the largest.
    """
    scaled = (factors * by_row(unit, factors)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return scaled.masked_fill_(scaled < torch.finfo(scaled.dtype).tiny, 0.0)


def _clipped_alone(
    style: ClippingStyle, norms: torch.Tensor, max_grad_norm: float, finite: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors and norms that a style gives each example alone, from the last to the first.

    So no factor is made of another example's norm; that one is, of the batch, the example's place
    in it or what the style has kept, shows in that the whole comes out otherwise
    (``test_no_factor_of_a_style_of_ones_own_is_of_others``).
    """
    start = f"clipping={style}: its clip()"
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for some in (norms, *(norms[k : k + 1] for k in reversed(range(len(norms))))):
        factors, contributed = style.clip(some.clone(), max_grad_norm)  # which it may write into
        if factors.shape != some.shape or contributed.shape != some.shape[:1]:
            raise ValueError(
                f"{start} returned tensors of shapes {tuple(factors.shape)} and "
                f"{tuple(contributed.shape)} for norms of shape {tuple(some.shape)}: it must "
                "return the shapes (rows, groups) and (rows,)"
            )
        found.append((factors.detach().clone(), contributed.detach().clone()))
    together, alone = found[0], found[:0:-1]
    if not alone:
        return together
    each = tuple(torch.cat(parts) for parts in zip(*alone, strict=True))
    for whole, own in zip(together, each, strict=True):
        if not torch.allclose(whole[finite], own[finite], rtol=1e-5, atol=0.0):
            raise ValueError(
                f"{start} gives an example another factor when it is alone in the batch. A "
                "factor must depend on that example's norms only, since otherwise one example "
                "changes the contributions of others"
            )
    return each[0], each[1]


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
    """
    start = f"clipping={style}: its clip()"
    slack = 1.0 + _ROUNDING
    finite = finite.to(exact_device(finite.device))
    left = torch.linalg.vector_norm(in_float64(factors) * in_float64(norms), dim=1)[finite]
    stated = in_float64(contributed)[finite]
    if not bool((left <= stated * slack + torch.finfo(norms.dtype).tiny).all()):
        raise ValueError(
            f"{start} leaves more of an example's gradient than the norm that it states: its "
            "second return value must be at least the norm that remains after the factors are "
            "applied"
        )
    if not bool((stated <= max_grad_norm * slack).all()):
        raise ValueError(
            f"{start} leaves an example's gradient longer than max_grad_norm={max_grad_norm:g}, "
            "so the noise would be too small. Scale the gradient to at most max_grad_norm, as "
            "Flat() does"
        )
