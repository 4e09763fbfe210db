"""The arXiv recipe's data: reading, selecting, tokenising, loading."""

from __future__ import annotations

import collections
import dataclasses
import json
import os

import numpy as np
import pytest
import torch

from dptrain import PrivateLoader
from dptrain.sampling import Poisson
from recipes.data import arxiv_snapshot
from recipes.data.arxiv import arxiv, select_papers
from recipes.data.arxiv_categories import ARCHIVES, CLASSES, SUBSUMED, class_of
from recipes.data.arxiv_record import BadRecord, author_identity, parse_line
from recipes.data.arxiv_snapshot import read_snapshot
from recipes.data.arxiv_tokens import load_tokenizer, tokenise, vocabulary_of
from recipes.models.bert import CATEGORY, bert
from recipes.models.bert_heads import IGNORED, MaskTokens, class_batch, class_metrics, forward
from tests.recipes.arxiv_files import make_papers, write_arxiv_files, write_lines

PAPERS, LENGTH = 300, 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_arxiv_files(tmp_path_factory.mktemp("arxiv"), papers=PAPERS)


@pytest.fixture(scope="module")
def snapshot(files, tmp_path_factory):
    return read_snapshot(files.snapshot, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def data(files, tmp_path_factory):
    return _arxiv(files, tmp_path_factory.mktemp("whole"))


def _arxiv(files, cache, **options):
    small = {"test_size": 50, "max_length": LENGTH, "offline": True}
    return arxiv(files.snapshot, tokenizer=files.tokenizer, cache_dir=cache, **{**small, **options})


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
    monkeypatch.setattr(arxiv_snapshot, "_BATCH", 3)
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


# The selection


def _authors(snapshot):
    return [set(names) for names in snapshot.papers["authors"]]


@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_author_keeps_at_most_k_training_examples(snapshot, k, duplicates):
    chosen = select_papers(snapshot, test_size=50, max_examples=k, duplicates=duplicates)
    authors = _authors(snapshot)
    uses = collections.Counter(name for row in chosen.train for name in authors[row])
    assert max(uses.values()) == chosen.bounded.graph.max_examples <= k
    # Greedy selection is maximal: no candidate has room for all of its authors.
    if duplicates:
        spare = set(range(PAPERS)) - set(chosen.test.tolist())
        spare = {row for row in spare if len(authors[row]) >= 2}
    else:
        assert len(set(chosen.train.tolist())) == len(chosen.train)
        spare = set(range(PAPERS)) - set(chosen.test.tolist()) - set(chosen.train.tolist())
        spare = {row for row in spare if len(authors[row]) >= 2}
    assert spare
    assert all(any(uses[name] >= k for name in authors[row]) for row in spare)


def test_the_graph_is_that_of_the_training_examples(snapshot):
    chosen = select_papers(snapshot, test_size=50)
    authors = _authors(snapshot)
    graph = chosen.bounded.graph
    assert graph.examples == len(chosen.train)
    edges = np.split(graph.members, graph.offsets[1:-1])
    for row, users in zip(chosen.train, edges, strict=True):
        assert len(users) == len(authors[row])
    # Two examples share users exactly as their papers share authors.
    for first in range(0, graph.examples, 7):
        for second in range(graph.examples):
            shared = len(np.intersect1d(edges[first], edges[second]))
            papers = authors[chosen.train[first]] & authors[chosen.train[second]]
            assert shared == len(papers)


def test_the_split_is_as_stated(snapshot):
    chosen = select_papers(snapshot, test_size=50)
    authors = _authors(snapshot)
    several = {row for row, names in enumerate(authors) if len(names) >= 2}
    assert chosen.dropped == PAPERS - len(several)
    assert chosen.bounded.source.examples == len(several) - 50
    assert len(chosen.test) == len(set(chosen.test.tolist())) == 50
    assert set(chosen.train.tolist()) | set(chosen.test.tolist()) <= several
    assert not set(chosen.train.tolist()) & set(chosen.test.tolist())
    again, other = (
        select_papers(snapshot, test_size=50),
        select_papers(snapshot, test_size=50, seed=1),
    )
    assert np.array_equal(chosen.train, again.train)
    assert np.array_equal(chosen.test, again.test)
    assert chosen.bounded.graph == again.bounded.graph
    assert not np.array_equal(chosen.test, other.test)
    # The last of the shuffled papers: a smaller test set is a part of a larger one.
    smaller = select_papers(snapshot, test_size=20)
    assert set(smaller.test.tolist()) < set(chosen.test.tolist())


def test_too_large_test_sets_name_the_largest(snapshot):
    several = sum(len(names) >= 2 for names in _authors(snapshot))
    with pytest.raises(ValueError, match=f"use at most {several - 1}"):
        select_papers(snapshot, test_size=several)
    assert len(select_papers(snapshot, test_size=several - 1).train) >= 1
    for size in (0, True, 1.5):
        with pytest.raises(ValueError, match="test_size="):
            select_papers(snapshot, test_size=size)


def test_files_of_single_authors_cannot_be_split(tmp_path):
    file = tmp_path / "x.jsonl"
    write_lines(file, make_papers(papers=5, authors=1))
    alone = read_snapshot(file, cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"only 0 of 5 papers.*too small"):
        select_papers(alone, test_size=1)


# Tokens


def test_rows_are_the_tokenizers_own_and_contiguous(files, snapshot, data):
    tokenizer = load_tokenizer(files.tokenizer, offline=True)
    chosen = select_papers(snapshot, test_size=50)
    for split, rows in ((data.train, chosen.train), (data.test, chosen.test)):
        assert len(split) == len(rows)
        for number in range(0, len(rows), 9):
            row, paper = split[number], snapshot.papers[int(rows[number])]
            expected = tokenizer(paper["abstract"])["input_ids"]
            if len(expected) > LENGTH:
                expected = [*expected[: LENGTH - 1], tokenizer.sep_token_id]
            padding = [tokenizer.pad_token_id] * (LENGTH - len(expected))
            assert row["input_ids"].tolist() == [*expected, *padding]
            assert row["attention_mask"].tolist() == [1] * len(expected) + [0] * len(padding)
            assert row["token_type_ids"].tolist() == [0] * LENGTH
            assert row["position_ids"].tolist() == list(range(LENGTH))
            assert row["label"] == paper["label"]
    assert data.train.cache_files
    assert data.graph == chosen.bounded.graph
    assert data.classes == CLASSES


def test_tokens_are_made_once_for_the_same_rows_tokenizer_and_length(files, snapshot, tmp_path):
    tokenizer = load_tokenizer(files.tokenizer, offline=True)

    def count(**changes):
        settings = {"tokenizer": tokenizer, "cache_dir": tmp_path, "key": "a", "max_length": 8}
        rows = tokenise(snapshot.papers.select(range(20)), **{**settings, **changes})
        assert rows[0]["input_ids"].shape == (changes.get("max_length", 8),)
        return len(list(tmp_path.glob("*.arrow")))

    assert count() == 1
    assert count() == 1
    assert count(max_length=9) == 2
    assert count(key="b") == 3
    assert count(tokenizer=load_tokenizer(files.tokenizer, offline=True)) == 3
    changed = load_tokenizer(files.tokenizer, offline=True)
    changed.add_tokens(["graph graph"])
    assert vocabulary_of(changed).size == vocabulary_of(tokenizer).size + 1
    assert count(tokenizer=changed) == 4
    with pytest.raises(ValueError, match="max_length=2"):
        count(max_length=2)


def test_a_missing_tokenizer_is_found_out_first(files, tmp_path):
    broken = dataclasses.replace(files, tokenizer=tmp_path / "none", snapshot=tmp_path / "none")
    with pytest.raises(ValueError, match=r"no tokenizer .*Download it"):
        _arxiv(broken, tmp_path)


def test_a_second_call_reads_and_tokenises_nothing(files, tmp_path, monkeypatch):
    first = _arxiv(files, tmp_path)
    monkeypatch.setattr(arxiv_snapshot, "parse_line", None)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second = _arxiv(files, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert second.graph == first.graph
    assert np.array_equal(second.train["input_ids"][:], first.train["input_ids"][:])


# The loader


@pytest.mark.parametrize("collate", ["classes", "masked"])
def test_the_private_loader_serves_it_alike_with_and_without_workers(data, collate):
    words = data.vocabulary
    masking = MaskTokens(
        mask_id=words.mask_id, vocabulary=words.size, special_ids=words.special_ids
    )
    scheme = Poisson(probability=0.05, dataset_size=len(data.train), steps=4)

    def batches(workers, seed=3):
        loader = PrivateLoader(
            dataset=data.train,
            scheme=scheme,
            seed=seed,
            num_workers=workers,
            collate_fn=masking if collate == "masked" else class_batch,
        )
        return [(loader.current.indices, batch) for batch in loader]

    served, other = batches(0), batches(2)
    for (rows, batch), (rows_again, again) in zip(served, other, strict=True):
        assert np.array_equal(rows, rows_again)
        assert all(torch.equal(batch[name], again[name]) for name in batch)
        if len(rows) == 0:
            continue
        truth = torch.from_numpy(data.train[rows.tolist()]["input_ids"]).long()
        if collate == "masked":
            hidden = batch["labels"] != IGNORED
            assert torch.equal(torch.where(hidden, batch["labels"], batch["input_ids"]), truth)
        else:
            assert torch.equal(batch["input_ids"], truth)
            assert batch["labels"].tolist() == data.train[rows.tolist()]["label"].tolist()


def test_the_generated_categories_can_be_learnt(files, data):
    torch.manual_seed(0)
    model = bert(
        files.model,
        head=CATEGORY,
        vocabulary=data.vocabulary.size,
        max_length=LENGTH,
        classes=len(data.classes),
        pretrained=False,
        offline=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, test = (
        class_batch(part.__getitems__(range(len(part)))) for part in (data.train, data.test)
    )
    for _ in range(30):
        optimizer.zero_grad()
        class_metrics(forward(model, train), train)["loss"].mean().backward()
        optimizer.step()
    model.eval()
    # Four classes in equal shares; the words of a category occur in no other.
    assert class_metrics(forward(model, test), test)["accuracy"].mean() > 0.6
