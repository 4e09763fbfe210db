"""Which of a statement's fields follow from its mechanism: honest ones do, changed ones do not."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest

from dptrain.accounting import account, calibrate, mechanism_of, profile, restate
from dptrain.accounting.losses import gaussian
from dptrain.commands import main
from dptrain.core import Adjacency, Guarantee, Kind
from dptrain.individual import GDPFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.reporting import STATEMENT, RunFacts, privacy_report, schema, verify_statement
from dptrain.sampling import (
    AttributionGraph,
    BallsInBins,
    CyclicPoisson,
    MinSep,
    Poisson,
    UserMinSep,
)
from dptrain.strategies import BSR, BandMF, Identity

DELTA = 1e-4
SIZES = {"batch_size": 20, "dataset_size": 1000}
GRAPH = AttributionGraph.from_lists([[each % 300] for each in range(600)])
PAIRS = {
    "poisson": (Poisson.for_batch_size(**SIZES, steps=20), Identity()),
    "private size": (Poisson.for_batch_size(**SIZES, steps=20, nominal_size=1100), Identity()),
    "cyclic": (CyclicPoisson.for_batch_size(**SIZES, cycle=4, steps=16), BSR(bands=4)),
    "min-sep": (MinSep.for_batch_size(**SIZES, min_sep=4, steps=12), BandMF(bands=4)),
    "balls in bins": (
        BallsInBins.for_batch_size(batch_size=100, dataset_size=1000, epochs=1),
        BSR(bands=4),
    ),
    "users": (
        UserMinSep.for_batch_size(graph=GRAPH, batch_size=20, min_sep=1, steps=8),
        Identity(),
    ),
}


def mechanism(name: str, sigma: float = 1.5) -> MatrixMechanism:
    scheme, strategy = PAIRS[name]
    return MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma)


def written(folder, guarantee, curve=None):
    as_json, _ = privacy_report(guarantee, folder, profile=curve)
    return json.loads(as_json.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stated(tmp_path_factory):
    """A statement with a curve, about batches that are drawn by coins."""
    run = mechanism("poisson")
    folder = tmp_path_factory.mktemp("stated")
    return written(folder, account(run, delta=DELTA), profile(run))


@pytest.mark.sample(every=7)
@pytest.mark.parametrize("name", PAIRS)
def test_honest_statements_are_reproduced(tmp_path, name):
    guarantee = account(mechanism(name), delta=DELTA).drawn_by("Philox").after(3)
    as_json, as_text = privacy_report(guarantee, tmp_path)
    value = json.loads(as_json.read_text(encoding="utf-8"))
    found = verify_statement(value, as_text.read_text(encoding="utf-8"))
    assert found.refuted == ()
    assert any(line.startswith("the Markdown") for line in found.verified)
    assert any(line.startswith("ε = ") for line in found.verified)
    assert "steps executed = 3" in found.declared
    assert restate(guarantee).epsilon == pytest.approx(guarantee.epsilon, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poisson", "cyclic", "min-sep", "balls in bins"])
def test_what_calibration_states_is_reproduced(tmp_path, name):
    scheme, strategy = PAIRS[name]
    found = calibrate(scheme=scheme, strategy=strategy, epsilon=2.0, delta=DELTA).guarantee
    assert found.certificate is None or "request" in found.certificate
    assert verify_statement(written(tmp_path, found)).refuted == ()


def test_a_statement_of_the_least_delta_is_reproduced(tmp_path):
    for name in ("poisson", "cyclic"):
        found = account(mechanism(name), epsilon=1.0)
        assert found.epsilon == 1.0
        assert verify_statement(written(tmp_path, found)).refuted == ()


def test_the_number_is_that_of_a_gaussian():
    """All examples in every step: √n/σ-GDP, whose ε has a formula."""
    scheme = Poisson(probability=1.0, dataset_size=1000, steps=4)
    run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=4.0)
    truth = gaussian.epsilon(DELTA, 0.5)
    honest = account(run, delta=DELTA)
    for factor, good in ((0.999, False), (0.99999, False), (1.01, True)):
        claimed = dataclasses.replace(honest, epsilon=factor * truth)
        assert verify_statement(json.loads(claimed.to_json())).reproduced is good


def changed(value, path, new):
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] != new
    place[path[-1]] = new
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "new", "words"),
    [
        (["guarantee", "epsilon"], 0.05, "is stated, but poisson-pld proves only"),
        (["guarantee", "delta"], 1e-7, "is stated, but poisson-pld proves only"),
        (["guarantee", "unit"], {"kind": "user", "max_examples": 9}, "protected unit is stated"),
        (["guarantee", "noise_multiplier"], 15.0, "mechanism_hash"),
        (["guarantee", "scheme", "probability"], 0.001, "mechanism_hash"),
        (["guarantee", "scheme", "steps"], 2, "mechanism_hash"),
        (["guarantee", "strategy", "type"], "Nothing", "cannot be rebuilt"),
        (["guarantee", "mechanism_hash"], "0" * 64, "mechanism_hash"),
        (["guarantee", "strategy_hash"], "0" * 64, "strategy hash is stated"),
        (["guarantee", "kind"], "upper bound", "how it was shown is stated"),
        (["guarantee", "kind"], "estimate", "proves nothing"),
        (["guarantee", "adjacency"], "add_remove", "is private under add_remove"),
        (["guarantee", "adjacency"], "replace_one", "is stated, but poisson-pld proves only"),
        (["guarantee", "accountant"], "mmcc", "how it was shown is stated"),
        (["guarantee", "accountant"], "individual GDP filter", "during training"),
        (["guarantee", "accountant"], "magic", "is unknown"),
        (["guarantee", "steps_planned"], 19, "steps planned is stated as 19"),
        (["guarantee", "steps_executed"], 21, "21 steps were executed"),
        (["guarantee", "epsilon"], "inf", "promises nothing"),
        (["sentence"], "Nobody is ever found.", "the sentence is stated"),
        (["conditions"], [], "the conditions are not"),
        (["attacks", "sentence"], "Attacks are impossible.", "what an attack can reach"),
        (["attacks", "mu"], 0.001, "what an attack can reach"),
        (["profile", "delta_add", 3], 1e-9, "the curve states δ = 1e-09 (add)"),
        (["profile", "kind"], "upper bound", "how the curve was shown"),
        (["profile", "accountant"], "min-sep-importance", "the curve δ(ε) is not reproduced"),
        (["profile", "delta_add"], [0.1], "the numbers of ε and δ differ"),
    ],
    ids=str,
)  # fmt: skip
def test_what_was_changed_is_found(tmp_path, capsys, stated, path, new, words):
    assert verify_statement(stated).refuted == ()
    value = changed(stated, path, new)
    assert any(words in line for line in verify_statement(value).refuted)
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(value), encoding="utf-8")
    assert main(["verify", str(file)]) == 1
    said = capsys.readouterr().out
    assert "DOES NOT MATCH: " in said
    assert words in said.rpartition("NOT REPRODUCED: ")[2]


@pytest.mark.slow
def test_a_line_of_the_text_that_was_changed_is_found(tmp_path, capsys):
    """Every line, by a digit or by words; left out, or added."""
    scheme = Poisson(probability=1.0, dataset_size=1000, steps=4)
    run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=4.0)
    facts = RunFacts(optimizer="SGD, lr=0.5", runs=1)
    as_json, as_text = privacy_report(
        account(run, delta=DELTA), tmp_path, profile=profile(run), facts=facts
    )
    value = json.loads(as_json.read_text(encoding="utf-8"))
    lines = as_text.read_text(encoding="utf-8").splitlines()
    assert verify_statement(value, "\n".join(lines)).reproduced
    for number, line in enumerate(lines):
        digit = next((each for each in line if each in "12345678"), None)
        other = line.replace(digit, str(int(digit) + 1), 1) if digit else f"{line}not"
        (refuted,) = verify_statement(
            value, "\n".join([*lines[:number], other, *lines[number + 1 :]])
        ).refuted
        assert refuted.startswith(f"line {number + 1} of the Markdown is ")
    assert not verify_statement(value, "\n".join(lines[:-1])).reproduced
    assert not verify_statement(value, "\n".join([*lines, "No data were used."])).reproduced
    assert main(["verify", str(tmp_path)]) == 0
    as_text.write_text(as_text.read_text(encoding="utf-8").replace("ε = ", "ε = 0.", 1))
    assert main(["verify", str(tmp_path)]) == 1
    assert "DOES NOT MATCH: line" in capsys.readouterr().out


def test_a_text_beside_a_bare_guarantee_is_not_passed_over(tmp_path, capsys):
    """It may say anything of the guarantee, and there is nothing to hold it against."""
    guarantee = account(mechanism("poisson"), delta=DELTA).to_json()
    for text in (guarantee, json.dumps({"guarantee": json.loads(guarantee)})):
        (tmp_path / "stated.json").write_text(text, encoding="utf-8")
        assert main(["verify", str(tmp_path / "stated.json")]) == 0
        (tmp_path / "stated.md").write_text("Nobody can learn anything.", encoding="utf-8")
        capsys.readouterr()
        assert main(["verify", str(tmp_path / "stated.json")]) == 2
        said = capsys.readouterr()
        assert "Reproduced" not in said.out
        assert "cannot be compared with it" in said.err
        (tmp_path / "stated.md").unlink()


def fields_of(described, path=()):
    """Every field that the schema requires, by its path."""
    for name in described.get("required", ()):
        yield (*path, name)
    for name, inner in described.get("properties", {}).items():
        yield from fields_of(inner, (*path, name))


@pytest.mark.parametrize("lies", [True, False], ids=["a text that lies", "no text"])
def test_a_statement_that_lacks_a_field_is_refused(tmp_path, capsys, lies):
    """Whichever it is, also one in another, and whatever the Markdown says."""
    run = mechanism("poisson")
    curve = profile(run)
    drawn = dataclasses.replace(curve, kind=Kind.CONFIDENCE, failure_probability=1e-3)
    as_json, as_text = privacy_report(
        account(run, delta=DELTA), tmp_path, profile=drawn, facts=RunFacts()
    )
    whole = json.loads(as_json.read_text(encoding="utf-8"))
    assert main(["verify", str(tmp_path)]) == 0
    text = as_text.read_text(encoding="utf-8").replace("ε = 0.2", "ε = 0.0")
    as_text.unlink()
    if lies:
        as_text.write_text(text, encoding="utf-8")
    paths = list(fields_of(schema()))
    assert ("format",) in paths
    assert ("guarantee", "notes") in paths
    assert ("proven_profile", "kind") in paths
    assert len(paths) > 50
    for path in paths:
        value = copy.deepcopy(whole)
        place = value
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        as_json.write_text(json.dumps(value), encoding="utf-8")
        capsys.readouterr()
        assert main(["verify", str(tmp_path)]) == 2, path
        said = capsys.readouterr()
        assert "Reproduced" not in said.out
        assert path[-1] in said.err
    for kept in (("guarantee",), ("guarantee", "profile"), ("guarantee", "sentence")):
        as_json.write_text(json.dumps({name: whole[name] for name in kept}), encoding="utf-8")
        assert main(["verify", str(tmp_path)]) == 2, kept
    as_json.write_text(json.dumps(whole["guarantee"]), encoding="utf-8")
    assert main(["verify", str(tmp_path)]) == 2


def test_a_statement_of_an_earlier_layout_is_refused_in_a_sentence(tmp_path, capsys, stated):
    """As it was before statements had dates."""
    old = {**copy.deepcopy(stated), "format": 1}
    del old["date"], old["attacks"]["curve_refused"]
    (tmp_path / STATEMENT).write_text(json.dumps(old), encoding="utf-8")
    outputs = ["--html", str(tmp_path / "x.html")]
    for words in (["verify", str(tmp_path)], ["report", str(tmp_path), *outputs]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert (
            "its format is 1, and this version of dptrain knows 3: read it with the version" in said
        )


@pytest.mark.parametrize("date", ["20260302", "2026-02-30", "yesterday", 20260302, None])
def test_what_is_no_date_is_refused(stated, date):
    with pytest.raises(ValueError, match=r"its date .* is not valid: must be YYYY-MM-DD"):
        verify_statement({**stated, "date": date})


def test_a_new_hash_does_not_help(stated):
    """More noise is claimed than there was, consistently; or fewer steps, to claim a smaller ε."""
    honest = Guarantee.from_json(json.dumps(stated["guarantee"]))
    for sigma, good in ((1.0, False), (3.0, True)):
        run = mechanism_of(honest).with_noise(sigma)
        claimed = dataclasses.replace(honest, noise_multiplier=sigma, mechanism_hash=run.hash)
        assert verify_statement(json.loads(claimed.to_json())).reproduced is good


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["account", "calibrate"])
def test_a_changed_certificate_is_found(made_by):
    scheme, strategy = PAIRS["min-sep"]
    if made_by == "account":
        honest = account(mechanism("min-sep"), delta=DELTA)
    else:
        honest = calibrate(scheme=scheme, strategy=strategy, epsilon=2.0, delta=DELTA).guarantee
    value = json.loads(honest.to_json())
    assert verify_statement(value).refuted == ()
    mean = ["certificate", "grid", 0, "remove", "mean"]
    assert value["certificate"]["grid"][0]["remove"]["samples"] > 0
    for path, new in (
        (mean, value["certificate"]["grid"][0]["remove"]["mean"] / 2),
        (["certificate", "seed"], "7"),
        (["certificate", "seed"], None),
        (["certificate", "failure_probability"], 1e-9),
        (["certificate", "violated"], 2e-4),
        (["certificate"], None),
        (["certificate"], {}),
        (["notes"], []),
        (["notes", 0], value["notes"][0].replace("-", "-9")),
        (["epsilon"], 0.9 * value["epsilon"]),
    ):
        assert verify_statement(changed(value, path, new)).refuted, path


def test_a_certificate_of_another_version_is_not_taken(stated):
    scheme, strategy = PAIRS["min-sep"]
    found = calibrate(scheme=scheme, strategy=strategy, epsilon=2.0, delta=DELTA).guarantee
    value = json.loads(found.to_json())
    for place in (value["certificate"], value["certificate"]["request"]):
        place["package"] = "0.0.1"
    (said,) = verify_statement(value).refuted
    assert "made with dptrain 0.0.1" in said


def test_a_budget_that_a_filter_kept_is_not_called_reproduced():
    scheme = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=20)
    run = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.5)
    kept = dataclasses.replace(
        account(run, delta=DELTA), accountant=GDPFilter.name, kind=Kind.UPPER_BOUND
    )
    (said,) = verify_statement(json.loads(kept.to_json())).refuted
    assert "individual GDP filter" in said


def test_a_run_without_noise_promises_nothing():
    silent = account(mechanism("poisson", sigma=0.0), delta=DELTA)
    assert silent.epsilon == math.inf
    assert "promises nothing" in verify_statement(json.loads(silent.to_json())).refuted[0]


def test_the_private_size_is_not_needed():
    run = mechanism("private size")
    found = mechanism_of(account(run, delta=DELTA))
    assert found.hash == run.hash
    assert found.adjacency is Adjacency.ADD_REMOVE
    assert found.scheme.dataset_size == 1100 != run.scheme.dataset_size


def test_the_rest_is_declared(stated):
    value = {**stated, "clipping": {"norm": 1.0}}
    found = verify_statement(value)
    assert found.reproduced
    assert 'clipping: {"norm": 1.0}' in found.declared
    assert any(line.startswith("software: ") for line in found.declared)
    noted = Guarantee.from_json(json.dumps(stated["guarantee"])).with_notes("on a Tuesday")
    assert "note: on a Tuesday" in verify_statement(json.loads(noted.to_json())).declared


@pytest.mark.parametrize("number", [1, 2, 4, 0, "3", True, None])
def test_another_format_is_refused(tmp_path, capsys, stated, number):
    file = tmp_path / STATEMENT
    file.write_text(json.dumps({**stated, "format": number}), encoding="utf-8")
    assert main(["verify", str(tmp_path)]) == 2
    assert (
        f"its format is {number!r}, and this version of dptrain knows 3" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not a privacy statement"),
        ('{"format": 1}', "no 'guarantee'"),
        ('{"guarantee": 3}', "no 'guarantee'"),
        ('{"guarantee": {"epsilon": 1}}', "not a guarantee"),
        ('{"guarantee": {"epsilon": 1}, "guarantee": {"epsilon": 2}}', "'guarantee' appears twice"),
        ("nothing", "not valid JSON"),
    ],
)
def test_what_is_no_statement_is_a_mistake(tmp_path, capsys, text, words):
    file = tmp_path / "x.json"
    file.write_text(text, encoding="utf-8")
    assert main(["verify", str(file)]) == 2
    assert words in capsys.readouterr().err
    assert main(["verify", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_the_command_reads_a_folder_and_writes_what_it_found(tmp_path, capsys):
    run = mechanism("cyclic")
    written(tmp_path, account(run, delta=DELTA), profile(run))
    out = tmp_path / "found.json"
    assert main(["verify", str(tmp_path), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Reproduced: (ε = " in said
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["reproduced"] is True
    for line in found["verified"]:
        assert f"verified: {line}\n" in said
    assert any(f"declared, not verified: {line}\n" in said for line in found["declared"])
