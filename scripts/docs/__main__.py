"""``python -m scripts.docs``: what the site and the README take from the code, by hand.

``build`` builds the site strictly into build/site, ``tables`` lists what a page may show of what
was measured, ``readme`` brings the tables of the README up to date.
"""

from __future__ import annotations

import argparse
import sys

from scripts.docs import tables
from scripts.docs.pages import ROOT


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(prog="python -m scripts.docs", description=__doc__)
    parser.add_argument("what", choices=("build", "tables", "readme"))
    what = parser.parse_args().what
    if what == "build":
        from mkdocs.__main__ import cli

        cli(["build", "--strict"])
    elif what == "tables":
        for name in tables.names():
            print(f"<!-- table: {name} -->")
        for name in tables.figures():
            print(f"<!-- figure: {name} -->")
    else:
        readme = ROOT / "README.md"
        readme.write_text(tables.written_out(readme.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
