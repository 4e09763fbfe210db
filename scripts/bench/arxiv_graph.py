"""The attribution graph of arXiv's papers and authors, for benchmarks on real users.

The setting of Dong & Ganesh 2026, section 7.3, on the archive of 1993 to 2019 (Geiger 2020,
doi:10.5281/zenodo.1463242; https://github.com/staeiou/arxiv_archive): papers of one author are
dropped, the others shuffled, some held out, and the rest bounded to k examples a user, with copies.
Other benchmarks import ``arxiv_graph`` from here. Nothing is kept: the tables are read anew by each
call, in about a minute.

The category files of the dump of 2020-01-01, as far as Git brings them without large-file storage
(128 files; astro-ph, cs.LG and 45 more are not there), give 390,027 papers of several authors and
133,679 rows of 278,748 users; with the files of 1993 and 1994 beside them, 137,596 and 285,266.

    PYTHONPATH=. python scripts/bench/arxiv_graph.py --archive FOLDER [--json FILE]
        [--test-size 50000] [--bound 2] [--seed 0] [--sizes]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from dptrain import AttributionGraph
from dptrain.sampling import BoundedGraph
from recipes.data.arxiv import read_papers

HELD_OUT, BOUND = 50_000, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArxivGraph:
    """The graph and where it comes from.

    Attributes:
        bounded: what bounding kept, ``bounded.graph`` being the graph of the training rows.
        papers: all that were read.
        several: those with two or more authors.
        notes: what was missing or left out.
    """

    bounded: BoundedGraph
    papers: int
    several: int
    notes: tuple[str, ...]

    def figures(self) -> dict[str, Any]:
        """Numbers to compare, without those that take neighborhoods."""
        graph, source = self.bounded.graph, self.bounded.source
        return {
            "papers": self.papers,
            "papers_of_several_authors": self.several,
            "papers_before_bounding": source.examples,
            "users_before_bounding": source.users,
            "rows": graph.examples,
            "distinct_papers": len(np.unique(self.bounded.rows)),
            "users": graph.users,
            "edges": graph.edges,
            "users_at_bound": int(np.count_nonzero(graph.examples_per_user() == self.bounded.k)),
            "fingerprint": graph.fingerprint,
        }


def arxiv_graph(
    archive: str | pathlib.Path,
    *,
    held_out: int = HELD_OUT,
    max_examples: int = BOUND,
    duplicates: bool = True,
    seed: int = 0,
) -> ArxivGraph:
    """The bounded graph of the papers in ``archive``.

    Args:
        archive: as ``data.path`` of the arXiv recipe; files that Git did not bring are left out.
        held_out: papers taken off the end of the shuffled ones.
        max_examples: k.
        duplicates: whether copies are added while all users of a paper have room.
        seed: of the shuffle, and of the bounding.

    Raises:
        ValueError, FileNotFoundError: as ``read_papers``; or if no paper is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = read_papers(archive, cache_dir=folder, on_error="skip")
        authors = found.papers.data.column("authors")
        counts = np.concatenate([np.diff(chunk.offsets) for chunk in authors.chunks])
        several = np.flatnonzero(counts >= 2)
        if held_out >= len(several):
            raise ValueError(
                f"held_out={held_out}: only {len(several)} of {len(counts)} papers have two or "
                "more authors; hold out fewer"
            )
        rows = np.random.default_rng(seed).permutation(several)[: len(several) - held_out]
        chosen = found.papers.select(rows, keep_in_memory=True)
        whole = AttributionGraph.from_dataset(chosen, "authors")
    bounded = whole.bound(max_examples, duplicates=duplicates, seed=seed)
    return ArxivGraph(
        bounded=bounded, papers=len(counts), several=len(several), notes=found.report.notes
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archive", type=pathlib.Path, required=True, help="folder of tables")
    parser.add_argument("--test-size", type=int, default=HELD_OUT)
    parser.add_argument("--bound", type=int, default=BOUND, help="k")
    parser.add_argument("--no-duplicates", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", action="store_true", help="neighborhoods too")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    datasets.disable_progress_bars()
    found = arxiv_graph(
        options.archive,
        held_out=options.test_size,
        max_examples=options.bound,
        duplicates=not options.no_duplicates,
        seed=options.seed,
    )
    for note in found.notes:
        print(note)
    for name, value in found.figures().items():
        print(f"{name.replace('_', ' '):<28}{value if isinstance(value, str) else f'{value:,}'}")
    if options.sizes:
        print(found.bounded.statistics().table())
    if options.json:
        value = json.dumps(found.figures(), indent=1)
        options.json.write_text(value + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
