"""A pair of laws from what it may lose at most in either direction."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dptrain.accounting.pld import LossDistribution
from dptrain.accounting.shifted_mixtures import ShiftedMixtures
from dptrain.accounting.subsampled_gaussian import Array, Spread


@dataclasses.dataclass(frozen=True)
class TwoSidedLosses:
    """The losses of a pair (P, Q) with δ_{P,Q} = f and δ_{Q,P} = b on ε ≥ 0.

    f(ε) and b(ε), ε ≥ 0, are the divergences of the two arguments, which must agree at ε = 0 (the
    total variation has no direction). For γ = e^ε, ε ≥ 0, any pair has ∫(P - Q/γ)_+ =
    1 - 1/γ + ∫(Q - γP)_+/γ; so f and b say everything, and a pair with these divergences dominates
    every mechanism whose own are at most f and b: masses of (P, Q) at positive losses L from f, at
    -L those of b times e^{-L}, and the rest at 0. (The rest is ≥ 0 where the masses of positive
    losses leave room for it: see the pairs of ``truncated_step``.)

    Rounding. Let m be masses that agree with discretised divergences f', b' ≥ f, b at losses > 0
    and, mirrored, < 0, M and M' their total and that of m e^{-L}. At γ < 1 m's divergence is
    M - γM' + γ(b'(1/γ) - i_b), where i_b is the mass at ∞ that mirroring loses; that is at least
    1 - γ + γ b'(1/γ) for all γ < 1 if M ≥ 1 and M ≥ M' + i_b. The first holds if the rest is
    rounded up to at least 0, the second if f'(0) ≥ b'(0): where rounding prevents that, mass is
    added to the least positive loss.

    Args:
        forward: f, the divergence of (P, Q).
        backward: b, the divergence of (Q, P).
    """

    forward: ShiftedMixtures
    backward: ShiftedMixtures

    def _ordered(self, remove: bool) -> tuple[ShiftedMixtures, ShiftedMixtures]:
        return (self.forward, self.backward) if remove else (self.backward, self.forward)

    def discretised(self, *, spacing: float, remove: bool) -> LossDistribution:
        """The losses of (P, Q) (remove) or (Q, P) (add), rounded up."""
        forward, backward = self._ordered(remove)
        ahead = forward.discretised(spacing=spacing)
        back = ahead if backward == forward else backward.discretised(spacing=spacing)
        up, down = np.exp(ahead.log_mass[1:]), np.exp(back.log_mass[1:])
        up_losses, down_losses = ahead.losses[1:], back.losses[1:]
        missing = _at_zero(down, down_losses, back.infinity) - _at_zero(
            up, up_losses, ahead.infinity
        )
        if backward != forward:
            # Sums of up to 2^18 terms that add up to at most 1 are off by less than 1e-13.
            up[0] += (max(missing, 0.0) + 1e-13) / -math.expm1(-spacing)
        mirrored = (down * np.exp(-down_losses))[::-1]
        rest = 1.0 + 1e-13 - ahead.infinity - float(up.sum()) - float(mirrored.sum())
        mass = np.concatenate([mirrored, [max(rest, 0.0)], up])
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        return LossDistribution(spacing, -down.size, log_mass, ahead.infinity)

    def spread(self, *, remove: bool) -> Spread:
        """Mean, variance and ends, roughly: for choosing a grid."""
        values, weights = [], []
        for index, pair in enumerate(self._ordered(remove)):
            x = np.linspace(*pair.ends, 4001)
            # A positive loss of (P, Q) counts by its P-mass, one of (Q, P) by its Q-mass.
            weights.append(pair.masses(x)[index])
            values.append((1.0, -1.0)[index] * pair.loss(0.5 * (x[1:] + x[:-1])))
        losses, mass = np.concatenate(values), np.concatenate(weights)
        mean = float(mass @ losses)
        variance = max(float(mass @ losses**2) - mean**2, 0.0)
        return Spread(mean, variance, float(losses.min()), float(losses.max()))


def _at_zero(mass: Array, losses: Array, infinity: float) -> float:
    """δ at ε = 0 of positive losses."""
    return float(mass @ -np.expm1(-losses)) + infinity
