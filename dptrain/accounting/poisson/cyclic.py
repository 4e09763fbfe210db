"""Cyclic Poisson sampling with a banded strategy: composed subsampled Gaussians.

Where batches are cut, δ is a mean over the sizes of an example's part, gathered into intervals.
"""

from __future__ import annotations

import math

from scipy.stats import binom

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.statement import SETTINGS_ARE_PUBLIC
from dptrain.accounting.poisson.curves import AverageCurve, CasesCurve, ComposedCurve
from dptrain.accounting.poisson.poisson import RemarkedCurve, poisson_curve
from dptrain.accounting.poisson.truncated import curve_up_to, sizes_covered
from dptrain.accounting.poisson.truncated_step import Branches
from dptrain.core import Adjacency, Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import CyclicPoisson

# Ends of the intervals of a random size, in standard deviations from its mean.
_EDGES = (-1.5, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.5, 7.5)
_SLACK = 1e-9


def equal_sizes(dataset_size: int, cycle: int) -> list[tuple[float, int, int]]:
    """(probability, least, most) for parts that differ by at most one: N mod b are the larger.

    A uniform split: the example is in the r larger parts of m + 1 with probability r(m+1)/N.
    """
    least, larger = divmod(dataset_size, cycle)
    if larger == 0:
        return [(1.0, least, least)]
    share = larger * (least + 1) / dataset_size
    return [(1.0 - share, least, least), (share, least + 1, least + 1)]


def independent_sizes(dataset_size: int, cycle: int) -> list[tuple[float, int, int]]:
    """(probability, least, most) of 1 + Bin(N-1, 1/b): intervals that cover 1..N, rounded up."""
    trials, chance = dataset_size - 1, 1.0 / cycle
    if cycle == 1 or trials == 0:
        return [(1.0, dataset_size, dataset_size)]
    mean, deviation = trials * chance, math.sqrt(trials * chance * (1.0 - chance))
    ends = {min(max(math.ceil(mean + edge * deviation), 0), trials) for edge in _EDGES}
    found, first = [], 0
    for last in sorted(ends | {trials}):
        # Above the mean from the upper tail, which keeps its digits.
        if first > mean:
            weight = binom.sf(first - 1, trials, chance) - binom.sf(last, trials, chance)
        else:
            weight = binom.cdf(last, trials, chance) - binom.cdf(first - 1, trials, chance)
        found.append((float(weight) * (1.0 + _SLACK) + 1e-300, first + 1, last + 1))
        first = last + 1
    return found


