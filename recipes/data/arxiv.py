"""The arXiv papers of Dong & Ganesh 2026, §7.3: training examples whose users are authors."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any

import numpy as np
import numpy.typing as npt

from dptrain.sampling import AttributionGraph, BoundedGraph
from recipes.data.arxiv_archive import is_archive, read_archive
from recipes.data.arxiv_cached import Snapshot
from recipes.data.arxiv_categories import CLASSES
from recipes.data.arxiv_snapshot import read_snapshot
from recipes.data.arxiv_tokens import Vocabulary, load_tokenizer, tokenise, vocabulary_of

Rows = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Settings of the papers for training and for testing.

    Attributes:
        train: rows of the snapshot, one for each training example; a paper may come up twice.
        test: rows of the snapshot, none of them in ``train``.
        bounded: what contribution bounding kept, and the graph of ``train``'s authors.
        dropped: papers left out for having fewer than two authors.
        candidates: rows that bounding chose from, one for each paper.
    """

    train: Rows
    test: Rows
    candidates: Rows
    bounded: BoundedGraph
    dropped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArxivData:
    """A bounded training set, a held-out test set, and what a model must know about them.

    Attributes:
        train, test: token rows; see ``recipes.data.arxiv_tokens.tokenise``.
        bounded: what contribution bounding kept; its ``statistics()`` take a while at size.
        classes: names of the labels, fixed and public.
        vocabulary: of the tokenizer.
        notes: what the user must hear about the file.
    """

    train: Any
    test: Any
    bounded: BoundedGraph
    classes: tuple[str, ...]
    vocabulary: Vocabulary
    notes: tuple[str, ...]

    @property
    def graph(self) -> AttributionGraph:
        """The authors of the training examples."""
        return self.bounded.graph


def arxiv(
    path: str | pathlib.Path,
    *,
    tokenizer: str | pathlib.Path,
    cache_dir: str | pathlib.Path,
    test_size: int = 200_000,
    max_examples: int = 2,
    duplicates: bool = True,
    max_neighbors: int | None = None,
    seed: int = 0,
    max_length: int = 128,
    on_error: str = "stop",
    offline: bool = False,
) -> ArxivData:
    """Read, select and tokenise; what an earlier call left in ``cache_dir`` is used again.

    The tokenizer is not trained on the file: one that was would tell of its abstracts, past the
    guarantee. Held-out papers are not protected at all, also where a training author wrote them.

    Args:
        path: the metadata; see ``read_papers``.
        tokenizer: folder or hub name; see ``recipes.data.arxiv_tokens.load_tokenizer``.
        cache_dir: where arrow files are kept.
        test_size, max_examples, duplicates, max_neighbors, seed: see ``select_papers``.
        max_length: tokens of a row.
        on_error: ``"stop"`` at the first bad line, or ``"skip"`` such lines and report them.
        offline: never ask the hub.

    Raises:
        ValueError, FileNotFoundError: with the remedy; the tokenizer is looked for first.
    """
    loaded = load_tokenizer(tokenizer, offline=offline)
    snapshot = read_papers(path, cache_dir=cache_dir, on_error=on_error)
    chosen = select_papers(
        snapshot,
        test_size=test_size,
        max_examples=max_examples,
        duplicates=duplicates,
        max_neighbors=max_neighbors,
        seed=seed,
    )

    def tokens(rows: Rows, name: str) -> Any:
        return tokenise(
            snapshot.papers.select(rows, keep_in_memory=True),
            tokenizer=loaded,
            cache_dir=cache_dir,
            key=f"{snapshot.report.sha256}:{on_error}:{hashlib.sha256(rows.tobytes()).hexdigest()}",
            max_length=max_length,
            name=name,
        )

    return ArxivData(
        train=tokens(chosen.train, "train"),
        test=tokens(chosen.test, "test"),
        bounded=chosen.bounded,
        classes=CLASSES,
        vocabulary=vocabulary_of(loaded),
        notes=snapshot.report.notes,
    )


def read_papers(
    path: str | pathlib.Path, *, cache_dir: str | pathlib.Path, on_error: str = "stop"
) -> Snapshot:
    """The papers of a file of JSON lines, or of a folder (or one file) of tables.

    Args:
        path: see ``recipes.data.arxiv_snapshot.read_snapshot`` and
            ``recipes.data.arxiv_archive.read_archive``.
        cache_dir: where what was read is kept.
        on_error: ``"stop"`` or ``"skip"``.

    Raises:
        ValueError, FileNotFoundError: as they do.
    """
    read = read_archive if is_archive(path) else read_snapshot
    return read(path, cache_dir=cache_dir, on_error=on_error)


def select_papers(
    snapshot: Snapshot,
    *,
    test_size: int = 200_000,
    max_examples: int = 2,
    duplicates: bool = True,
    max_neighbors: int | None = None,
    seed: int = 0,
) -> Selection:
    """Drop papers of a single author, shuffle, hold out the last ones, bound each author's share.

    Args:
        snapshot: the papers.
        test_size: papers that are held out.
        max_examples: k, the most training examples of an author.
        duplicates: whether a paper may be used several times while its authors have room.
        max_neighbors: the most training examples, copies counted, that share an author with one of
            them (itself included); ``None`` for no such bound.
        seed: of the shuffle and of the bounding; public.

    Raises:
        ValueError: for a test size or bounds that leave no training paper, with the remedy.
    """
    if isinstance(test_size, bool) or not isinstance(test_size, int) or test_size < 1:
        raise ValueError(f"test_size={test_size!r}: must be a whole number of at least 1")
    authors = snapshot.papers.data.column("authors")
    counts = np.concatenate([np.diff(chunk.offsets) for chunk in authors.chunks])
    several = np.flatnonzero(counts >= 2)
    if test_size >= len(several):
        largest = len(several) - 1
        remedy = f"use at most {largest}" if largest >= 1 else "the file is too small to be split"
        raise ValueError(
            f"test_size={test_size}: only {len(several)} of {len(counts)} papers have two or more "
            f"authors, and one must be left for training; {remedy}"
        )
    shuffle_seed, bound_seed = np.random.SeedSequence(seed).generate_state(2).tolist()
    several = np.random.default_rng(shuffle_seed).permutation(several)
    candidates, test = several[:-test_size], several[-test_size:]
    whole = AttributionGraph.from_dataset(
        snapshot.papers.select(candidates, keep_in_memory=True), "authors"
    )
    try:
        bounded = whole.bound(
            max_examples, duplicates=duplicates, max_neighbors=max_neighbors, seed=bound_seed
        )
    except ValueError as error:
        raise ValueError(f"{max_examples=}, {max_neighbors=}: {error}") from error
    return Selection(
        train=candidates[bounded.rows],
        test=test,
        candidates=candidates,
        bounded=bounded,
        dropped=len(counts) - len(several),
    )
