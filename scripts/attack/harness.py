"""Runs the cases of the parts, counts, and says what failed and how to see it again."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence

from tqdm.auto import tqdm


class Finding(AssertionError):
    """A case in which what is stated is not so."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One way to attack.

    Args:
        name: on the command line.
        counts: what a case's number counts, in the plural.
        case: does one case, by its seed; returns how many there were in it. It raises
            ``Finding``, or anything else, which counts as one too.
        share: of the time, relative to the other parts.
    """

    name: str
    counts: str
    case: Callable[[int], int]
    share: float = 1.0


@dataclasses.dataclass
class Tally:
    """The result of a part."""

    part: Part
    cases: int = 0
    done: int = 0
    failures: list[tuple[int, str]] = dataclasses.field(default_factory=list)


def attack(
    parts: Sequence[Part],
    *,
    seconds: float,
    seed: int,
    cases: int | None = None,
    progress: bool = True,
) -> list[Tally]:
    """Each part for its share of the time, one case at least, or for so many cases."""
    total = sum(part.share for part in parts)
    tallies = []
    for part in parts:
        tally = Tally(part)
        tallies.append(tally)
        _run(tally, seconds * part.share / total, seed, cases, progress)
    return tallies


def _run(tally: Tally, seconds: float, seed: int, cases: int | None, progress: bool) -> None:
    part, started = tally.part, time.monotonic()
    # Where cases are counted the bar counts them, else it shows how much of the time is over.
    whole, unit = (cases, "case") if cases is not None else (round(seconds), "s")
    with tqdm(total=whole, desc=part.name, unit=unit, disable=not progress) as bar:
        while True:
            index = seed + tally.cases
            try:
                tally.done += part.case(index)
            except Exception as error:
                tally.failures.append((index, _said(error)))
                bar.write(report(part, index, tally.failures[-1][1]))
            tally.cases += 1
            passed = time.monotonic() - started
            bar.set_postfix_str(f"{tally.done} {part.counts}, {len(tally.failures)} failures")
            bar.update(1 if cases is not None else min(round(passed), whole) - bar.n)
            if tally.cases >= cases if cases is not None else passed >= seconds:
                return


def report(part: Part, seed: int, what: str) -> str:
    """A failure, and how to see it again."""
    again = f"python -m scripts.attack {part.name} --seed {seed} --cases 1"
    return f"FAILED {part.name}, seed {seed}: {what}\n  again: {again}"


def _said(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return str(error)
    return (
        f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
    )


def summary(tallies: Sequence[Tally]) -> str:
    """The last line."""
    counts = ", ".join(f"{tally.done} {tally.part.counts}" for tally in tallies)
    return f"attack: {counts}, {sum(len(tally.failures) for tally in tallies)} failures"
