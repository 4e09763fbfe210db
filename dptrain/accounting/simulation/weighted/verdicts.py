"""Verdicts from weighted samples: terms in [0, M] whose mean bounds δ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from dptrain.accounting.simulation.confidence import largest_threshold
from dptrain.accounting.simulation.simulation import DIRECTIONS, chunks
from dptrain.accounting.simulation.weighted.terms import WeightedTerms

_ROUGH_SAMPLES = 16_384
_FIRST_DEPTH = 8
_IN_PARTS = "{l_bar}{bar}| {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"

Point = Callable[[float], dict[str, WeightedTerms]]  # both directions at a point of the grid


class Rule(NamedTuple):
    """When a direction's terms are accepted.

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

    def span(self, ceiling: float) -> tuple[int, int]:
        """The least samples that pay, and enough for a threshold near .9 δ_v (or ``ample``).

        With fewer than about 4 log(1/q) M/δ_v the threshold falls below half of δ_v.
        """
        scale = -math.log(self.failure) * ceiling / self.violated
        least = math.ceil(5.0 * scale) + 1
        return least, max(least, min(math.ceil(200.0 * scale), self.ample))

    def samples(self, ceiling: float) -> int | None:
        """How many to draw, or ``None`` where ``most`` is too few for sampling to pay."""
        least, enough = self.span(ceiling)
        return None if least > self.most else min(enough, self.most)

    def threshold(self, ceiling: float, samples: int) -> float:
        """The largest mean of that many terms in [0, ceiling] that is accepted."""
        return ceiling * largest_threshold(self.violated / ceiling, samples, self.failure)


def judge(
    terms: WeightedTerms,
    rule: Rule,
    *,
    samples: int | None = None,
    seed: Sequence[int],
    threads: int,
    progress: Callable[[float], object],
) -> dict[str, Any]:
    """One direction's verdict, as a JSON-ready row; stops early where it can only be a rejection.

    A ceiling of at most δ_v needs no samples; one that would take more samples than the rule allows
    is a rejection, as nothing shows the direction. ``progress`` is told which share of the samples
    a block is.
    """
    row: dict[str, Any] = {"ceiling": terms.ceiling, "samples": 0, "mean": None}
    if terms.ceiling <= rule.violated:
        return {**row, "threshold": rule.violated, "accepted": True}
    wanted = samples or rule.samples(terms.ceiling)
    if wanted is None:
        return {**row, "threshold": None, "accepted": False}
    threshold = rule.threshold(terms.ceiling, wanted)
    total, used = 0.0, 0
    for block in chunks(terms.draw, lanes=terms.lanes, seed=seed, samples=wanted, threads=threads):
        # The factor covers the rounding of the sum, on the side of rejection.
        total += float(block.sum()) * (1.0 + 1e-12)
        used += block.size
        progress(block.size / wanted)
        if total > wanted * threshold:
            break
    accepted = used == wanted and total <= wanted * threshold
    mean = total / used
    return {**row, "samples": used, "mean": mean, "threshold": threshold, "accepted": accepted}


def verify_points(
    points: Sequence[float],
    terms_at: Point,
    rule: Rule,
    *,
    seed: Sequence[int],
    threads: int,
    progress: bool,
    label: str,
) -> list[dict[str, Any]]:
    """Verdicts for points from the most to the least private, up to the first rejection.

    Accepted is a point whose two directions are; the last one accepted is the answer. It is not
    (ε, δ_v)-private with probability at most q (docs/theory/certification.md#thm-weighted-verdict;
    ``test_false_claims_are_rare``).
    """
    rows = []
    # How many samples a verdict takes shows when it begins: the bar counts verdicts, in parts.
    with tqdm(
        total=len(DIRECTIONS) * len(points), desc=label, unit="verdict", bar_format=_IN_PARTS,
        disable=not progress, delay=2.0,
    ) as bar:  # fmt: skip
        for number, point in enumerate(points):
            terms = terms_at(point)
            row: dict[str, Any] = {"point": point, "remove": None, "add": None, "accepted": True}
            for side, direction in enumerate(DIRECTIONS):
                row[direction] = judge(
                    terms[direction], rule, seed=[*seed, number, side], threads=threads,
                    progress=bar.update,
                )  # fmt: skip
                bar.update(number * len(DIRECTIONS) + side + 1 - bar.n)
                row["accepted"] = row[direction]["accepted"]
                if not row["accepted"]:
                    break
            rows.append(row)
            if not row["accepted"]:
                break
    return rows


def mean_of(terms: WeightedTerms, samples: int, *, seed: Sequence[int], threads: int) -> float:
    """Plain mean of so many terms."""
    drawn = chunks(terms.draw, lanes=terms.lanes, seed=seed, samples=samples, threads=threads)
    return sum(float(block.sum()) for block in drawn) / samples


def estimate_depth(
    terms_at: Point,
    rule: Rule,
    *,
    seed: Sequence[int],
    most: int,
    threads: int,
    progress: bool,
) -> int:
    """The deepest point ≤ ``most`` at which rough means pass the rule; proves nothing.

    Points 0, 1, 2, … ascend from the most private one, at which nothing is drawn.
    """

    def passes(depth: int) -> bool:
        both = terms_at(depth)
        for side, direction in enumerate(DIRECTIONS):
            terms = both[direction]
            if terms.ceiling <= rule.violated:
                continue
            planned = rule.samples(terms.ceiling)
            if planned is None:
                return False
            rough = min(planned, _ROUGH_SAMPLES)
            mean = mean_of(terms, rough, seed=[*seed, depth, side], threads=threads)
            if mean > rule.threshold(terms.ceiling, planned):
                return False
        return True

    with tqdm(
        total=_doublings(most) + most.bit_length(), desc="estimate", unit="point",
        disable=not progress, delay=2.0, leave=False,
    ) as bar:  # fmt: skip
        low, high = 0, _FIRST_DEPTH
        while high < most:
            passed = passes(high)
            bar.update()
            if not passed:
                break
            low, high = high, high * 2
        high = min(high, most)
        bar.total = bar.n + (high - low - 1).bit_length()
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(middle) else (low, middle)
            bar.update()
            bar.total = bar.n + (high - low - 1).bit_length()  # a shorter half may save a point
    return low


def _doublings(most: int) -> int:
    """How often a depth that begins at ``_FIRST_DEPTH`` doubles before it reaches ``most``."""
    return max(0, (most - 1) // _FIRST_DEPTH).bit_length()
