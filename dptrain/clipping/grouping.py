"""Which of a clipping style's groups each parameter of a run belongs to."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dptrain.clipping.styles import ClippingStyle


def parameter_groups(
    style: ClippingStyle, module: nn.Module, parameters: Sequence[nn.Parameter], mode: str
) -> list[int]:
    """The number of each parameter's group, from 0.

    Args:
        style: how gradients are clipped.
        module: the user's.
        parameters: its trainable ones, in the optimiser's order.
        mode: the ``grad_sample_mode``.

    Raises:
        TypeError: if ``style`` is no clipping style.
        ValueError: if it does not put each parameter in one group, or the mode cannot clip groups.
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
    if mode == "ghost" and count > 1:
        raise ValueError(
            f"clipping={style} with grad_sample_mode='ghost': its second pass has one factor for "
            f"an example's whole gradient, and not one for each of {count} groups; use "
            "grad_sample_mode='bookkeeping', 'hooks' or 'functorch', or clipping=Flat() or "
            "Automatic()"
        )
    return groups
