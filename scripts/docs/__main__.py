"""``python -m scripts.docs build``: the site, strictly, into build/site."""

from __future__ import annotations

import sys

from mkdocs.__main__ import cli

if __name__ == "__main__":
    sys.exit(cli(["build", "--strict"]))
