"""Engines broken on purpose: the power of the audit that finds each, and how often it did.

The power is computed (``tests/helpers/broken_engines.py``); beside it stand runs of the broken and
of the whole engine with the same seeds. A whole one fails an audit with a chance of a millionth.

Run: PYTHONPATH=. python scripts/bench/broken_engines.py [--runs 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import warnings

from tqdm import tqdm

from tests.helpers.broken_engines import CHANCE, FAULTS
from tests.helpers.broken_release import RELEASE_FAULTS
from tests.helpers.broken_user_engines import USER_FAULTS

OUT = pathlib.Path(__file__).parent / "results" / "broken_engines.json"


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
            rows.append(
                {
                    "name": name,
                    "fault": fault.what,
                    "found_by": fault.found_by,
                    "missed": 1.0 - fault.power(),
                    **failed,
                }
            )
            tqdm.write(
                f"{fault.what}: power 1 - {rows[-1]['missed']:.2g}; of {options.runs} broken "
                f"{failed['broken']} failed, of as many whole {failed['whole']}"
            )
    if options.json:
        tree = {"chance": CHANCE, "runs": options.runs, "rows": rows}
        OUT.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
