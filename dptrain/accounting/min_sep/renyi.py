"""Deterministic accountant for b-min-sep sampling: Rényi divergences of small orders."""

from __future__ import annotations

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve, orders_refusal
from dptrain.accounting.min_sep.pair import covered_refusal, min_sep_law, whole_batches
from dptrain.accounting.min_sep.truncated.curve import truncated_curve
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism


class MinSepRenyi(DeterministicAccountant):
    """Rényi divergences for b-min-sep sampling, bands ≤ b; no simulation.

    Remove: the divergence of order α, of the moment E_Q[(P/Q)^α] of the dominating pair
    (docs/theory/min-sep.md#thm-min-sep-reduced) or a bound on it where that is too large a sum
    (docs/theory/min-sep.md#thm-min-sep-settled, docs/theory/min-sep.md#thm-periodic-moments), and
    of orders between; add: the best
    ``LinearLoss`` (``test_deterministic_bounds_are_above_a_known_profile``). Orders above 8, or
    above those whose states memory holds (C(b+α-2, α-1) a level), are bounded by fewer copies at
    less noise (docs/theory/min-sep.md#thm-min-sep-large-orders). The accountants that simulate are
    better, by a few percent in σ at a small ε.

    Where ``MinSep`` has a ``max_batch_size`` (under zero-out), δ grows by what an example that
    meets a full batch may lose (docs/theory/min-sep.md#thm-min-sep-cut): nothing that shows at a
    cap that is rarely reached, too much at one near the mean.
    """

    name = "min-sep-renyi"
    display = "b-min-sep Rényi"
    formerly = ("truncated-min-sep-renyi",)
    kind = Kind.UPPER_BOUND
    truncation = True

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse as the simulating accountant does; and separations too large even for order 2."""
        if reason := covered_refusal(mechanism):
            return reason
        return orders_refusal(min_sep_law(whole_batches(mechanism)))

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only, as simulation is tighter."""
        return (
            "the simulated bound is tighter; request this one by name if nothing may be simulated"
        )

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Seconds: a program over the states for each order."""
        return Cost.SECONDS

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curve of the law, and of its full batches where they are cut."""
        if mechanism.scheme.max_batch_size is None:
            return MinSepRenyiCurve(min_sep_law(mechanism))
        return truncated_curve(mechanism)
