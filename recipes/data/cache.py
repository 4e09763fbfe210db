"""The folder in which what was read is kept."""

from __future__ import annotations

import os
import pathlib


def cache_folder(path: str | pathlib.Path) -> pathlib.Path:
    """``path`` as a folder, made if missing.

    Raises:
        ValueError: if nothing can be written there.
    """
    folder = pathlib.Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cache_dir={path}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"cache_dir={path}: it cannot be written to; name another folder")
    return folder
