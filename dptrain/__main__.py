"""``python -m dptrain``: the command line without an installed script."""

import sys

from dptrain.commands import main

if __name__ == "__main__":
    sys.exit(main())
