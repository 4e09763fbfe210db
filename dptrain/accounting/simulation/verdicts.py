"""Verdicts from weighted samples: terms in [0, M] whose mean bounds δ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from dptrain.accounting.simulation.confidence import largest_threshold
from dptrain.accounting.simulation.draws import SharedDraws
from dptrain.accounting.simulation.terms import Both, WeightedTerms
from dptrain.core import checks

_IN_PARTS = "{l_bar}{bar}| {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"
# Looks at the samples drawn so far: the first where next to nothing has been seen, each later one
# at so many times as many.
_FIRST_LOOK, _NEXT_LOOK, _MOST_LOOKS = 1.3, 1.6, 12
# Of samples without weights, times the samples at which a mean of 0 is just enough.
_AMPLE = 70.0
_HOPELESS = 4.0  # standard errors above what would be accepted in the end

Point = Callable[[float], Both]  # both directions at a point of the grid


class Rule(NamedTuple):
    """The rule by which a direction's terms are accepted.

    A direction is looked at several times while its samples come in, and accepted at the first look
    that shows enough: each look may err with an equal share of q
    (docs/theory/certification.md#thm-weighted-looks).

    Attributes:
        violated: δ_v, the δ that a rejected mechanism may have and an accepted one should not.
        failure: q, the chance that a mechanism whose δ exceeds δ_v is accepted.
        most: samples a direction at most.
        ample: samples a direction that are drawn though fewer would do, for a higher threshold.
    """

    violated: float
    failure: float
    most: int
    ample: int = 65_536

    @classmethod
    def plain(cls, violated: float, failure: float, most: int) -> Rule:
        """The rule of samples without weights, for a threshold of .83 δ_v at the last look."""
        rule = cls(violated, failure, most)
        return rule._replace(ample=math.ceil(_AMPLE * rule._scale(1.0)))

    def of(self, terms: WeightedTerms) -> Rule:
        """The rule for these terms; more are ample where they are of noise alone, soon drawn."""
        return self if terms.bounded else self._replace(ample=2 * self.ample)

    def _scale(self, ceiling: float) -> float:
        """Number of samples in [0, ceiling] of which a mean of 0 is just enough at one look."""
        return math.log(_MOST_LOOKS / self.failure) * ceiling / self.violated

    def span(self, ceiling: float) -> tuple[int, int]:
        """The least samples of a last look, and those for a threshold near .9 δ_v (or ``ample``).

        With 4.2 times the least for a mean of 0 the threshold is about .4 δ_v.
        """
        scale = self._scale(ceiling)
        least = math.ceil(4.2 * scale) + 1
        return least, max(least, min(math.ceil(200.0 * scale), self.ample))

    def looks(self, ceiling: float) -> list[int]:
        """Numbers of samples at each look, ascending; none where ``most`` is too few."""
        least, enough = self.span(ceiling)
        if least > self.most:
            return []
        last = min(enough, self.most)
        found = [math.ceil(_FIRST_LOOK * self._scale(ceiling)) + 1]
        while found[-1] * _NEXT_LOOK < last:
            found.append(math.ceil(found[-1] * _NEXT_LOOK))
        checks.invariant(
            len(found) < _MOST_LOOKS, "more looks are planned than the confidence is divided among"
        )
        return [*found, last]

    def is_look(self, ceiling: float, samples: int) -> bool:
        """True if a verdict may come after so many samples, whatever ``most`` was."""
        least, enough = self.span(ceiling)
        looks = self._replace(most=max(self.most, enough)).looks(ceiling)
        # Another machine's last digits may round up otherwise.
        return least <= samples <= enough + 1 or any(abs(samples - each) <= 1 for each in looks)

    def threshold(self, ceiling: float, samples: int) -> float:
        """The largest mean of that many terms in [0, ceiling] that a look accepts."""
        share = self.failure / _MOST_LOOKS
        return ceiling * largest_threshold(self.violated / ceiling, samples, share)

    def shared(self, count: int) -> Rule:
        """The rule of one of so many tests, of which any may be wrong."""
        return self._replace(failure=self.failure / count)


def judge(
    terms: WeightedTerms,
    rule: Rule,
    *,
    draws: SharedDraws,
    stream: Sequence[int],
    progress: Callable[[float], object],
    point: float = 0.0,
) -> dict[str, Any]:
    """One direction's verdict, as a JSON-ready row; stops early where it can only be a rejection.

    A ceiling of at most δ_v needs no samples; one that would take more samples than the rule allows
    is a rejection, as nothing shows the direction. ``progress`` is told which share of the samples
    a block is.
    """
    row: dict[str, Any] = {"ceiling": terms.ceiling, "samples": 0, "mean": None}
    if terms.ceiling <= rule.violated:
        return {**row, "threshold": rule.violated, "accepted": True}
    rule, reach = rule.of(terms), terms.range_at(rule.violated)
    looks = rule.looks(reach)
    if not looks:
        return {**row, "threshold": None, "accepted": False}
    end = rule.threshold(reach, looks[-1])
    total, squares, used = 0.0, 0.0, 0
    for number, wanted in enumerate(looks):
        for size, chunk, squared in draws.sums(terms, wanted - used, [*stream, number], point):
            # The factor covers the rounding of the sum, on the side of rejection.
            total += chunk * (1.0 + 1e-12)
            squares += squared
            used += size
            progress(size / looks[-1])
            if total > looks[-1] * end:
                break
        mean = total / used
        threshold = rule.threshold(reach, wanted)
        accepted = used == wanted and mean <= threshold
        error = math.sqrt(squares) / used
        if accepted or used < wanted or mean - _HOPELESS * error > end:
            break
    return {**row, "samples": used, "mean": mean, "threshold": threshold, "accepted": accepted}


def verify_points(
    points: Sequence[float],
    terms_at: Point,
    rule: Rule,
    draws: SharedDraws,
    purpose: int,
) -> list[dict[str, Any]]:
    """Verdicts for points from the most to the least private, up to the first rejection.

    The add direction, mostly the smaller one, is shown once: at the last point, and only if it is
    rejected there at the one before, and so on; points beyond the one where it was accepted are
    not looked at. The remove direction is shown at each point from the first on. Accepted is a
    point whose two directions are; the last one accepted is the answer. It is not (ε, δ_v)-private
    with probability at most q (docs/theory/certification.md#thm-weighted-looks;
    ``test_false_claims_are_rare``).
    """
    # How many samples a verdict takes shows when it begins: the bar counts verdicts, in parts.
    with tqdm(
        total=1 + len(points), desc="certify", unit="verdict", bar_format=_IN_PARTS,
        disable=not draws.progress, delay=2.0,
    ) as bar:  # fmt: skip

        def verdict(number: int, direction: str, each: Rule) -> dict[str, Any]:
            side = 1 if direction == "add" else 0
            return judge(
                terms_at(points[number])[direction], each, draws=draws,
                stream=[purpose, number, side], progress=bar.update, point=points[number],
            )  # fmt: skip

        add, end = None, len(points)
        while end > 0:
            add = {"point": points[end - 1], **verdict(end - 1, "add", rule.shared(len(points)))}
            bar.total, bar.n = 1 + end, 1
            bar.refresh()
            if add["accepted"]:
                break
            end -= 1
        rows = []
        for number in range(end):
            remove = verdict(number, "remove", rule)
            bar.update(number + 2 - bar.n)
            accepted = remove["accepted"]
            rows.append(
                {"point": points[number], "remove": remove, "add": add, "accepted": accepted}
            )
            if not accepted:
                break
    return rows
