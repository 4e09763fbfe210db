"""Sums of terms that are drawn in chunks: by threads, by several processes, kept on disk."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dptrain.accounting.simulation.simulation import chunks
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.core import Array

T = TypeVar("T")
WHAT = "unfinished simulation: it proves nothing and states no noise multiplier"
_ROUND = 8  # chunks that each of several processes draws before it hears of the others'


class ChunkSums(NamedTuple):
    """The number of a chunk's terms, their sum, and that of their squares."""

    size: int
    total: float
    squares: float


class Processes:
    """The processes that draw together: this one alone, unless a subclass knows of others.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    rank = 0
    size = 1

    def from_first(self, work: Callable[[], T]) -> T:
        """The result of ``work`` on the first process, on all of them."""
        return work()

    def all(self, value: T) -> list[T]:
        """Everybody's value, on all of them."""
        return [value]

    def agree(self, question: Any) -> None:
        """Refuse to share draws among processes that are asked different things.

        Raises:
            ValueError: on all of them.
        """
        _check_same(self.all(question))


ALONE = Processes()


class Kept:
    """The sums of a simulation that is not finished, a line a chunk after one that says of what.

    The seed stands in the first line, before anything is drawn: whoever asks the same question goes
    on with the same draws instead of making another attempt
    (docs/theory/certification.md#thm-chunks). So does the rule: whoever asks with another one is
    refused, since it decides what is declared, and that may not follow from samples that verify.
    The file is one that the caller holds (``certificate_cache.held``).
    """

    def __init__(
        self, path: Path, question: dict[str, Any], rule: Sequence[Any], seed: int
    ) -> None:
        self.path, self.seed = path, seed
        self.known: dict[tuple[float, ...], dict[int, ChunkSums]] = {}
        versions = {"numpy": np.__version__, "torch": torch.__version__}
        first = {"what": WHAT, "question": question, "versions": versions, "rule": list(rule)}
        # A line that an end of the process cut short has no newline; the others stay as they are.
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        *lines, cut = text.split("\n")
        if lines:
            self._read(lines, first)
        if cut:
            os.truncate(path, len(text.encode()) - len(cut.encode()))
        if not lines:
            self._append({**first, "seed": str(seed)})

    def _append(self, value: Any) -> None:
        text = json.dumps(value)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{zlib.crc32(text.encode()):08x} {text}\n")

    def _read(self, lines: Sequence[str], first: dict[str, Any]) -> None:
        try:
            values = [self._value(line) for line in lines]
            self.seed = int(values[0].pop("seed"))
            for stream, chunk, *sums in values[1:]:
                self.known.setdefault(tuple(stream), {})[chunk] = ChunkSums(*sums)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(
                f"{self.path}: damaged file of an unfinished simulation ({error}); restore it, or "
                "delete it to start another attempt"
            ) from error
        asked = json.loads(json.dumps(first))
        if values[0].get("rule") != asked["rule"]:
            raise ValueError(
                f"{self.path}: it was started with another max_samples, ample or number of "
                "attempts; continue with those of the first call, or delete it to begin another "
                "attempt"
            )
        if values[0] != asked:
            raise ValueError(
                f"{self.path}: it was started with {values[0].get('versions')}, but these are "
                f"{first['versions']}, which draw other samples; use those versions, or delete it "
                "to start another attempt"
            )

    @staticmethod
    def _value(line: str) -> Any:
        check, _, text = line.partition(" ")
        if check != f"{zlib.crc32(text.encode()):08x}":
            raise ValueError("a line does not match its checksum")
        return json.loads(text)

    def add(self, place: Sequence[float], chunk: int, sums: ChunkSums) -> None:
        """Remember a chunk of what is drawn in a place: a stream, its point and its ceiling."""
        self.known.setdefault(tuple(place), {})[chunk] = sums
        self._append([list(place), chunk, *sums])

    @property
    def samples(self) -> int:
        """Number of samples that are kept."""
        return sum(each.size for chunks in self.known.values() for each in chunks.values())


@dataclasses.dataclass(frozen=True)
class SharedDraws:
    """The processes and threads that draw, and their seed.

    Attributes:
        threads: of this process; the results do not depend on them.
        together: the processes that share the work; nor do they depend on these.
        kept: where sums are left, if they are, for a continuation.
    """

    seed: int
    threads: int
    progress: bool = False
    together: Processes = ALONE
    kept: Kept | None = None

    def __enter__(self) -> SharedDraws:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Delete what was kept, once it is of no use; say where it is if interrupted."""
        if kind is None and self.kept is not None and self.together.rank == 0:
            self.kept.path.unlink(missing_ok=True)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            where = "samples are lost; set cache to keep them next time"
            if self.kept is not None:
                where = (
                    f"{self.kept.samples:,} samples are kept in {self.kept.path}: the same call "
                    "continues"
                )
            raise KeyboardInterrupt(where) from None

    def sums(
        self, terms: WeightedTerms, samples: int, stream: Sequence[int], point: float = 0.0
    ) -> Iterator[ChunkSums]:
        """The sums of so many terms, chunk by chunk in order, the same whoever drew which.

        Chunk i draws from ``SeedSequence([seed, *stream], spawn_key=(i,))``. Kept are sums for the
        same stream, point and ceiling.
        """
        key, count, team = tuple(stream), -(-samples // terms.lanes), self.together
        place = (*key, point, terms.ceiling)
        known = dict(self.kept.known.get(place, {})) if self.kept is not None else {}
        step = count if team.size == 1 else _ROUND * team.size
        for first in range(0, count, step):
            missing = [i for i in range(first, min(first + step, count)) if i not in known]
            fresh = chunks(
                lambda rng, size: _sums(terms.draw(rng, size)), lanes=terms.lanes,
                seed=[self.seed, *key], samples=samples, threads=self.threads,
                indices=missing[team.rank :: team.size],
            )  # fmt: skip
            shared: dict[int, ChunkSums] = {}
            if team.size > 1:
                asked = (self.seed, place, samples)
                shared = self._exchanged(asked, missing, fresh)
            for index in range(first, min(first + step, count)):
                found = known.get(index)
                if found is None:
                    found = shared[index] if shared else next(fresh)
                    if self.kept is not None and team.rank == 0:
                        self.kept.add(place, index, found)
                yield found

    def _exchanged(
        self, question: Any, missing: Sequence[int], fresh: Iterator[ChunkSums]
    ) -> dict[int, ChunkSums]:
        """The chunks of all processes."""
        team = self.together
        everyone = team.all((question, list(fresh)))
        _check_same([asked for asked, _ in everyone])
        return {
            index: sums
            for rank, (_, found) in enumerate(everyone)
            for index, sums in zip(missing[rank :: team.size], found, strict=True)
        }

    def mean(self, terms: WeightedTerms, samples: int, stream: Sequence[int]) -> float:
        """Plain mean of so many terms."""
        return sum(each.total for each in self.sums(terms, samples, stream)) / samples


def _check_same(questions: Sequence[Any]) -> None:
    if any(asked != questions[0] for asked in questions):
        raise ValueError(
            "the processes draw for different questions: start all of them with the same "
            "arguments, versions and kind of machine"
        )


def _sums(terms: Array) -> ChunkSums:
    found = ChunkSums(terms.size, float(terms.sum()), float(np.square(terms).sum()))
    if not np.isfinite(found.total):
        raise ArithmeticError("a simulated privacy loss is not a number")
    return found
