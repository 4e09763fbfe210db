"""Which of a clipping style's groups each parameter of a run belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dptrain.clipping.base.styles import ClippingStyle


def parameter_groups(
    style: ClippingStyle, module: nn.Module, parameters: Sequence[nn.Parameter]
) -> list[int]:
    """The number of each parameter's group, from 0.

    Args:
        style: how gradients are clipped.
        module: the user's.
        parameters: its trainable ones, in the optimiser's order.

    Raises:
        TypeError: if ``style`` is no clipping style.
        ValueError: if it does not put each parameter in one group.
    """
    if not isinstance(style, ClippingStyle):
        raise TypeError(
            f"clipping={style!r}: expected a clipping style, e.g. Flat(), PerLayer() or Automatic()"
        )
    names = {p: name for name, p in module.named_parameters()}
    groups = style.groups([names[p] for p in parameters])
    count = max(groups, default=-1) + 1
    if len(groups) != len(parameters) or set(groups) != set(range(count)):
        raise ValueError(
            f"clipping={style}: its groups() gave {groups} for {len(parameters)} parameters; it "
            "has to give each a number, and to use all numbers from 0 on"
        )
    return groups
