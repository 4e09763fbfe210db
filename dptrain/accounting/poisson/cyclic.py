"""Cyclic Poisson sampling with a banded strategy: composed subsampled Gaussians.

Sizes of the part of one example in cyclic sampling, gathered into intervals.
"""

from __future__ import annotations

import math

from scipy.stats import binom

from dptrain.accounting.base.accountant import Cost
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.poisson.curves import AverageCurve, CasesCurve, ComposedCurve
from dptrain.accounting.poisson.poisson import SETTINGS_ARE_PUBLIC, RemarkedCurve, poisson_curve
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

    (Choquette-Choo et al. 2023, Theorem 4 on cyclic Poisson sampling; with truncation Ganesh 2025,
    section 3.1, on BandMF.) Proof, under *zero-out*:

    * The split into parts does not depend on what examples contain (and N, which an equal split
      reads, is the same on both data sets), so it may be published: δ is the mean over splits of
      the δ given the split, at most the worst one. That covers both assignments.
    * Let the example be in part s and publish everybody else's coins, which its own are independent
      of. At steps s, s + b, … it tosses coins of probability p; at others it contributes nothing.
      Given all that was released before step t = s + ib, the coin of t decides whether the
      contribution v_t, ‖v_t‖ ≤ 1, fixed by then, is added to the rows of column t. Those rows are
      touched by no other step of the example (bands ≤ b), end before its next step, and are shifted
      otherwise by what others contribute, which is known from the releases. So the release of
      these rows is a Gaussian of sensitivity at most ‖C_{:,t}‖, subsampled with probability p, and
      the blocks compose adaptively.
    * A smaller norm is a larger σ for the same norm, which is post-processing: the largest column
      norm of all dominates each. A part has ceil(n/b) steps or one fewer, and a step fewer is
      post-processing too.
    * With ``max_batch_size`` the draw of a turn is a truncated Poisson draw from the m examples of
      the part: given the split, its other m - 1 examples are known, the example may displace one
      of them, and the displaced gradient is one of step t too. So column t carries the pair of
      ``TruncatedPoissonPLD`` with N = m and c = ‖C_{:,t}‖.
      Truncated privacy is not known to be monotone in m, so δ is the mean over m of the δ given m:
      two sizes that differ by one for ``"equal"``, 1 + Bin(N-1, 1/b) for ``"independent"``, there
      by intervals of m, each bounded at once (``Branches.covering``).

    *Add-or-remove-one*, for ``assignment="independent"``. There every example picks its part by
    itself: the others are split alike in both worlds, the added one joins part s with probability
    1/b, and given s and the split its turns are as under zero-out (with truncation: those of
    ``TruncatedPoissonPLD`` under add-or-remove-one for a part s of size m).

    With truncation the statement is for every run on at most M = ``nominal_size`` examples, with
    one more or one fewer, as N is private. For N ≤ M + 1 examples, m = 1 + Bin(N-1, 1/b). The δ
    given m is at most that of all sizes up to m at once, F(m) (``curve_up_to``), which grows
    with m; and m grows, in the stochastic order, with N. So the mean of δ over m is at most the
    mean of F over 1 + Bin(M, 1/b), whatever N is.

    Equal parts read N: with one example fewer, others have to move between parts, and change their
    turns. No theorem covers that.

    *Replace-one.* N and the split are the same in both worlds. Given them, a turn adds x or x'
    (or x - w or x' - w) by the same coins to the rows of its column: the pair of ``PoissonPLD``
    (``TruncatedPoissonPLD``) under replace-one with c = ‖C_{:,t}‖.

    The signs of C's entries play no part. With one part it is (truncated) Poisson sampling and
    without truncation exact; otherwise the split is random and hidden, of which no use is made: an
    upper bound.
    """

    name = "cyclic-poisson-pld"
    display = "cyclic Poisson PLD"
    kind = Kind.UPPER_BOUND
    adjacencies = tuple(Adjacency)
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
        private = self.adjacency is Adjacency.ADD_REMOVE
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
        if self.adjacency is not Adjacency.ADD_REMOVE:
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
        if self.adjacency is Adjacency.ADD_REMOVE:
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
