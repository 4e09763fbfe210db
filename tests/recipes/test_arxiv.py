"""The arXiv recipe end to end, offline, on a small file in the real format."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from dptrain.core.guarantee import Guarantee, Kind
from dptrain.mechanism import MatrixMechanism
from recipes.arxiv import main
from recipes.command import INTERRUPTED
from recipes.runfolder import load_checkpoint, read_metrics
from tests.helpers.arxiv_files import (
    archive_row,
    write_archive,
    write_arxiv_files,
    write_lines,
)
from tests.helpers.stopping import ctrl_c, stop_at


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_arxiv_files(tmp_path_factory.mktemp("arxiv"), papers=500, authors=2000)


@pytest.fixture(scope="module")
def tiny(files, tmp_path_factory):
    """What makes the shipped configurations small."""
    return [
        f"data.path={files.snapshot}",
        f"data.tokenizer={files.tokenizer}",
        f"data.cache_dir={tmp_path_factory.mktemp('cache')}",
        "data.test_size=40",
        "data.max_length=16",
        "data.max_masked=6",
        "data.offline=true",
        f"model.source={files.model}",
        "model.pretrained=false",
        "scheme.batch_size=12",
        "steps=4",
        "checkpoint_every=2",
        "evaluate_every=2",
        "evaluate_examples=10",
        "seed=20261120",
    ]


CONFIG = "configs/arxiv_minsep.yaml"
NARROW = ["scheme.min_sep=2", "strategy.bands=2"]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "run"
    assert main(["--config", CONFIG, "--output", str(output), *tiny, *NARROW]) == 0
    return output


@pytest.mark.slow
def test_the_folder_holds_the_statement_and_the_graph(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"graph.txt", "graph.png", "privacy_report.md", "checkpoint.pt", "summary.txt"} <= names
    assert "model is the trained model" in (finished / "summary.txt").read_text()
    report = json.loads((finished / "privacy_report.json").read_text())
    guarantee = Guarantee.from_json(json.dumps(report["guarantee"]))
    assert guarantee.unit.kind == "user"
    assert guarantee.unit.max_examples == 2
    assert guarantee.epsilon <= 8
    assert guarantee.kind in (Kind.UPPER_BOUND, Kind.EXACT, Kind.VERIFIED)
    summary = (finished / "summary.txt").read_text()
    assert "for each user with up to 2 training examples" in summary
    assert "cross entropy of masked tokens" in summary
    # What bounding left out is a part of the statement.
    noted = r"[\d,]+ of [\d,]+ examples were kept so that no user has more than 2"
    assert re.search(noted, summary)
    assert any(re.match(noted, note) for note in guarantee.notes)
    assert [r["step"] for r in read_metrics(finished / "metrics.jsonl") if r["split"] == "test"]


@pytest.mark.slow
def test_users_stay_apart_in_what_was_planned(finished):
    """The checkpoint's scheme is the one of the guarantee, and it bars users for b - 1 steps."""
    mechanism = MatrixMechanism.from_dict(load_checkpoint(finished)["run"]["mechanism"])
    assert mechanism.scheme.min_sep == 2
    assert mechanism.scheme.graph.max_examples == 2
    assert not mechanism.scheme.graph.attached


