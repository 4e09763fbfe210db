"""δ and ε of truncated b-min-sep sampling, by what is known of whole batches."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dptrain.accounting.base.curve import Curve
from dptrain.accounting.losses import gaussian
from dptrain.accounting.losses.search import least_true
from dptrain.accounting.min_sep.curve import MinSepRenyiCurve
from dptrain.accounting.min_sep.moments import affordable
from dptrain.accounting.min_sep.pair import min_sep_law, whole_batches
from dptrain.accounting.min_sep.truncated.full_batches import FullBatches
from dptrain.core import Array
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MinSep

# Shares of ε that are tried for the second of two steps.
_SHARES = (0.15, 0.3, 0.5)
# Times the ε of uncut batches, beyond which a statement says so.
_WORTH_SAYING = 1.05


@dataclasses.dataclass(frozen=True)
class TruncatedMinSepCurve(Curve):
    """The least of three bounds on δ of cut batches, in each direction.

    δ of whole batches and what cutting them costs at most (docs/theory/min-sep.md#thm-min-sep-cut);
    two steps by way of a run without the example, at any cap
    (docs/theory/min-sep.md#thm-min-sep-any-cap); and the bound without amplification
    (``test_bounds_are_above_brute_force_over_everybodys_draws``).
    """

    whole: MinSepRenyiCurve
    batches: FullBatches

    def unamplified(self, sigma: float, epsilon: Array) -> Array:
        """δ(ε) if all coins were published: those of the draws, and which examples are kept."""
        return gaussian.delta(epsilon, self.whole.sensitivity / sigma)

    def losses(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """Upper bounds on δ(ε) of cut batches minus that of whole ones: remove, add."""
        law, unamplified = self.whole.law, self.unamplified(sigma, epsilon)
        second = math.inf
        if self.batches.drawn > 0.0 and affordable(law, sigma).largest >= 2:
            second = self.whole.log_moment(sigma, 2)
        return (
            self.batches.loss_of_removing(law, second, epsilon, unamplified),
            self.batches.loss_of_adding(law, epsilon, unamplified),
        )

    def delta(self, sigma: float, epsilon: Array) -> tuple[Array, Array]:
        """δ(ε) in both directions."""
        remove, add = (self._side(side, sigma, epsilon) for side in (0, 1))
        return remove, add

    def _side(self, side: int, sigma: float, epsilon: Array) -> Array:
        whole = (self.whole.remove, self.whole.add)[side](sigma, epsilon)
        loss = self.losses(sigma, epsilon)[side]
        found = np.minimum(whole + loss, self.unamplified(sigma, epsilon))
        for i in np.flatnonzero(loss > whole):
            steps = self.two_steps(side, sigma, float(epsilon[i]))
            # Where no batch is full, which is so with probability 1 - η, it is that of whole ones.
            average = self.batches.steps * steps + whole[i]
            found[i] = min(found[i], steps, average)
        return found

    def two_steps(self, side: int, sigma: float, epsilon: float) -> float:
        """δ(ε) at any cap, remove (0) or add (1), by way of a run that never draws the example.

        An example that displaces another moves the sum by 2 at most: from P to that run is what
        whole batches lose at σ/2, and from there to Q what they lose at σ.
        """
        limit = self.whole.law.add_limit
        first, second = ((0.5 * sigma, sigma), (sigma, 0.5 * sigma))[side]
        tried = [share * epsilon for share in _SHARES] if limit > 0.25 * epsilon else []
        if limit < epsilon:
            tried.append(limit)
        least = 1.0
        for later in tried:
            value = float(self.whole.remove(first, np.array([epsilon - later]))[0])
            if later < limit:
                rest = float(self.whole.add(second, np.array([later]))[0])
                value += math.exp(epsilon - later) * rest * (1.0 + 1e-12)
            least = min(least, value)
        return least

    def epsilons(self, sigma: float, delta: float) -> tuple[float, float]:
        """ε (remove, add), each by its best bound."""
        low = self.whole.epsilons(sigma, delta)
        remove, add = (self._epsilon(side, sigma, delta, low[side]) for side in (0, 1))
        return remove, add

    def epsilon(self, sigma: float, delta: float) -> float:
        """The larger ε of the two directions."""
        low = self.whole.epsilon(sigma, delta)
        return max(self._epsilon(side, sigma, delta, low) for side in (0, 1))

    def _epsilon(self, side: int, sigma: float, delta: float, low: float) -> float:
        """The least ε ≥ ``low`` of one direction.

        The loss falls with ε, so ``low`` and the loss there say where to look no further.
        """

        def holds(at: float) -> bool:
            return float(self._side(side, sigma, np.array([at]))[0]) <= delta

        if not self.batches.steps or holds(low):
            return low
        high = max(low, gaussian.epsilon(delta, self.whole.sensitivity / sigma))
        loss = float(self.losses(sigma, np.array([low]))[side][0])
        if loss < delta:
            high = min(max(self.whole.epsilons(sigma, delta - loss)[side], low), high)
        return least_true(holds, low=low, high=high, tolerance=1e-6 * high)

    def notes(self, sigma: float, delta: float) -> tuple[str, ...]:
        """Remarks on what whole batches would have, and what cutting them adds to δ."""
        shown, whole = self.epsilon(sigma, delta), self.whole.epsilon(sigma, delta)
        remove, add = (float(each[0]) for each in self.losses(sigma, np.array([shown])))
        if shown <= _WORTH_SAYING * whole:
            remark = f"cutting batches adds at most {remove:.3g} (remove) and {add:.3g} (add) to δ"
            return (*self.whole.notes(sigma, delta), remark)
        return (
            f"an example meets a full batch {self.batches.drawn:.3g} times on average; uncut "
            f"batches would have ε = {whole:.6g}: a larger max_batch_size costs less noise, and "
            "min-sep-importance may show less by simulation",
        )


def truncated_curve(mechanism: MatrixMechanism) -> TruncatedMinSepCurve:
    """The deterministic bounds of a mechanism that is not refused and whose batches are cut."""
    scheme = mechanism.scheme
    assert isinstance(scheme, MinSep)
    whole = MinSepRenyiCurve(min_sep_law(whole_batches(mechanism)))
    return TruncatedMinSepCurve(whole, FullBatches.of(scheme))
