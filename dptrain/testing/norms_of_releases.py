"""Checks that a layer's rule takes norms of what it releases, on inputs that make this hard."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.clipping.base import HALF, ROUNDING, in_full_float32, row_norms_error, unit
from dptrain.clipping.bookkeeping import norms_of_sum
from dptrain.clipping.bookkeeping.rules import owned, register_imported, rule_of, without_rule
from dptrain.clipping.bookkeeping.uses import Use, chunked_norms, rounding_errors
from dptrain.core import on_processor
from dptrain.testing.layer_uses import reported_uses, tensors_of
from dptrain.testing.requiring import require

Change = Callable[[torch.Tensor], torch.Tensor]

# Of squares on a device, where rows that cancel are not computed again: twice what products of 256
# terms, or of a few thousand in parts, are off by on both sides, in units of u.
_PRODUCTS = 1300
_ODD = 0.7234567  # squares of it, and their sums, are rounded the same way again and again


def _cancelling(dimension: int) -> Change:
    """Adds up to nought over a dimension, as far as rounding goes."""

    def change(d: torch.Tensor) -> torch.Tensor:
        return d - d.mean(dimension, keepdim=True) if d.dim() > 2 else d

    return change


def _alternating(d: torch.Tensor) -> torch.Tensor:
    """Equal numbers with signs that change from position to position."""
    signs = 1 - 2 * (torch.arange(d[0].numel()) % 2).view(d.shape[1:])
    return (_ODD * signs).expand_as(d).to(d)


INPUTS: dict[str, Change] = {
    "as given": lambda x: x,
    "blank": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, _ODD),
    "with a large offset": lambda x: x + 1e4,
    "padded with rows of zeros": lambda x: torch.cat([x[:1], torch.zeros_like(x[1:])]),
}
DIRECTIONS: dict[str, Change] = {
    "random": lambda d: d,
    "that sum to zero over dimension 1": _cancelling(1),
    "that sum to zero over the last dimension": _cancelling(-1),
    "of alternating signs": _alternating,
    "large": lambda d: 1e4 * d,
}


def check_norms_of_releases(
    layer: nn.Module, inputs: torch.Tensor | Sequence[Any], *, seed: int = 0
) -> None:
    """No norm is taken of one number while another is released, in float32 and half precision.

    For one real example (the others have weight 0) let G be what the rule adds to the sum before
    clipping, n the norm it is clipped by, both from the same backward pass, M the sums of absolute
    values of the T terms that an entry of G is made of, and u the unit roundoff of float32 (half
    precision is summed up in that). Then

        ‖G‖ ≤ (1 + ρ) n + ‖E‖        and        n ≤ (1 + ρ) (‖G‖ + ‖E‖ + √(17 u T) ‖M‖)

    with ρ of ``row_norms_error`` and a few roundings, and E < 2 (T + 3)
    1.02 u M what any order of adding up may be off by. (Norms from products are rounded up by 16 u
    S², S the sum of the T terms' lengths: S² ≤ T ‖M‖².) As the clipped example is R G / n or less,
    it is R (1 + ρ + ‖E‖ / n) at most, and as n ≥ 4 √u S where products are used, R (1 + ρ +
    (T + 3) √u) whatever cancels.

    Inputs and the output's gradients are taken as they are, and blank, constant, shifted far away,
    padded; cancelling, alternating, large.

    Args:
        layer: of a type that has a rule, without randomness; copied.
        inputs: what it is called with, as in ``check_layer_rule``.
        seed: of the gradients of the output.

    Raises:
        AssertionError: saying which example's norm is another than that of its release.
        ValueError: if the layer has no rule.
    """
    register_imported()
    rule = rule_of(layer)
    if rule is None:
        raise ValueError(f"{without_rule(layer)}: register one with dptrain.register_layer()")
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for dtype in (torch.float32, *HALF):
        same = copy.deepcopy(layer).to(dtype)
        for what, values in _changed(given, dtype):
            try:
                outputs = tensors_of(same(*values))
            except RuntimeError:
                if dtype in HALF:
                    break  # torch has no such kernel: nobody can train this
                raise
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                random = [torch.randn(output.shape).to(output.device) for output in outputs]
            for how, change in list(DIRECTIONS.items())[: 2 if dtype in HALF else None]:
                directions = [change(d).to(o.dtype) for d, o in zip(random, outputs, strict=True)]
                _, uses = reported_uses(same, rule, values, directions)
                case = f"{dtype}, inputs {what}, gradients {how}"
                for name in owned(same, rule):
                    check_uses(f"{name!r} ({case})", uses[name])
                    smaller = [use.compact() for use in uses[name]]  # as a run has them
                    if any(a is not b for a, b in zip(smaller, uses[name], strict=True)):
                        check_uses(f"{name!r} ({case}, compact)", smaller)


def _changed(given: list[Any], dtype: torch.dtype) -> Iterator[tuple[str, list[Any]]]:
    """The inputs in every way; once, if there are none of floating point."""
    for what, change in INPUTS.items():
        values, changed = list(given), False
        for k, value in enumerate(given):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                values[k] = change(value.detach().float()).to(dtype).requires_grad_()
                changed = True
        if changed or what == "as given":
            yield what, values


@in_full_float32
def check_uses(where: str, uses: list[Use]) -> None:
    """The inequalities for every example, also of gradients that an optimizer scales.

    Args:
        where: named in the error.
        uses: of one parameter.
    """
    generator = torch.Generator().manual_seed(0)
    rows, shape = uses[0].rows, uses[0].shape
    device = norms_of_sum(list(uses)).device
    scale = 10 ** (4 * torch.rand(shape, generator=generator) - 2).to(device)
    for s in (None, scale):
        norms = norms_of_sum(list(uses)) if s is None else chunked_norms(uses, s)
        finite = torch.isfinite(norms).nonzero()[:, 0]
        for i in finite.tolist():
            # A sum may be formed in place of what it is made of.
            own = [copy.deepcopy(use).select(finite) for use in uses]
            only = (finite == i).to(norms.dtype)
            released = sum(use.weighted_sum(only).view(shape) for use in own)
            _compare(f"{where}, row {i} of {rows}", uses, i, float(norms[i]), released, s)


def _compare(
    where: str, uses: list[Use], i: int, norm: float, released: Any, scale: torch.Tensor | None
) -> None:
    s = torch.ones(()) if scale is None else scale
    length = float((released * s).double().norm())
    numbers, u = released.numel(), unit(torch.float32)
    errors = rounding_errors(uses, i, i + 1)
    error = 0.0 if errors is None else float((errors[0] * s).double().norm())
    parts = [use.magnitudes(i, i + 1) for use in uses]
    terms = max(most for _, most in parts)
    magnitude = float(sum((m[0] * s).double().norm() for m, _ in parts))
    rho = row_norms_error(numbers, torch.float32) + (ROUNDING + 8) * u
    lost = 4 * math.sqrt(torch.finfo(torch.float32).tiny * numbers)  # squares of tiny numbers
    require(
        length <= (1 + rho) * norm + error + lost,
        f"{where}: {length:.9g} is released while {norm:.9g} is taken for its norm",
    )
    off = ROUNDING + 1 if on_processor(released) else _PRODUCTS
    up = math.sqrt(off * u * terms * len(parts)) * magnitude
    require(
        norm <= (1 + rho) * (length + error + up) + 1e-9,
        f"{where}: {norm:.9g} is taken for the norm of a release of {length:.9g}",
    )