@pytest.mark.slow
def test_the_saved_model_and_tokenizer_are_complete(finished):
    model = AutoModelForMaskedLM.from_pretrained(finished / "model")
    trained = load_checkpoint(finished)["run"]["module"]
    ours = model.state_dict()
    for name, value in trained.items():
        assert torch.equal(ours[name], value), name
    tokenizer = AutoTokenizer.from_pretrained(finished / "model", local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.slow
def test_ctrl_c_then_resume_ends_in_the_same_model(tiny, finished, tmp_path, monkeypatch):
    # Certificates draw at random: calibrating again may end at the next noise multiplier.
    noise = load_checkpoint(finished)["run"]["mechanism"]["noise_multiplier"]
    arguments = ["--config", CONFIG, "--output", str(tmp_path / "run"), *tiny, *NARROW]
    arguments += ["privacy.epsilon=null", f"privacy.noise_multiplier={noise}"]
    with monkeypatch.context() as patch:
        stop_at(patch, 3, ctrl_c)
        assert main(arguments) == INTERRUPTED
    assert main([*arguments, "--resume"]) == 0
    ours, theirs = (load_checkpoint(p)["run"] for p in (tmp_path / "run", finished))
    assert ours["ledger"] == theirs["ledger"]
    for name, value in theirs["module"].items():
        assert torch.equal(ours["module"][name], value), name


@pytest.mark.slow
def test_a_folder_of_tables_is_trained_on_like_the_snapshot(files, tiny, tmp_path):
    records = [json.loads(line) for line in files.snapshot.read_text().splitlines()]
    rows = [archive_row(record) for record in records]
    folder = write_archive(tmp_path / "archive", [*rows[1:], {**rows[0], "author_text": ""}])
    arguments = ["--config", CONFIG, "--output", str(tmp_path / "run"), *tiny, *NARROW]
    arguments += [f"data.path={folder}", "data.on_error=skip", "plots=false"]
    arguments += ["privacy.epsilon=null", "privacy.noise_multiplier=1"]
    assert main(arguments) == 0
    summary = (tmp_path / "run" / "summary.txt").read_text()
    assert "for each user with up to 2 training examples" in summary
    assert "lines of the archive were skipped" in summary


def test_short_batches_are_told_before_the_first_step(tiny, tmp_path, monkeypatch):
    """The paper's limits on fewer papers than the paper has."""
    monkeypatch.setattr("recipes.run.train", lambda *_, **__: pytest.fail("a step was taken"))
    arguments = ["--config", "configs/arxiv_unamplified.yaml", "--output", str(tmp_path / "run")]
    arguments += [*tiny, "steps=40", "strategy.bands=8", "scheme.min_sep=30"]
    with (
        pytest.warns(UserWarning, match=r"UserFixed: \d+ of 40 batches .* Lower batch_size"),
        pytest.raises(pytest.fail.Exception, match="a step was taken"),
    ):
        main([*arguments, "scheme.max_participations=2", "scheme.batch_size=100"])


MISTAKES = [
    (["steps=8"], "bands=16 exceeds the 8 steps"),
    (["scheme.min_sep=0"], "min_sep=0 must be at least 1"),
    (["scheme.min_sep=two"], "min_sep='two' must be an integer"),
    (["scheme.exclusion=all"], "exclusion='all' must be one of"),
    (["scheme.burn_in=-1"], "burn_in=-1 must be at least 0"),
    (["scheme.type=Poisson"], "would protect single examples.*UserFixed or UserMinSep"),
    (
        ["scheme.type=UserFixed", "scheme.min_sep=2", "scheme.max_participations=0"],
        "max_participations=0 must be at least 1",
    ),
    (["privacy.epsilon=-1"], "privacy.epsilon=-1: it should be greater than 0"),
    (["privacy.delta=2"], "privacy.delta=2: it should be less than 1"),
    (["privacy.max_grad_norm=0"], "privacy.max_grad_norm=0"),
    (["max_physical_batch_size=0"], "max_physical_batch_size=0"),
    (["seed=-1"], "seed=-1"),
    (["data.test_size=0"], "data.test_size=0"),
    (["data.max_examples=0"], "data.max_examples=0"),
    (["data.max_neighbors=0"], "data.max_neighbors=0"),
    (["data.max_length=2"], "data.max_length=2"),
    (["data.max_masked=0"], "data.max_masked=0"),
    (["model.dropout=1"], "model.dropout=1"),
]


@pytest.mark.sample(every=13)
@pytest.mark.parametrize(("change", "reason"), MISTAKES)
def test_mistakes_are_refused_before_anything_is_read(
    tiny, tmp_path, monkeypatch, capsys, change, reason
):
    """Reading, bounding and tokenizing take minutes at size."""
    monkeypatch.setattr("recipes.arxiv.arxiv", lambda *_, **__: pytest.fail("the data was read"))
    arguments = ["--config", CONFIG, "--output", str(tmp_path / "run"), *tiny]
    assert main([*arguments, "scheme.batch_size=1024", "steps=1000", *change]) == 2
    assert re.search(reason, capsys.readouterr().err)


def _edited(edit):
    def change(records):
        edit(records)
        return records

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda records: records, 0),  # merely moved
        (lambda records: records[:-9], 2),
        (_edited(lambda records: [r.update(abstract="we show") for r in records[::7]]), 2),
        (_edited(lambda records: records[3]["authors_parsed"].append(["New", "One", ""])), 2),
    ],
)
def test_other_papers_are_refused_on_resume(
    files, tiny, finished, tmp_path, capsys, change, status
):
    records = [json.loads(line) for line in files.snapshot.read_text().splitlines()]
    write_lines(tmp_path / "other.jsonl", change(records))
    arguments = ["--config", CONFIG, "--output", str(finished), "--resume", *tiny, *NARROW]
    assert main([*arguments, f"data.path={tmp_path / 'other.jsonl'}"]) == status
    assert status == 0 or "changed" in capsys.readouterr().err


@pytest.mark.sample(every=15)
@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        (["model.head=category"], "cross entropy of the archive"),
        (["model.head=category", "grad_sample_mode=functorch", "optimizer.name=adam"], "archive"),
        (["grad_sample_mode=functorch"], "masked tokens"),
        (["data.max_masked=null"], "masked tokens"),
        pytest.param(
            ["scheme.exclusion=participation", "privacy.accountant=gaussian"],
            "masked tokens",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_heads_modes_and_exclusions(tiny, tmp_path, capsys, changes, loss):
    arguments = ["--config", CONFIG, "--output", str(tmp_path / "run"), *tiny, *NARROW, *changes]
    assert main([*arguments, "steps=2", "plots=false"]) == 0
    assert loss in capsys.readouterr().out


@pytest.mark.sample(every=7)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.path=null"], "data.path=null"),
        (["data.path=/nowhere.json"], "no arXiv snapshot /nowhere.json"),
        (["data.test_size=100000"], "use at most"),
        (["data.tokenizer=/nowhere"], "no tokenizer '/nowhere'"),
        (["scheme.batch_size=10000"], "largest possible"),
        (["scheme.min_sep=4", "scheme.batch_size=80"], "largest possible"),
        (["model.head=sentiment"], 'model.head="sentiment"'),
        (["grad_sample_mode=ghost"], "mode='bookkeeping'"),
        (["data.max_examples=0"], "max_examples=0"),
        (["data.max_neighbors=0"], "max_neighbors=0"),
        (["--simulate", "100"], "use at most 12"),
        (
            ["privacy.certificates=some", "privacy.accountant=revealed-draws"],
            "privacy.certificates='some'",
        ),
        (["strategy.bands=5"], "strategy: "),
        (["scheme.type=MinSep", "scheme.min_sep=2"], "users"),
    ],
)
def test_mistakes_end_in_one_line(tiny, tmp_path, capsys, changes, message):
    arguments = ["--config", CONFIG, "--output", str(tmp_path / "run"), *tiny, *NARROW, *changes]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error
    assert not (tmp_path / "run").exists()