class CyclicPoissonPLD(DeterministicAccountant):
    """ceil(n/b) compositions of one subsampled Gaussian of sensitivity max_t ‖C_{:,t}‖, bands ≤ b.

    Under zero-out, replace-one and, where examples pick their parts by themselves
    (``assignment="independent"``), add-or-remove-one
    (docs/theory/poisson.md#thm-cyclic; ``test_worst_part_by_quadrature_where_norms_are_equal``;
    Choquette-Choo et al. 2023, Theorem 4, arXiv 2306.08153). Equal parts read N: with one example
    fewer, others have to move between parts, and change their turns. No theorem covers that.

    With ``max_batch_size`` a turn is a truncated Poisson draw from the m examples of the part
    (Ganesh 2025, section 3.1, arXiv 2508.15089). Truncated privacy is not known to be monotone in
    m, so δ is the mean over m of the δ given m, by intervals of m for independent parts; under
    add-or-remove-one the statement is for every run on at most ``nominal_size`` examples, with one
    more or one fewer (docs/theory/poisson.md#thm-cyclic-sizes;
    ``test_truncated_parts_average_over_their_sizes``).

    The signs of C's entries play no part. With one part it is (truncated) Poisson sampling and
    without truncation exact; otherwise the split is random and hidden, of which no use is made: an
    upper bound.
    """

    name = "cyclic-poisson-pld"
    display = "cyclic Poisson PLD"
    kind = Kind.UPPER_BOUND
    adjacencies = (Adjacency.ZERO_OUT, Adjacency.ADD_REMOVE, Adjacency.REPLACE_ONE)
    truncation = True

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuses other schemes, bands beyond the cycle, and equal parts where N is private."""
        scheme, bands = mechanism.scheme, mechanism.strategy.bands
        if not isinstance(scheme, CyclicPoisson):
            return "it needs CyclicPoisson sampling"
        if bands > scheme.cycle:
            return (
                f"it needs bands <= cycle, the strategy has bands={bands} and the scheme "
                f"cycle={scheme.cycle}; use at most {scheme.cycle} bands or a cycle of at least "
                f"{bands}"
            )
        private = not self.adjacency.public_size
        if private and scheme.assignment == "equal" and scheme.cycle > 1:
            return (
                "assignment='equal' splits by the number of examples, so that an example more or "
                "less moves others to other parts; use assignment='independent'"
            )
        return None

    def kind_of(self, mechanism: MatrixMechanism) -> Kind:
        """Exact for one part, nothing to cut and the same noise at every step."""
        scheme = mechanism.scheme
        assert isinstance(scheme, CyclicPoisson)
        norms = mechanism.strategy.column_norms(scheme.steps)
        plain = scheme.min_sep == 1 and norms.min() == norms.max() and not _cuts(scheme)
        return Kind.EXACT if plain else Kind.UPPER_BOUND

    def cost(self, mechanism: MatrixMechanism) -> Cost:
        """Truncated parts of several sizes take a composition each."""
        scheme = mechanism.scheme
        assert isinstance(scheme, CyclicPoisson)
        return Cost.SECONDS if _cuts(scheme) else Cost.INSTANT

    def curve(self, mechanism: MatrixMechanism) -> Curve:
        """The curve of the largest column norm."""
        scheme = mechanism.scheme
        assert isinstance(scheme, CyclicPoisson)
        found = self._truncated(mechanism) if _cuts(scheme) else self._plain(mechanism)
        if self.adjacency.public_size:
            return found
        if scheme.max_batch_size is not None:
            found = RemarkedCurve(found, sizes_covered(scheme))
        return RemarkedCurve(found, SETTINGS_ARE_PUBLIC)

    def _plain(self, mechanism: MatrixMechanism) -> Curve:
        """No batch is cut."""
        scheme = mechanism.scheme
        assert isinstance(scheme, CyclicPoisson)
        return poisson_curve(
            self.adjacency,
            probability=scheme.probability,
            steps=scheme.max_participations,
            sensitivity=float(mechanism.strategy.column_norms(scheme.steps).max()),
        )

    def _truncated(self, mechanism: MatrixMechanism) -> Curve:
        """The mean over the sizes of the example's part."""
        scheme = mechanism.scheme
        assert isinstance(scheme, CyclicPoisson)
        assert scheme.max_batch_size is not None
        p, turns, largest = scheme.probability, scheme.max_participations, scheme.max_batch_size
        norm = float(mechanism.strategy.column_norms(scheme.steps).max())
        parts: list[tuple[float, ComposedCurve]] = []
        if not self.adjacency.public_size:
            for weight, _, most in independent_sizes(scheme.population + 1, scheme.cycle):
                up_to = curve_up_to(
                    most, probability=p, max_batch_size=largest, steps=turns, sensitivity=norm
                )
                parts.append((weight, up_to))
            return AverageCurve(tuple(parts))
        sizes = equal_sizes if scheme.assignment == "equal" else independent_sizes
        for weight, least, most in sizes(scheme.dataset_size, scheme.cycle):
            cases = Branches.covering(least, most, probability=p, max_batch_size=largest)
            parts.append((weight, CasesCurve(p, cases, turns, norm, self.adjacency)))
        return AverageCurve(tuple(parts))


def _cuts(scheme: CyclicPoisson) -> bool:
    """Whether a draw can exceed the largest batch; under add-remove, with one example more."""
    largest = scheme.part_sizes[-1] if scheme.nominal_size is None else scheme.nominal_size + 1
    return scheme.max_batch_size is not None and scheme.max_batch_size < largest
