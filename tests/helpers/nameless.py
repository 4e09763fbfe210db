"""Files of past noise that this process has open, which have no name any more."""

from __future__ import annotations

import os
import pathlib


def nameless_files(folder: pathlib.Path) -> dict[str, int]:
    """A descriptor of each file that streams of this process have open, and where it was.

    Of one folder: other tests of the process may keep streams of theirs.
    """
    found = {}
    for link in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith(f"{folder}/.dptrain-noise-"):
            found[target] = int(link.name)  # a map has one of its own
    return found
