"""A verification that is not complete: what was declared, and the sums of the chunks done."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dptrain.accounting.simulation.certificate_cache import write_json
from dptrain.accounting.simulation.chunk_sums import Sums, replay
from dptrain.accounting.simulation.declaration import Declaration
from dptrain.core import digest

WHAT = "partial certificate: it proves nothing and states no noise multiplier"
FORMAT = 1
Range = tuple[int, int]


def ranges_of(chunks: Iterable[int]) -> list[Range]:
    """Ascending, maximal ranges (first, end) of a set of chunks."""
    found: list[Range] = []
    for chunk in sorted(chunks):
        if found and found[-1][1] == chunk:
            found[-1] = (found[-1][0], chunk + 1)
        else:
            found.append((chunk, chunk + 1))
    return found


def describe(ranges: Sequence[Range]) -> str:
    """Ranges in words: ``chunks 0-4, 7``."""
    parts = [f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in ranges]
    shown = parts if len(parts) <= 8 else [*parts[:8], f"… ({len(parts)} ranges)"]
    return f"chunks {', '.join(shown)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialCertificate:
    """Chunks of one declared verification.

    Args:
        declaration: what was fixed before.
        done: the chunks whose samples are in.
        sums: their exact sums, by chunk; chunks without an entry have none but zeros.
        shares: which shares ``"i/k"`` they come from, where they do.

    Why chunks may come in any order, from anyone: their streams are independent, a chunk's sums
    are integers, and the verdicts read them in the order of the chunks. A process leaves out a σ
    that it knows to be ruled out by chunks *before* the one at hand, and those are part of what it
    hands on or was given; so the reading, which has them all, has ruled it out by then as well and
    never asks for it: the certificate is the one that a single process would have made.
    """

    declaration: Declaration
    done: frozenset[int] = frozenset()
    sums: Mapping[int, Sums] = dataclasses.field(default_factory=dict)
    shares: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """How many of the s samples a direction are in."""
        return sum(self.declaration.samples_in(*each) for each in ranges_of(self.done))

    @property
    def missing(self) -> list[int]:
        """The chunks that are not in."""
        return [chunk for chunk in range(self.declaration.chunks) if chunk not in self.done]

    def verdicts(self) -> list[dict[str, Any]] | None:
        """The verdicts on the declared σ, or ``None`` while samples that matter are missing.

        Raises:
            ValueError: if a chunk lacks the sums of a σ that was not ruled out before it.
        """
        declared = self.declaration
        return replay(declared.verdicts(), declared.size, self.done, self.sums)

    def with_chunks(self, other: PartialCertificate) -> PartialCertificate:
        """Both together: the same declaration, disjoint chunks.

        Raises:
            ValueError: if they are not.
        """
        mine, theirs = self.declaration.to_dict(), other.declaration.to_dict()
        if different := sorted(field for field in mine if mine[field] != theirs[field]):
            raise ValueError(
                f"they belong to different verifications: {', '.join(different)} differ "
                f"({_first_difference(mine[different[0]], theirs[different[0]])})"
            )
        if both := self.done & other.done:
            raise ValueError(
                f"both contain {describe(ranges_of(both))}; a share may be counted once only"
            )
        return PartialCertificate(
            declaration=self.declaration,
            done=self.done | other.done,
            sums={**self.sums, **other.sums},
            shares=tuple(dict.fromkeys((*self.shares, *other.shares))),
        )

    def progress(self) -> str:
        """How far it is, in words."""
        return f"{self.samples:,} of {self.declaration.samples:,} samples a direction are in"

    def absent(self) -> str:
        """Which chunks are missing, and of which shares where that is known."""
        text = describe(ranges_of(self.missing))
        counts = {share.split("/")[1] for share in self.shares}
        if len(counts) == 1:
            (count,) = counts
            absent = [f"{i}/{count}" for i in range(1, int(count) + 1)]
            if left := [share for share in absent if share not in self.shares]:
                text += f" (of shards {', '.join(left)})"
        return text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value, with a digest."""
        value = {
            "what": WHAT,
            "format": FORMAT,
            "declaration": self.declaration.to_dict(),
            "done": [list(each) for each in ranges_of(self.done)],
            "sums": {str(chunk): [list(row) for row in self.sums[chunk]] for chunk in self.sums},
            "shares": list(self.shares),
            "progress": self.progress(),
        }
        return {**value, "digest": digest(value)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> PartialCertificate:
        """Read what ``to_dict`` wrote.

        Raises:
            ValueError: if it is something else, or damaged.
        """
        value = dict(value)
        if value.get("what") != WHAT or value.get("format") != FORMAT:
            raise ValueError("it is not a partial certificate of this version")
        if value.pop("digest", None) != digest(value):
            raise ValueError("its digest does not match its contents")
        found = cls(
            declaration=Declaration.from_dict(value["declaration"]),
            done=frozenset(chunk for first, end in value["done"] for chunk in range(first, end)),
            sums={
                int(chunk): tuple(tuple(int(each) for each in row) for row in rows)
                for chunk, rows in value["sums"].items()
            },
            shares=tuple(value["shares"]),
        )
        if not found.done >= set(found.sums) or max(found.done, default=0) > (
            found.declaration.chunks - 1
        ):
            raise ValueError("its chunks are not those of its declaration")
        return found

    def store(self, path: Path) -> None:
        """Write atomically."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: Path) -> PartialCertificate:
        """Read a file.

        Raises:
            ValueError: if it is corrupt or something else.
            FileNotFoundError: if there is none.
        """
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}: not a usable partial certificate ({error}); restore the file, or delete "
                "it to begin another attempt"
            ) from error


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


def merge_partial_files(paths: Sequence[str | os.PathLike[str]]) -> PartialCertificate:
    """``merge`` of files.

    Raises:
        ValueError: as there, naming the two files; if a file is corrupt or no partial certificate.
        FileNotFoundError: if a file is missing.
    """
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


def _first_difference(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = sorted({*mine, *theirs})
        key = next(key for key in keys if mine.get(key) != theirs.get(key))
        return f"{key}: {_first_difference(mine.get(key), theirs.get(key))}"
    return f"{str(mine)[:120]} and {str(theirs)[:120]}"
