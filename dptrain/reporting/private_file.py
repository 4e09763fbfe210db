"""Files that hold numbers of single examples: marked, readable by their owner only."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

MARK = "not for release"
"""The notice on everything that was computed from raw training examples."""

WARNING = (
    "NOT FOR RELEASE: private data. The numbers below were computed from the raw training "
    "examples and are not covered by the guarantee of the model."
)
"""The first line of such a file."""
OWNER_ONLY = 0o600
"""The mode of a file that its owner reads and writes, and nobody else."""


def free_path(path: str | pathlib.Path, default: str, *, overwrite: bool) -> pathlib.Path:
    """The path at which a private file may be written.

    Args:
        path: a file, or a folder that is there, in which it is called ``default``.
        default: file name.
        overwrite: whether a file that is there may be replaced.

    Raises:
        ValueError: if the folder is missing, or the file is there and may not be replaced.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path = path / default
    if not path.parent.is_dir():
        raise ValueError(
            f"path={path}: the folder {path.parent} does not exist; create it first, readable by "
            "nobody but you"
        )
    if path.is_dir():
        raise ValueError(f"path={path} is a folder: must be a file")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise ValueError(f"path={path} already exists: choose another name, or set overwrite=True")
    return path


def has_line_break(name: str) -> bool:
    """True if a name would take more than one line of a file."""
    return "\n" in name or "\r" in name


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Make every file or folder that this process creates meanwhile readable by its owner only."""
    before = os.umask(0o777 & ~0o700)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def in_place(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path beside ``path`` to write to; it becomes ``path`` at the end, readable by its owner.

    A file that was there stays as it is if writing fails.
    """
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".private-", suffix=path.suffix)
    os.close(number)
    temporary = pathlib.Path(name)
    try:
        yield temporary
        temporary.chmod(OWNER_ONLY)  # mkstemp's mode, unless the writer has changed it
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
