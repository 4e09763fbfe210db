"""Put together what several processes or machines have verified of one declared certificate."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dptrain.accounting.simulation.certificate import certificate_of
from dptrain.accounting.simulation.partial_certificate import PartialCertificate


def merge(partials: Sequence[PartialCertificate]) -> PartialCertificate:
    """All chunks of partial certificates of one declaration (request, seed, grid, versions).

    When all s samples are in, ``certificate_of`` makes of it the certificate that a single process
    would have made, whatever the order of the partial ones.

    Raises:
        ValueError: if there are none, they belong to different declarations, or share a chunk.
    """
    if not partials:
        raise ValueError("partials: there is nothing to merge")
    return functools.reduce(PartialCertificate.with_chunks, partials)


def merge_files(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """The certificate that the partial certificates in these files add up to.

    Raises:
        ValueError: as ``merge``, naming the two files; if a file is corrupt or no partial
            certificate; if samples are missing, saying which.
        FileNotFoundError: if a file is missing.
    """
    return certificate_of(merge_partial_files(paths))


def merge_partial_files(paths: Sequence[str | os.PathLike[str]]) -> PartialCertificate:
    """``merge`` of files; errors name them."""
    if not paths:
        raise ValueError("paths: there is nothing to merge")
    loaded = [(Path(path), PartialCertificate.load(Path(path))) for path in paths]
    for index, (path, partial) in enumerate(loaded):
        for earlier, before in loaded[:index]:
            try:
                before.with_chunks(partial)
            except ValueError as error:
                raise ValueError(f"{earlier} and {path}: {error}") from error
    return merge([partial for _, partial in loaded])
