"""Reading the arXiv metadata snapshot: records, broken lines, the cached file."""

from __future__ import annotations

import json
import os

import pytest

from recipes.data import arxiv_cached, arxiv_snapshot
from recipes.data.arxiv_categories import ARCHIVES, CLASSES, SUBSUMED, class_of
from recipes.data.arxiv_record import BadRecord, author_identity, parse_line
from recipes.data.arxiv_snapshot import read_snapshot
from tests.helpers.arxiv_files import make_papers, write_arxiv_files, write_lines

PAPERS = 300


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_arxiv_files(tmp_path_factory.mktemp("arxiv"), papers=PAPERS)


@pytest.fixture(scope="module")
def snapshot(files, tmp_path_factory):
    return read_snapshot(files.snapshot, cache_dir=tmp_path_factory.mktemp("cache"))


def _line(**changes):
    record = {**make_papers(papers=1, authors=5)[0], **changes}
    return json.dumps({name: value for name, value in record.items() if value is not ...}).encode()


# Records


def test_names_that_differ_in_form_only_are_one_author():
    spellings = [
        ["Müller", "Anna  Maria", ""],
        ["MÜLLER ", " anna maria", ""],
        ["Mu\u0308ller", "Anna\u00a0Maria", "", "an institute"],
    ]
    assert {author_identity(parts) for parts in spellings} == {"müller, anna maria"}
    others = [["Müller", "Anna", ""], ["Müller", "Anna Maria", "Jr"], ["Muller", "Anna Maria", ""]]
    assert len({author_identity(parts) for parts in [spellings[0], *others]}) == 4


def test_a_paper_keeps_distinct_authors_abstract_and_archive():
    names = [["Ito", "Ada", ""], ["Sato", "Bo", ""], ["ITO", "ada", "", "elsewhere"]]
    paper = parse_line(_line(authors_parsed=names, categories="math.CO cs.DM", abstract=" A. "))
    assert paper.authors == ["ito, ada", "sato, bo"]
    assert CLASSES[paper.label] == "math"
    assert paper.abstract == " A. "


@pytest.mark.parametrize(
    ("categories", "name"),
    [
        ("cs.LG stat.ML", "cs"),
        ("hep-th", "hep-th"),
        ("cond-mat.mtrl-sci", "cond-mat"),
        ("alg-geom math.AG", "math"),
        ("cmp-lg", "cs"),
        ("astronautics.X", "other"),
    ],
)
def test_the_class_is_the_archive_of_the_primary_category(categories, name):
    assert CLASSES[class_of(categories)] == name


def test_the_list_of_classes_is_consistent():
    assert len(ARCHIVES) == len(set(CLASSES)) - 1 == 20
    assert set(SUBSUMED.values()) <= set(ARCHIVES)
    assert not set(SUBSUMED) & set(CLASSES)


BAD = [
    (b'{"id": "1", "abs', "not JSON"),
    (b"\xff\xfe{}", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"12", "JSON int"),
    (_line(id=...), "lacks the field 'id'"),
    (_line(abstract=...), "lacks the field 'abstract'"),
    (_line(authors_parsed=...), "lacks the field 'authors_parsed'"),
    (_line(categories=...), "lacks the field 'categories'"),
    (_line(abstract=None), "'abstract' is no text but of type NoneType"),
    (_line(categories="  "), "'categories' is empty"),
    (_line(authors_parsed=[]), "no authors"),
    (_line(authors_parsed="Ito"), "no list but str"),
    (_line(authors_parsed=[["Ito", "A", ""], ["", " ", ""]]), "author 2 .* has no name"),
    (_line(authors_parsed=[["Ito", 3]]), "author 1 .* no list of texts"),
    (_line(authors_parsed=["Ito"]), "author 1 .* no list of texts"),
    (_line(abstract="\ud800"), "surrogate"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_line_that_is_no_paper_says_why(line, reason):
    with pytest.raises(BadRecord, match=reason):
        parse_line(line)


# The file


def test_the_snapshot_holds_the_papers_in_order(files, snapshot):
    records = [json.loads(line) for line in files.snapshot.read_text().splitlines()]
    assert snapshot.papers["id"][:] == [record["id"] for record in records]
    assert snapshot.papers["abstract"][:] == [record["abstract"] for record in records]
    for found, record in zip(snapshot.papers["authors"], records, strict=True):
        assert found == [author_identity(parts) for parts in record["authors_parsed"]]
    assert snapshot.report.papers == PAPERS
    assert snapshot.report.notes == ()
    assert snapshot.papers.cache_files  # memory-mapped


def _write(path, lines):
    path.write_bytes(b"\n".join(lines))
    return path


def test_a_bad_line_stops_with_its_number_or_is_skipped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(arxiv_snapshot, "SHOWN", 2)
    monkeypatch.setattr(arxiv_cached, "_BATCH", 3)
    good = _line()
    file = _write(tmp_path / "x.jsonl", [good, b"", *[good] * 6, b"{", good, b"3", good, b"7"])
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"x.jsonl, line 9: it is not JSON.*on_error=skip"):
        read_snapshot(file, cache_dir=cache)
    assert list(cache.iterdir()) == []  # nothing half-made is left
    for _ in range(2):  # the second time from the cache
        found = read_snapshot(file, cache_dir=cache, on_error="skip")
        assert len(found.papers) == found.report.papers == 9
        assert (found.report.skipped, found.report.blank) == (3, 1)
        assert [number for number, _ in found.report.first_skipped] == [9, 11]
        assert found.report.notes[0].startswith("3 lines of the snapshot were skipped (line 9: ")
    with pytest.raises(ValueError, match="line 9"):
        read_snapshot(file, cache_dir=cache)  # the other option's cache is not used


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b'[{"id": "1"},\n{"id": "2"}]', "one JSON array.*jq"),
        (b"{}\n{}\n", "no usable paper.*2 lines"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, content, message):
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_snapshot(file, cache_dir=tmp_path / "cache", on_error="skip")


def test_paths_that_are_no_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no arXiv snapshot"):
        read_snapshot(tmp_path / "none", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        read_snapshot(tmp_path, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="on_error='ignore'"):
        read_snapshot(tmp_path, cache_dir=tmp_path, on_error="ignore")


def test_the_cache_is_of_the_content(tmp_path, monkeypatch):
    records = make_papers(papers=8, authors=9)
    file, cache = tmp_path / "x.jsonl", tmp_path / "cache"
    write_lines(file, records)
    read_snapshot(file, cache_dir=cache)
    times = file.stat()
    with monkeypatch.context() as patch:
        patch.setattr(arxiv_snapshot, "parse_line", None)  # reading again would fail
        assert len(read_snapshot(file, cache_dir=cache).papers) == 8
    # An edit that changes neither the size nor the time is another file all the same.
    name = records[3]["authors_parsed"][0][0]
    before, marker, after = file.read_text().partition(f'"authors_parsed": [["{name}"')
    file.write_text(before + marker.replace(name, "x" * len(name)) + after)
    assert file.stat().st_size == times.st_size
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    names = {name for row in read_snapshot(file, cache_dir=cache).papers["authors"] for name in row}
    assert any(name.startswith("xxx") for name in names)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "x.jsonl"
    write_lines(file, make_papers(papers=3, authors=9))
    monkeypatch.setattr(arxiv_snapshot, "_hash", lambda path: "0" * 64)
    with pytest.raises(ValueError, match="changed while it was read"):
        read_snapshot(file, cache_dir=tmp_path / "cache")
