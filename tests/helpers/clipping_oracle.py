"""What clipping is by definition: a loop over examples, each alone in its batch.

Nothing of dptrain is used here, so that nothing of it can be wrong on both sides.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

STABILITY = 1e-6  # what Opacus, and dptrain with it, adds to a norm that it divides by

# Relative to the lengths of what is added up; see ``Reference.slack``.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def row_losses(output: Tensor, targets: Tensor) -> Tensor:
    """Loss of every row, shape (rows,), of an output of shape (rows, ...)."""
    return (output.flatten(1) - targets[:, None]).square().mean(1)


def reduced(output: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """The user's loss of a batch."""
    losses = row_losses(output, targets)
    return losses.mean() if reduction == "mean" else losses.sum()


def gradients(
    module: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, views: int = 1
) -> tuple[list[Tensor], Tensor]:
    """Per-example gradients of the trainable parameters, each of shape (examples, numbers).

    Row after row is fed to the module as a batch of one; an example's gradient is the mean over its
    ``views`` rows, which follow one another. A parameter that took no part has gradient zero. The
    module's ``p.grad`` are consumed.

    Returns:
        The gradients, and how steep the loss is in the output: shape (examples,), at least the norm
        of its gradient there, which all the others are made of, times the gains of RMSNorms.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    found: list[list[Tensor]] = [[] for _ in parameters]
    steep = []
    for i in range(len(targets)):
        with _gains(module) as gains:
            output = module(*(x[i : i + 1] for x in inputs))
        loss = row_losses(output, targets[i : i + 1]).sum()
        steep.append(2 * loss.detach().sqrt() * math.prod(gains))
        if loss.requires_grad:
            loss.backward()
        for rows, p in zip(found, parameters, strict=True):
            rows.append((torch.zeros_like(p) if p.grad is None else p.grad).flatten())
            p.grad = None
    parts = [torch.stack(rows).unflatten(0, (-1, views)).mean(1) for rows in found]
    return parts, torch.stack(steep).unflatten(0, (-1, views)).mean(1)


@contextlib.contextmanager
def _gains(module: nn.Module) -> Iterator[list[float]]:
    """Collects what every call of an RMSNorm, which divides by r, makes of rounding, if above one.

    Its derivative is (g - y <g, y>/n)/r. Where one of a row's numbers is far above the others, the
    difference cancels, and what is left is the rounding of y <g, y>/n, at most |g| mean(y^2), over
    r: with the epsilon that float64 has by default, up to 3e7 times the rounding of g. Shaking the
    inputs by their last bits does not show it, as the exact difference stays next to zero.
    """
    found: list[float] = []

    def note(norm: nn.RMSNorm, inputs: tuple[Tensor], _output: Tensor) -> None:
        (x,) = inputs
        axes = tuple(range(-len(norm.normalized_shape), 0))
        epsilon = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        square = x.detach().square().mean(axes)
        found.append(max(1.0, float((square / (square + epsilon) ** 1.5).max())))

    hooks = [m.register_forward_hook(note) for m in module.modules() if isinstance(m, nn.RMSNorm)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@dataclasses.dataclass
class Reference:
    """Per-example gradients by the loop, and what follows from them.

    Attributes:
        parts: one tensor of shape (examples, numbers) for each trainable parameter.
        rounding: shape (examples,), how far float32 gradients are from float64 ones of the same
            row: what the architecture itself does to rounding errors.
    """

    parts: list[Tensor]
    rounding: Tensor

    @functools.cached_property
    def norms(self) -> Tensor:
        """‖g_i‖₂, shape (examples,)."""
        return torch.cat(self.parts, dim=1).norm(dim=1)

    def group_norms(self, groups: list[int]) -> Tensor:
        """Norms of the groups of parameters, shape (examples, G)."""
        columns = []
        for group in range(max(groups) + 1):
            own = [part for part, g in zip(self.parts, groups, strict=True) if g == group]
            columns.append(torch.cat(own, dim=1).norm(dim=1))
        return torch.stack(columns, dim=1)

    def clipped_sums(self, factors: Tensor, groups: list[int] | None = None) -> list[Tensor]:
        """Σ_i f_i g_i for each parameter, flat; factors of shape (examples,) or (examples, G).

        An example whose norm is not finite counts nothing.
        """
        finite = torch.isfinite(self.norms)
        columns = factors[:, None] if factors.dim() == 1 else factors
        sums = []
        for part, group in zip(self.parts, groups or [0] * len(self.parts), strict=True):
            total = torch.zeros_like(part[0])
            for row, factor, counts in zip(part, columns[:, group], finite, strict=True):
                if counts:
                    total += row * factor
            sums.append(total)
        return sums

    def slack(self, tolerance: float) -> Tensor:
        """What each example's gradient may be off by, shape (examples,): relative to its length.

        Ten times the rounding of the loop itself is granted on top: a normalization over nearly
        equal numbers, or a gradient that is zero but for rounding, has no five digits in float32.
        """
        return tolerance * self.norms + 10 * self.rounding


def reference(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    targets: Tensor,
    views: int = 1,
    *,
    doubles: bool = True,
) -> Reference:
    """The loop over the examples of a batch; the module is left as it is.

    Without ``doubles``, for a module that does not run in float64, its rounding is not measured.
    """
    own = copy.deepcopy(module)
    parts, steep = gradients(own, inputs, targets, views)
    trained = [p.requires_grad for p in own.parameters()]
    for p in own.parameters():
        p.requires_grad_(True)
    whole = parts if all(trained) else gradients(own, inputs, targets, views)[0]
    # A gradient that is zero but for rounding (of a weight before a normalization of two numbers,
    # of a key's bias) is a sum of numbers as large as the others are.
    least = 1e-14 if targets.dtype == torch.float64 else 1e-7
    rounding = least * (torch.cat(whole, dim=1).norm(dim=1) + steep)
    if targets.dtype == torch.float32 and doubles:
        for p, train in zip(own.parameters(), trained, strict=True):
            p.requires_grad_(train)
        doubles = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        exact, _ = gradients(own.double(), doubles, targets.double(), views)
        off = torch.cat([a - b for a, b in zip(parts, exact, strict=True)], dim=1).norm(dim=1)
        rounding += off.float()
    return Reference(parts, rounding)


def flat_factors(norms: Tensor, max_grad_norm: float, weights: Tensor) -> Tensor:
    """w_i min(1, R / (‖g_i‖ + 1e-6)), shape (examples,)."""
    return weights.to(norms) * (max_grad_norm / (norms + STABILITY)).clamp(max=1.0)


def group_factors(norms: Tensor, bounds: list[float], weights: Tensor) -> Tensor:
    """w_i min(1, R_g / (‖g_i‖_g + 1e-6)), shape (examples, G), of norms of that shape."""
    limits = torch.tensor(bounds, dtype=norms.dtype)
    return weights.to(norms)[:, None] * (limits / (norms + STABILITY)).clamp(max=1.0)


def automatic_factors(
    norms: Tensor, max_grad_norm: float, weights: Tensor, gamma: float = 0.01
) -> Tensor:
    """w_i R / (‖g_i‖ + γ), shape (examples,); Bu et al. 2022, arXiv 2206.07136."""
    return weights.to(norms) * (max_grad_norm / (norms + gamma))


def assert_norms(found: Tensor, wanted: Reference, tolerance: float) -> None:
    """That norms of shape (examples,) are those of the loop; not finite where those are not."""
    assert found.shape == wanted.norms.shape
    finite = torch.isfinite(wanted.norms)
    assert torch.equal(torch.isfinite(found), finite), (found, wanted.norms)
    off = (found.to(wanted.norms) - wanted.norms).abs()[finite]
    assert bool((off <= wanted.slack(tolerance)[finite]).all()), (found, wanted.norms)


def assert_sums(
    found: list[Tensor | None],
    wanted: Reference,
    factors: Tensor,
    tolerance: float,
    groups: list[int] | None = None,
) -> None:
    """That clipped sums are those of the loop, to ``tolerance`` of the lengths added up."""
    expected = wanted.clipped_sums(factors, groups)
    columns = factors[:, None] if factors.dim() == 1 else factors
    finite = torch.isfinite(wanted.norms)
    # A norm that is off moves the factor of all of its gradient: twice the slack of one.
    allowed = 2 * (columns.amax(1) * wanted.slack(tolerance))[finite].sum()
    assert len(found) == len(expected)
    for number, (total, right) in enumerate(zip(found, expected, strict=True)):
        own = torch.zeros_like(right) if total is None else total.flatten().to(right)
        off = (own - right).norm()
        assert off <= allowed, f"parameter {number}: off by {off}, {allowed} allowed"
