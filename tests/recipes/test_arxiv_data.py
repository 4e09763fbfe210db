"""The arXiv recipe's data: selecting, tokenising, loading."""

from __future__ import annotations

import collections
import dataclasses
import json

import numpy as np
import pytest
import torch

from dptrain import PrivateLoader
from dptrain.sampling import Poisson
from dptrain.sampling.loading.dataset import fingerprint
from dptrain.sampling.users.neighbors import neighborhood_sizes
from recipes.data import arxiv_snapshot
from recipes.data.arxiv import arxiv, select_papers
from recipes.data.arxiv_categories import CLASSES
from recipes.data.arxiv_snapshot import read_snapshot
from recipes.data.arxiv_tokens import load_tokenizer, tokenise, vocabulary_of
from recipes.models.bert import CATEGORY, bert
from recipes.models.bert_heads import IGNORED, MaskTokens, class_batch, class_metrics, forward
from tests.helpers.arxiv_files import make_papers, write_arxiv_files, write_lines

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


def test_rows_are_recognized_wherever_they_lie(files, tmp_path):
    one, two = (_arxiv(files, tmp_path / name).train for name in ("one", "two"))
    assert fingerprint(one) == fingerprint(two)
    assert fingerprint(one) != fingerprint(_arxiv(files, tmp_path / "one", seed=1).train)
    # A row that no sample of rows would have shown.
    records = [json.loads(line) for line in files.snapshot.read_text().splitlines()]
    paper = next(r for r in records if len(r["authors_parsed"]) > 1)
    paper["abstract"] = "we show"
    write_lines(tmp_path / "other.jsonl", records)
    other = dataclasses.replace(files, snapshot=tmp_path / "other.jsonl")
    assert fingerprint(one) != fingerprint(_arxiv(other, tmp_path / "one").train)


def test_a_folder_without_a_tokenizer_is_refused(files):
    """transformers makes one without words of a model's config.json."""
    with pytest.raises(ValueError, match="knows no token of text"):
        load_tokenizer(files.model, offline=True)


def test_neighborhoods_can_be_bounded(snapshot):
    graph = select_papers(snapshot, test_size=50, max_neighbors=3).bounded.graph
    sizes = neighborhood_sizes(graph.offsets, graph.members, graph.users)
    loose = select_papers(snapshot, test_size=50).bounded.graph
    free = neighborhood_sizes(loose.offsets, loose.members, loose.users)
    assert sizes.max() <= 3 < free.max()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_cannot_be_is_refused(files, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache_dir=.*name another"):
        _arxiv(files, tmp_path / name)


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
