"""Engines broken on purpose: the power of the audit that finds each, and how often it did.

The power is computed (``tests/helpers/broken_engines.py``); beside it stand runs of the broken and
of the whole engine with the same seeds. A whole one fails an audit with a chance of a millionth.

Run: PYTHONPATH=. python scripts/bench/broken_engines.py [--runs 20] [--json]
"""

from __future__ import annotations

import argparse
import pathlib
import warnings

from tqdm import tqdm

from scripts import results
from tests.helpers.broken_engines import CHANCE, FAULTS
from tests.helpers.broken_release import RELEASE_FAULTS
from tests.helpers.broken_user_engines import USER_FAULTS

OUT = pathlib.Path(__file__).parent / "results" / "broken_engines.json"
COLUMNS = (
    ("engine", "{fault}"),
    ("found by", "{found_by}"),
    ("chance that it is missed", "{shown}"),
    ("broken engines that failed", "{broken} of {runs}"),
    ("whole ones that failed", "{whole} of {runs}"),
)


def main() -> None:
    """Print a line for each fault; with ``--json`` write them too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each engine (default 20)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of a fixed seed, and of σ that guarantees nothing
    rows = []
    faults = [
        *FAULTS.items(),
        *((f"release: {name}", each) for name, each in RELEASE_FAULTS.items()),
        *((f"users: {name}", each) for name, each in USER_FAULTS.items()),
    ]
    with tqdm(total=2 * options.runs * len(faults), unit="run") as bar:
        for name, fault in faults:
            failed = {"broken": 0, "whole": 0}
            for seed in range(options.runs):
                failed["whole"] += bool(fault.audited(seed))
                with fault.broken():
                    failed["broken"] += bool(fault.audited(seed))
                bar.update(2)
            missed = 1.0 - fault.power()
            rows.append(
                {
                    "name": name,
                    "fault": fault.what,
                    "found_by": fault.found_by,
                    "missed": missed,
                    "shown": f"{missed:.0e}" if missed >= 1e-12 else "< 1e-12",
                    **failed,
                    "runs": options.runs,
                }
            )
    results.publish(
        OUT if options.json else None,
        {"broken_engines": results.Table(COLUMNS, rows)},
        script=__file__,
        chance=CHANCE,
    )


if __name__ == "__main__":
    main()
