"""The attribution graph of the arXiv archive, by the script that other benchmarks import."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scripts.bench.arxiv_graph import arxiv_graph, main
from tests.helpers.arxiv_files import archive_row, make_papers, write_archive

HELD_OUT, K = 20, 2


@pytest.fixture(scope="module")
def rows():
    return [archive_row(record) for record in make_papers(papers=200, authors=90)]


@pytest.fixture(scope="module")
def archive(rows, tmp_path_factory):
    return write_archive(tmp_path_factory.mktemp("archive"), rows)


def test_the_graph_is_that_of_papers_of_several_authors(rows, archive):
    found = arxiv_graph(archive, held_out=HELD_OUT)
    figures = found.figures()
    several = [row for row in rows if "," in row["author_text"]]
    assert (figures["papers"], figures["papers_of_several_authors"]) == (len(rows), len(several))
    assert figures["papers_before_bounding"] == len(several) - HELD_OUT
    graph = found.bounded.graph
    counts = np.bincount(graph.members, minlength=graph.users)
    assert counts.max() == K
    assert np.diff(graph.offsets).min() >= 2
    assert figures["rows"] == graph.examples >= figures["distinct_papers"]
    assert figures["users_at_bound"] == int((counts == K).sum())
    # Copies are added: a paper is left out only where an author of its has no room.
    assert figures["rows"] > figures["distinct_papers"]


def test_the_seed_decides(archive):
    one, again, other = (
        arxiv_graph(archive, held_out=HELD_OUT, seed=seed).bounded.graph for seed in (0, 0, 1)
    )
    assert one == again != other


def test_the_command_prints_and_writes_the_figures(archive, tmp_path, capsys):
    next(archive.rglob("hep-th.tsv.xz")).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    out = tmp_path / "figures.json"
    main(["--archive", str(archive), "--test-size", str(HELD_OUT), "--json", str(out), "--sizes"])
    printed = capsys.readouterr().out
    figures = json.loads(out.read_text())
    assert figures["rows"] > 0
    assert f"{figures['rows']:,}" in printed
    assert "files of the archive were left out" in printed
    assert "neighborhood |N(e)|" in printed


def test_too_many_held_out_are_refused(archive):
    with pytest.raises(ValueError, match="hold out fewer"):
        arxiv_graph(archive, held_out=10_000)
