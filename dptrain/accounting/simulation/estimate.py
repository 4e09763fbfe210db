"""An estimate of how deep a grid may go, from a few weighted samples; it proves nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from tqdm.auto import tqdm

from dptrain.accounting.simulation.draws import ChunkSums, SharedDraws
from dptrain.accounting.simulation.simulation import DIRECTIONS
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.simulation.verdicts import Point, Rule

_ROUGH_SAMPLES = 16_384
_FIRST_DEPTH = 8
_PRECISE = 0.02  # relative standard error at which no more samples are drawn
_MARGIN = 2.0  # standard errors
# Standard errors, and ceilings of a term, from what the rule accepts at which no more are drawn.
_CLEAR, _CEILINGS = 5.0, 10.0
# A mean that the rule accepts may rest on a few terms near the ceiling: so many of them are to be
# expected before their absence says anything.
_RARE = 6.0
# Relative standard error of rough terms above which they are not trusted.
_SEEN = 0.3


def rough_excess(
    terms: WeightedTerms, rule: Rule, draws: SharedDraws, stream: Sequence[int]
) -> float:
    """log of a rough mean over what the rule accepts in the end, taken so high that it would pass.

    -∞ where nothing needs to be drawn, and ∞ where it would not pay.
    """
    if terms.ceiling <= rule.violated:
        return -math.inf
    rule, reach = rule.of(terms), terms.range_at(rule.violated)
    looks = rule.looks(reach)
    if not looks:
        return math.inf
    last = looks[-1]
    passed = rule.threshold(reach, last)
    drawn = None
    if terms.rough is not None:
        easy = dataclasses.replace(terms, draw=terms.rough)
        drawn = _drawn(draws.sums(easy, _ROUGH_SAMPLES, [*stream, 1]), passed, _seen)
    if drawn is None or not _seen(drawn):  # rough terms may miss what counts
        telling = min(last, math.ceil(_RARE * reach / passed))
        sums = draws.sums(terms, max(min(last, _ROUGH_SAMPLES), telling), stream)
        few = _CEILINGS * reach
        drawn = _drawn(sums, passed, lambda each: each.size >= telling, few)
    used, total, squares = drawn
    # The verdict's own error counts as well.
    error = math.sqrt(squares) / used * math.sqrt(1.0 + used / last)
    upper = total / used + _MARGIN * error
    return math.log(upper / passed) if upper > 0.0 else -math.inf


def _drawn(
    sums: Iterable[ChunkSums], passed: float, tells: Callable[[ChunkSums], bool], few: float = 0.0
) -> ChunkSums:
    """Sums until they are precise and tell something, or far from what is ``passed``."""
    found = ChunkSums(0, 0.0, 0.0)
    for each in sums:
        found = ChunkSums(
            found.size + each.size, found.total + each.total, found.squares + each.squares
        )
        error = math.sqrt(found.squares)
        if tells(found) and error <= _PRECISE * found.total:
            break
        far = abs(found.total - found.size * passed) - few
        if (few or tells(found)) and far >= _CLEAR * error:
            break
    return found


def _seen(drawn: ChunkSums) -> bool:
    return math.sqrt(drawn.squares) < _SEEN * drawn.total


def estimate_depth(
    terms_at: Point,
    rule: Rule,
    draws: SharedDraws,
    purpose: int,
    *,
    most: int,
) -> int:
    """The deepest point ≤ ``most`` at which rough means pass the rule with a margin.

    Points 0, 1, 2, … ascend from the most private one, at which nothing is drawn. Logarithms of
    means are near a straight line in the depth, so the next point is where that reaches the rule.
    """

    def excess(depth: int) -> float:
        both, found = terms_at(depth), -math.inf
        for side, direction in enumerate(DIRECTIONS):
            stream = [purpose, depth, side]
            found = max(found, rough_excess(both[direction], rule, draws, stream))
            if found > 0.0:
                break
        return found

    with tqdm(
        total=_doublings(most) + most.bit_length(), desc="estimate", unit="point",
        disable=not draws.progress, delay=2.0, leave=False,
    ) as bar:  # fmt: skip
        low, high, below, above = 0, _FIRST_DEPTH, -math.inf, math.inf
        while high < most:
            value = excess(high)
            bar.update()
            if value > 0.0:
                above = value
                break
            low, high, below = high, high * 2, value
        high = min(high, most)
        halvings = 0
        while high - low > 1:
            middle = (low + high) // 2
            if math.isfinite(below) and math.isfinite(above) and halvings < 2:
                guess = low + (high - low) * below / (below - above)
                middle, halvings = min(max(math.floor(guess), low + 1), high - 1), halvings + 1
            else:
                halvings = 0
            bar.total = bar.n + (high - low - 1).bit_length() + 2
            value = excess(middle)
            if value > 0.0:
                high, above = middle, value
            else:
                low, below = middle, value
            bar.update()
        bar.total = bar.n
    return low


def _doublings(most: int) -> int:
    """Number of doublings of a depth from ``_FIRST_DEPTH`` until it reaches ``most``."""
    return max(0, (most - 1) // _FIRST_DEPTH).bit_length()
