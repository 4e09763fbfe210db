"""Optimizers that scale per-example gradients before they are clipped, and Adam as one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from dptrain.clipping.base import summing_dtype
from dptrain.core import checks


@runtime_checkable
class ScalesGradients(Protocol):
    """An optimizer that says by what gradients are multiplied, coordinate by coordinate.

    ``PrivateOptimizer`` asks once a logical step, at its first microbatch.
    With the answer s the step's sum is Σ_i clip(s ⊙ g_i, R), the noise is added to that, and the
    optimizer finds the outcome divided by s in ``p.grad``. The guarantee stands only if s depends
    on nothing but public constants and what earlier steps released, that is, on ``p.grad`` as
    ``step()`` found it and on the parameters; never on data, losses or per-example gradients.
    """

    def scales(self) -> Mapping[nn.Parameter, torch.Tensor]:
        """s by parameter, of its shape, positive and finite; a parameter left out has s = 1."""


class ScaledAdam(torch.optim.Adam):
    """Adam that scales, then privatises: noise and clipping follow the geometry Adam has learnt.

    Source: Ganesh, McMahan, Thakurta 2025, "On design principles for private adaptive optimizers"
    (arXiv 2507.01129), Algorithm 8 as jax_privacy documents it (``optimizers.scale_then_privatize``
    around Adam). DP-Adam clips and noises all coordinates alike, and where gradients are small its
    second moments are those of the noise. Here step t = 1, 2, ... is, with v_0 = m_0 = 0, products
    and roots by coordinate, and n_t the noise of the run's mechanism:

        s_t = 1 / (√v_{t-1} + ε_s)                            fixed for the whole step
        x_t = (Σ_i clip(s_t ⊙ g_i, R) + σ R n_t) / B̄          clipped, summed, noised as scaled
        ĝ_t = x_t / s_t                                       what ``step()`` finds in ``p.grad``
        m_t = β1 m_{t-1} + (1-β1) ĝ_t,    v_t = β2 v_{t-1} + (1-β2) ĝ_t²
        θ_t = θ_{t-1} - η (m_t / (1-β1^t)) / (√(v_t / (1-β2^t)) + ε)

    The first, second and third line are the private engine's doing (see
    ``ScalesGradients``); the others are torch's Adam. Without the engine, or with σ = 0 and
    nothing clipped, this *is* torch's Adam.

    Privacy: v_{t-1} is made of ĝ_1, ..., ĝ_{t-1}, which are released, so that s_t is a constant
    given these: the run's guarantee is that of its mechanism, unchanged
    (docs/theory/clipping.md#thm-scaled;
    ``test_neighboring_data_sets_release_sums_within_the_bound``).

    Choices that implementations make differently, and ours:

    - s_t has v_{t-1} without bias correction, as Adam keeps it. It grows from 0, so that early,
      noisy estimates are outweighed by ε_s and the first steps are nearly DP-Adam's; a corrected
      v_1 would be one noisy gradient squared. The update of θ has the usual corrections.
    - s_1 = 1/ε_s everywhere: the first step is DP-Adam's with clipping norm R·ε_s.
    - v is updated with the unscaled ĝ_t. (Squares of x_t would not be second moments of anything
      that stays the same from step to step.) The noise's part in it is not subtracted.

    R is a bound on *scaled* gradients, whose coordinates are of order 1 once v is known: with D
    parameters a batch's mean gradient has a norm of up to √D there. ε_s is in the units of a
    gradient's coordinate: much above √v all coordinates are scaled alike (DP-Adam with clipping
    norm R·ε_s), much below it coordinates with little gradient get most of the attention. Tune
    both; there is no value that suits all models.

    Args:
        params: parameters or groups of them, as for any torch optimizer; a group may have an
            ``eps_scale`` of its own.
        lr: η; schedulers work as on any optimizer.
        betas: (β1, β2), each in [0, 1).
        eps: ε of the update of θ, as in torch.
        eps_scale: ε_s > 0, a public constant.

    Raises:
        ValueError: for values out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        eps_scale: float,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        self.defaults["eps_scale"] = eps_scale
        for group in self.param_groups:
            _check_eps_scale(group.setdefault("eps_scale", eps_scale))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be trained with options of their own."""
        if "eps_scale" in param_group:
            _check_eps_scale(param_group["eps_scale"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def scales(self) -> dict[nn.Parameter, torch.Tensor]:
        """s of the step that comes next, from what earlier steps released; in float32 at least."""
        return {
            p: self._scale(p, group["eps_scale"])
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def _scale(self, p: nn.Parameter, eps_scale: float) -> torch.Tensor:
        v = self.state[p].get("exp_avg_sq") if p in self.state else None
        if v is None:
            return torch.full_like(p, 1.0 / eps_scale, dtype=summing_dtype(p))
        return v.to(summing_dtype(p)).sqrt().add_(eps_scale).reciprocal_()


def _check_eps_scale(value: Any) -> None:
    remedy = "about the size of a typical coordinate of the noisy mean gradient"
    least = 1 / sys.float_info.max  # below, its reciprocal is infinite
    checks.number("eps_scale", value, above=least, remedy=remedy)


def scales_of(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]
) -> list[torch.Tensor | None] | None:
    """Copies of the scales that an optimizer asks for, in the order and dtype of the clipped sums.

    A scale that is not positive and finite is refused: what is multiplied by it could not be
    divided by it again, or not be clipped.

    Returns:
        ``None`` if it is not one of ``ScalesGradients``.
    """
    if not hasattr(optimizer, "scales"):  # as isinstance of a protocol, in a hundredth of its time
        return None
    found = cast(ScalesGradients, optimizer).scales()
    scales = [
        found[p].detach().to(p.device, summing_dtype(p), copy=True) if p in found else None
        for p in params
    ]
    name = f"{type(optimizer).__name__}.scales()"
    usable = []
    for index, (p, s) in enumerate(zip(params, scales, strict=True)):
        if s is None:
            continue
        if s.shape != p.shape:
            raise ValueError(
                f"{name}: parameter {index} has shape {tuple(p.shape)}, its scale {tuple(s.shape)}"
            )
        usable.append((torch.isfinite(s) & (s > 0)).all())
    # One wait for the device, not one a parameter.
    if usable and not bool(torch.stack([u.to(usable[0].device) for u in usable]).all()):
        raise ValueError(
            f"{name}: some scales are zero, negative or not finite, because the second moments "
            "have overflowed or were overwritten: resume from the last checkpoint with a smaller "
            "learning rate or max_grad_norm"
        )
    return scales
