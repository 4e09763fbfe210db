"""Papers outside of a run, and the tokenizer and weights that are made of them."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from recipes import arxiv_warm_start
from recipes.arxiv import main as train
from recipes.data.arxiv import read_papers, select_papers
from recipes.data.arxiv_outside import SPECIAL, outside_papers, train_tokenizer
from recipes.data.arxiv_tokens import load_tokenizer, vocabulary_of
from tests.helpers.arxiv_files import make_papers, write_lines


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside") / "snapshot.jsonl"
    write_lines(path, make_papers(papers=900, authors=20_000, seed=5))
    return path


@pytest.fixture(scope="module")
def snapshot(papers, tmp_path_factory):
    return read_papers(papers, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("bound", [1, 2])
def test_no_author_of_an_outside_paper_is_in_the_graph(snapshot, seed, bound):
    """Every set by name, paper by paper."""
    chosen = select_papers(snapshot, test_size=50, max_examples=bound, seed=seed)
    found = outside_papers(snapshot, chosen)
    authors = [set(names) for names in snapshot.papers["authors"]]
    test = set(chosen.test.tolist())
    candidates = {row for row, names in enumerate(authors) if len(names) >= 2 and row not in test}
    assert candidates == set(chosen.candidates.tolist())
    users = set().union(*(authors[row] for row in chosen.train))
    known = set().union(*(authors[row] for row in candidates))
    expected = [row for row, names in enumerate(authors) if row not in test and not names & known]
    assert found.rows.tolist() == expected
    assert not any(authors[row] & users for row in found.rows)
    rest = set(range(len(authors))) - test - candidates
    assert found.single == sum(len(authors[row]) == 1 for row in expected)
    assert found.of_users == sum(bool(authors[row] & users) for row in rest)
    # Single-author papers of those who are users through others: dropped, and yet not outside.
    assert found.of_users > 0
    left = sum(bool(authors[row] & known) and not authors[row] & users for row in rest)
    assert found.of_bounded_away == left


def test_where_nothing_is_outside_it_says_so(tmp_path):
    one, two, three = ["A", "A", ""], ["B", "B", ""], ["C", "C", ""]
    records = make_papers(papers=4, authors=5)
    for record, team in zip(records, ([one, two], [one], [one, two], [one, three]), strict=True):
        record["authors_parsed"] = team
    write_lines(tmp_path / "few.jsonl", records)
    few = read_papers(tmp_path / "few.jsonl", cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="nothing is outside"):
        outside_papers(few, select_papers(few, test_size=1))


def test_a_tokenizer_is_read_back_as_it_was_made(tmp_path):
    texts = ["graph vertex edge graph", "vertex graph coloring"] * 5
    made = train_tokenizer(texts, tmp_path / "tokenizer", size=60)
    back = load_tokenizer(tmp_path / "tokenizer", offline=True)
    assert vocabulary_of(back) == vocabulary_of(made)
    assert vocabulary_of(back).mask_id == back.convert_tokens_to_ids(SPECIAL["mask"])
    assert len(back) <= 60
    ids = back("Graph vertex", max_length=8, padding="max_length")["input_ids"]
    words = back.convert_ids_to_tokens(ids)
    assert words == ["[CLS]", "graph", "vertex", "[SEP]", *["[PAD]"] * 4]
    with pytest.raises(ValueError, match="size=5"):
        train_tokenizer(texts, tmp_path / "none", size=5)


SIZES = ["--hidden-size", "16", "--layers", "1", "--heads", "2", "--intermediate-size", "32"]
SHORT = ["--max-length", "16", "--most-masked", "4", "--vocabulary", "150"]


@pytest.mark.slow
def test_a_private_run_starts_from_what_was_made(papers, tmp_path, caplog):
    """Both heads, with the recipe's own reading of the folder."""
    output, cache = tmp_path / "warm", tmp_path / "cache"
    arguments = ["--path", str(papers), "--output", str(output), "--cache-dir", str(cache)]
    arguments += ["--test-size", "50", "--epochs", "2", "--batch-size", "8", "--lr", "1e-2"]
    assert arxiv_warm_start.main([*arguments, *SIZES, *SHORT]) == 0
    facts = json.loads((output / "outside.json").read_text())
    assert facts["papers"] == facts["of_one_author"] > 20
    assert facts["accuracy_on_watched"] is not None
    model = AutoModelForMaskedLM.from_pretrained(output / "masked-tokens")
    assert len(AutoTokenizer.from_pretrained(output / "tokenizer")) == model.config.vocab_size
    for head in ("category", "masked-tokens"):
        settings = [
            f"data.path={papers}", f"data.cache_dir={cache}", "data.test_size=50",
            "data.max_length=16", "data.max_masked=4", f"data.tokenizer={output / 'tokenizer'}",
            f"model.source={output / head}", f"model.head={head}", "data.offline=true",
            "scheme.min_sep=2", "strategy.bands=2", "scheme.batch_size=12", "steps=2",
            "evaluate_every=2", "plots=false", "seed=3", "privacy.epsilon=null",
            "privacy.noise_multiplier=1",
        ]  # fmt: skip
        given = ["--config", "configs/arxiv_minsep.yaml", "--output", str(tmp_path / head)]
        assert train([*given, *settings]) == 0
    assert "begin at random" not in caplog.text
    # One encoder under two heads.
    other = AutoModelForSequenceClassification.from_pretrained(output / "category")
    for name, value in other.bert.encoder.state_dict().items():
        assert torch.equal(model.bert.encoder.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--epochs", "0"], "--epochs"),
        (["--vocabulary", "-1"], "--vocabulary"),
        (["--most-masked", "0"], "--most-masked"),
        (["--max-length", "2"], "--max-length"),
        (["--lr", "0"], "--lr"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--heads", "3"], "multiple"),
        (["--vocabulary", "5"], "--vocabulary"),
    ],
)
def test_mistakes_are_refused_before_anything_is_read(
    papers, tmp_path, monkeypatch, capsys, change, message
):
    monkeypatch.setattr(arxiv_warm_start, "read_papers", lambda *_, **__: pytest.fail("read"))
    arguments = ["--path", str(papers), "--output", str(tmp_path / "warm"), *SIZES, *SHORT]
    with pytest.raises(SystemExit, match="2"):
        arxiv_warm_start.main([*arguments, *change])
    assert message in capsys.readouterr().err
    (tmp_path / "warm").mkdir()
    with pytest.raises(SystemExit, match="2"):
        arxiv_warm_start.main(arguments)
    assert "exists already" in capsys.readouterr().err
