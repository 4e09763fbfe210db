"""Reading the arXiv archive of tables: rows, files that are damaged or not there, dumps."""

from __future__ import annotations

import lzma
import os

import pytest

from recipes.data import arxiv_archive
from recipes.data.arxiv import read_papers, select_papers
from recipes.data.arxiv_archive import is_archive, read_archive
from recipes.data.arxiv_categories import CLASSES, class_of
from recipes.data.arxiv_record import BadRecord, author_identity, parse_row
from tests.helpers.arxiv_files import (
    archive_row,
    make_papers,
    table,
    write_archive,
    write_lines,
    write_table,
)

PAPERS = 120
RECORDS = make_papers(papers=PAPERS, authors=70)
ROWS = [archive_row(record) for record in RECORDS]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 3\n" % 7


def _read(folder, cache, **options):
    return read_archive(folder, cache_dir=cache, **options)


def _ids(found):
    return found.papers["id"][:]


# Rows


def test_a_row_keeps_distinct_authors_abstract_and_archive():
    row = {**ROWS[0], "num_authors": "3", "categories": "math.CO,cs.DM"}
    paper = parse_row({**row, "author_text": "Ada  B. Ito, ada b. ITO,  Bo Müller"})
    assert paper.authors == ["ada b. ito", "bo müller"]
    assert CLASSES[paper.label] == "math"
    assert (paper.id, paper.abstract) == (row["arxiv_id"], row["abstract"])


