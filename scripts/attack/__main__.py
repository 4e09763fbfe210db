"""``python -m scripts.attack``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from scripts.attack import canaries, inputs, kills, layers, mechanisms, modules, ranks, release
from scripts.attack.harness import attack, summary

PARTS = {
    part.name: part
    for part in (
        mechanisms.PART,
        layers.PART,
        modules.PART,
        inputs.PART,
        canaries.PART,
        kills.PART,
        ranks.PART,
        release.PART,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Attack; the exit status is 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.attack", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default 0)")
    parser.add_argument("--cases", type=int, help="so many of each part, instead of --minutes")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args(argv)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"{name!r} is no part: choose from {', '.join(PARTS)}")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes}: must be above 0")
    if options.seed < 0 or (options.cases is not None and options.cases < 1):
        parser.error("--seed must not be negative, and --cases at least 1")
    tallies = attack(
        [PARTS[name] for name in dict.fromkeys(options.parts or PARTS)],
        seconds=60 * options.minutes,
        seed=options.seed,
        cases=options.cases,
        progress=not options.quiet,
    )
    print(summary(tallies))
    return int(any(tally.failures for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