BAD = [
    ({"arxiv_id": " "}, "'arxiv_id' is empty"),
    ({"author_text": ""}, "'author_text' is empty"),
    ({"abstract": ""}, "'abstract' is empty"),
    ({"categories": ""}, "'categories' is empty"),
    ({"author_text": "A B, , C D", "num_authors": "3"}, "author 2 in 'author_text' has no name"),
    ({"author_text": "A B, C D, Jr", "num_authors": "2"}, "3 names and 'num_authors' is 2"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_a_row_that_is_no_paper_says_why(change, reason):
    with pytest.raises(BadRecord, match=reason):
        parse_row({**ROWS[0], **change})


def test_rows_without_a_number_of_authors_are_taken_as_they_are():
    row = {**ROWS[0], "author_text": "A B, C D", "num_authors": ""}
    assert parse_row(row).authors == ["a b", "c d"]


# Folders


def test_a_paper_of_several_categories_is_one_paper(tmp_path):
    """Two of the four topics are in two categories each."""
    folder = write_archive(tmp_path / "archive", ROWS)
    found = _read(folder, tmp_path / "cache")
    assert sorted(_ids(found)) == sorted(row["arxiv_id"] for row in ROWS)
    twice = sum("," in row["categories"] for row in ROWS)
    assert found.report.repeated == twice > 0
    assert (found.report.papers, found.report.files, found.report.notes) == (PAPERS, 6, ())
    by_id = {record["id"]: record for record in RECORDS}
    for paper in found.papers:
        record = by_id[paper["id"]]
        names = {author_identity([f"{a[1]} {a[0]}{a[2]}"]) for a in record["authors_parsed"]}
        assert set(paper["authors"]) == names
        assert paper["abstract"] == " ".join(record["abstract"].split())
        assert paper["label"] == class_of(record["categories"])
    assert found.papers.cache_files  # memory-mapped


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.xz", ".tsv.zip"])
def test_every_packing_holds_the_same(tmp_path, suffix):
    file = write_table(tmp_path / f"2011{suffix}", table(ROWS))
    for path in (file, tmp_path):
        assert is_archive(path)
        assert _ids(read_papers(path, cache_dir=tmp_path / "cache")) == [
            row["arxiv_id"] for row in ROWS
        ]


def test_the_kind_of_file_is_seen_by_its_name(tmp_path):
    write_lines(tmp_path / "snapshot.json", RECORDS)
    folder = write_archive(tmp_path / "archive", ROWS)
    assert not is_archive(tmp_path / "snapshot.json")
    lines = read_papers(tmp_path / "snapshot.json", cache_dir=tmp_path / "cache")
    tables = read_papers(folder, cache_dir=tmp_path / "cache")
    assert sorted(_ids(lines)) == sorted(_ids(tables))


def test_the_same_papers_of_both_formats_have_one_graph(tmp_path):
    """Names are written in another way, and who wrote what with whom is the same."""
    write_lines(tmp_path / "snapshot.json", RECORDS)
    # By year in one file, so that the order of the papers is the same.
    write_table(tmp_path / "archive" / "all.tsv", table(ROWS))
    chosen = [
        select_papers(read_papers(path, cache_dir=tmp_path / "cache"), test_size=20)
        for path in (tmp_path / "snapshot.json", tmp_path / "archive")
    ]
    assert chosen[0].train.tolist() == chosen[1].train.tolist()
    assert chosen[0].bounded.graph == chosen[1].bounded.graph


def test_the_latest_dump_comes_first_and_differences_are_told(tmp_path):
    later = [{**row, "abstract": "later"} for row in ROWS[:5]]
    for date, rows in (("20200101", later), ("20190101", ROWS)):
        write_table(tmp_path / "data" / date / "per_year" / "2010.tsv.zip", table(rows))
    found = _read(tmp_path / "data", tmp_path / "cache")
    abstracts = dict(zip(_ids(found), found.papers["abstract"], strict=True))
    assert [abstracts[row["arxiv_id"]] for row in ROWS[:5]] == ["later"] * 5
    assert len(abstracts) == PAPERS
    assert found.report.differing == 5
    assert "5 papers differ between files" in " ".join(found.report.notes)


def test_the_cache_is_of_the_content(tmp_path, monkeypatch):
    folder = write_archive(tmp_path / "archive", ROWS)
    first = _read(folder, tmp_path / "cache")
    os.rename(folder, tmp_path / "moved")
    with monkeypatch.context() as patch:
        patch.setattr(arxiv_archive, "parse_row", None)  # reading again would fail
        again = _read(tmp_path / "moved", tmp_path / "cache")
    assert again.report == first.report
    file = next((tmp_path / "moved").rglob("cs.LG.tsv.xz"))
    write_table(file, table([{**row, "abstract": "x"} for row in ROWS]))
    assert "x" in _read(tmp_path / "moved", tmp_path / "cache").papers["abstract"][:]


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    folder = write_archive(tmp_path / "archive", ROWS)
    hashes = iter(["1" * 64, "2" * 64])
    monkeypatch.setattr(arxiv_archive, "_hash", lambda tables: next(hashes))
    with pytest.raises(ValueError, match="changed while it was read"):
        _read(folder, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# What is bad, or not there


def test_bad_rows_stop_with_their_line_or_are_skipped_and_counted(tmp_path):
    good = table(ROWS[:3])  # a row is two lines, as its comment is
    content = good + b"one\ttwo\n" + table([{**ROWS[3], "author_text": ""}]).partition(b"\n")[2]
    content += b"\n" + table(ROWS[4:5]).partition(b"\n")[2]
    file = write_table(tmp_path / "2010.tsv", content)
    with pytest.raises(ValueError, match=r"2010.tsv, line 8: it has 2 fields, not 15.*skip"):
        _read(file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    for _ in range(2):  # the second time from the cache
        found = _read(file, tmp_path / "cache", on_error="skip")
        assert _ids(found) == [row["arxiv_id"] for row in (*ROWS[:3], ROWS[4])]
        assert found.report.skipped == 2
        assert [where for where, _ in found.report.first_skipped] == [
            "2010.tsv, line 8",
            "2010.tsv, line 9",
        ]
        assert found.report.notes[0].startswith("2 lines of the archive were skipped (2010.tsv, ")


def test_an_open_quotation_mark_is_told_with_the_lines_that_it_takes(tmp_path):
    lines = table([{**row, "comments": ""} for row in ROWS[:6]]).split(b"\n")
    lines[2] = lines[2].replace(b"\t", b'\t"', 1)
    lines[4] = lines[4].replace(b"\t", b'\t"', 1)
    file = write_table(tmp_path / "2010.tsv", b"\n".join(lines))
    found = _read(file, tmp_path / "cache", on_error="skip")
    ((where, reason),) = found.report.first_skipped
    assert where == "2010.tsv, line 3"
    assert "up to line 5 there is no row" in reason
    assert _ids(found) == [row["arxiv_id"] for row in (ROWS[0], *ROWS[4:6])]


def test_names_of_thousands_of_authors_are_read(tmp_path):
    names = ", ".join(f"Author {n}" for n in range(20_000))
    row = {**ROWS[0], "author_text": names, "num_authors": "20000"}
    file = write_table(tmp_path / "2010.tsv", table([row]))
    assert len(_read(file, tmp_path / "cache").papers["authors"][0]) == 20_000


def _cut(path):
    path.write_bytes(path.read_bytes()[:-400])


DAMAGE = [
    (".tsv.xz", _cut, "the file is damaged"),
    (".tsv.zip", _cut, "the file is damaged"),
    (".tsv.xz", lambda path: path.write_bytes(b"no archive"), "the file is damaged"),
    (".tsv", lambda path: path.write_bytes(table(ROWS) + b"\xff\xfe\t\n"), "not UTF-8"),
    (".tsv", lambda path: path.write_bytes(b"a\tb\n1\t2\n"), "names no column arxiv_id"),
    (".tsv", lambda path: path.write_bytes(b""), "names no column arxiv_id"),
]


@pytest.mark.parametrize(("suffix", "damage", "reason"), DAMAGE)
def test_damaged_files_stop_or_are_left_out_and_named(tmp_path, suffix, damage, reason):
    folder = tmp_path / "archive"
    write_table(folder / "math.CO.tsv", table(ROWS[:4]))
    damage(write_table(folder / f"cs.LG{suffix}", table(ROWS)))
    with pytest.raises(ValueError, match=rf"cs\.LG\{suffix}.*{reason}"):
        _read(folder, tmp_path / "cache")
    found = _read(folder, tmp_path / "cache", on_error="skip")
    assert {row["arxiv_id"] for row in ROWS[:4]} <= set(_ids(found))
    assert any(f"cs.LG{suffix}" in note and reason in note for note in found.report.notes)


def test_pointers_stop_in_one_sentence_or_are_left_out_and_named(tmp_path):
    folder = write_archive(tmp_path / "archive", ROWS)
    (folder / "a.tsv.xz").write_bytes(POINTER)
    (folder / "b.tsv.xz").symlink_to("../.git/annex/objects/none")
    with pytest.raises(ValueError, match=r"2 of 8 files .*\(a.tsv.xz, b.tsv.xz\).*git lfs pull"):
        _read(folder, tmp_path / "cache")
    found = _read(folder, tmp_path / "cache", on_error="skip")
    assert len(_ids(found)) == PAPERS
    assert found.report.pointers == ("a.tsv.xz", "b.tsv.xz")
    assert found.report.notes == (
        "2 files of the archive were left out, as they hold Git's pointers and not the data: "
        "a.tsv.xz, b.tsv.xz",
    )


def test_a_folder_of_pointers_only_is_refused(tmp_path):
    (tmp_path / "a.tsv.xz").write_bytes(POINTER)
    with pytest.raises(ValueError, match="1 of 1 files hold Git's pointers"):
        _read(tmp_path, tmp_path / "cache", on_error="skip")


def test_categories_without_a_file_are_named(tmp_path):
    folder = write_archive(tmp_path / "archive", ROWS)
    for name in ("stat.ML", "hep-th"):
        next(folder.rglob(f"{name}.tsv.xz")).unlink()
    found = _read(folder, tmp_path / "cache")
    assert found.report.missing == ("hep-th", "stat.ML")
    assert found.report.notes[0].startswith("the archive has no file of hep-th, stat.ML: papers")
    # The papers are there by their other categories.
    assert len(_ids(found)) == PAPERS


def test_years_without_a_file_are_named_unless_the_categories_are_complete(tmp_path):
    years = tmp_path / "years"
    for year in (1993, 1994, 1997, 2000):
        write_table(years / f"{year}.tsv.zip", table([{**ROWS[0], "created": f"{year}-01-01"}]))
    assert _read(years, tmp_path / "cache").report.missing == ("1995 to 1996", "1998 to 1999")
    write_archive(years, ROWS)
    assert _read(years, tmp_path / "cache").report.missing == ()
    next(years.rglob("gr-qc.tsv.xz")).unlink()
    missing = _read(years, tmp_path / "cache").report.missing
    assert missing == ("1995 to 1996", "1998 to 1999", "2001 to 2012", "gr-qc")


def test_tables_of_ones_own_name_nothing_missing(tmp_path):
    write_table(tmp_path / "mine.tsv", table(ROWS))
    assert _read(tmp_path, tmp_path / "cache").report.missing == ()


def test_folders_without_tables_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no table .*file of JSON lines"):
        _read(tmp_path, tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match="no arXiv archive"):
        _read(tmp_path / "none.tsv", tmp_path / "cache")
    with pytest.raises(ValueError, match="on_error='ignore'"):
        _read(tmp_path, tmp_path / "cache", on_error="ignore")
    write_table(tmp_path / "bad.tsv", table([{**ROWS[0], "abstract": ""}]))
    with pytest.raises(ValueError, match="no usable paper"):
        _read(tmp_path, tmp_path / "cache", on_error="skip")
    (tmp_path / "whole.zip").write_bytes(lzma.compress(b""))
    with pytest.raises(ValueError, match=r"whole\.zip.*damaged"):
        _read(tmp_path / "whole.zip", tmp_path / "cache")
