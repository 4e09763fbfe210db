"""``dptrain odometer``: what a ledger takes, what it refuses, and what it notices."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import threading

import pytest

from dptrain.accounting import BudgetFilter, account
from dptrain.accounting.losses import gaussian
from dptrain.commands.cli import main
from dptrain.commands.several.ledger import (
    LedgerEntry,
    append,
    locked_ledger,
    read_ledger,
)
from dptrain.core import Adjacency, Kind, Unit
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson
from dptrain.strategies import Identity
from tests.helpers.gaussian_runs import full_batches

EPSILON, DELTA = 3.0, 1e-5


@pytest.fixture
def opened(tmp_path):
    def begin(*words, name="ledger.jsonl"):
        path = tmp_path / name
        numbers = ["--epsilon", str(EPSILON), "--delta", str(DELTA)]
        assert main(["odometer", "open", str(path), *numbers, *words]) == 0
        return path

    return begin


def added(ledger, *words):
    return main(["odometer", "add", str(ledger), *words])


def shown(ledger, tmp_path, *words):
    out = tmp_path / "shown.json"
    assert main(["odometer", "show", str(ledger), "--json", str(out), *words]) == 0
    return json.loads(out.read_text())


def test_gaussians_fill_the_total(tmp_path, written, opened, capsys):
    ledger = opened("--data-set", "people", "--unit", "example", "--adjacency", "zero-out")
    total = gaussian.largest_mu(EPSILON, DELTA / 2)
    mus = [0.6 * total, 0.5 * total, 0.4 * total]
    stated = account(full_batches(mus[1]), delta=1e-6).to_json()
    for name, text in (
        ("first.json", full_batches(mus[0]).to_json()),
        ("second.json", stated),
        ("third.json", full_batches(mus[2]).to_json()),
    ):
        assert added(ledger, written(name, text)) == 0
    found = shown(ledger, tmp_path)
    assert found["mu"] == pytest.approx(total, rel=1e-9)
    for row, mu in zip(found["releases"], mus, strict=True):
        assert row["mu"] == pytest.approx(mu, rel=1e-4)
    left = total * math.sqrt(1 - 0.36 - 0.25 - 0.16)
    assert found["left"]["mu"] == pytest.approx(left, rel=1e-3)
    assert (found["epsilon"], found["delta"]) == (EPSILON, DELTA)
    planned = found["if_planned"]
    truth = gaussian.epsilon(DELTA, math.hypot(*mus))
    assert truth <= planned["composed"] <= 1.01 * truth
    assert planned["composed"] * 0.99 < planned["charges"] < 1.05 * truth
    basic = sum(gaussian.epsilon(DELTA / 3, mu) for mu in mus)
    assert planned["basic"] == pytest.approx(basic, rel=1e-3)
    text = capsys.readouterr().out
    assert "only the total holds" in text
    assert "All releases of people" in text
    # Too much is refused and leaves no trace; what is left fits.
    before = ledger.read_bytes()
    assert added(ledger, written("large.json", full_batches(1.02 * left).to_json())) == 1
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "Do not make this release" in line
    assert "room for a Gaussian release of ε" in line
    assert ledger.read_bytes() == before
    assert added(ledger, written("small.json", full_batches(0.98 * left).to_json())) == 0
    assert "nothing is promised" not in capsys.readouterr().out
    assert shown(ledger, tmp_path, "--delta", str(DELTA / 2))["epsilon"] == "inf"
    other = shown(ledger, tmp_path, "--delta", "1e-4")["epsilon"]
    assert other == pytest.approx(gaussian.epsilon(1e-4 - DELTA / 2, total), rel=1e-9)


@pytest.mark.slow
def test_a_sampled_run_is_charged_less_than_without_sampling(tmp_path, written, opened, capsys):
    """Next to its own ε at the same δ; more d, less μ; and a run that is over is told apart."""
    ledger = opened()
    scheme = Poisson.for_batch_size(batch_size=20, dataset_size=1000, steps=50)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.5)
    guarantee = account(mechanism, delta=1e-6)
    for slack in ("2e-7", "2e-6"):
        assert added(ledger, written("m.json", mechanism.to_json()), "--slack", slack) == 0
    assert "one more run of it" in capsys.readouterr().out
    few, many = shown(ledger, tmp_path)["releases"]
    assert few["slack"], many["slack"] == (2e-7, 2e-6)
    assert many["mu"] < few["mu"] < 0.4 * math.sqrt(50) / 1.5
    # Its (ε, δ) does not change by being charged: no smaller, and not by much larger.
    charged = gaussian.epsilon(1e-6 - 2e-7, few["mu"])
    assert guarantee.epsilon <= charged <= 1.3 * guarantee.epsilon
    capsys.readouterr()
    over = written("over.json", guarantee.after(50).to_json())
    assert added(ledger, over) == 0
    assert "has run already" in capsys.readouterr().out


def test_of_a_bare_guarantee_its_delta_is_charged(tmp_path, written, opened):
    ledger = opened()
    one = dataclasses.replace(
        account(full_batches(0.05), delta=1e-6), mechanism_hash="of something else"
    )
    assert added(ledger, written("one.json", one.to_json())) == 0
    (row,) = shown(ledger, tmp_path)["releases"]
    assert 1e-6 <= row["slack"] <= 1.0001e-6
    # Pure ε against a Gaussian: at least by total variation.
    advantage = math.tanh(one.epsilon / 2) * (1 - 1e-6)
    assert gaussian.delta(0.0, row["mu"]) >= advantage - 2e-6


def test_how_releases_were_shown_is_told(tmp_path, written, opened, capsys):
    ledger = opened()
    doubtful = dataclasses.replace(
        account(full_batches(0.05), delta=1e-6),
        kind=Kind.CONFIDENCE,
        certificate={"failure_probability": 3e-7},
        mechanism_hash="of something else",
    )
    path = written("simulated.json", doubtful.to_json())
    assert added(ledger, path) == added(ledger, path) == 0
    assert shown(ledger, tmp_path)["kind"] == "confidence bound"
    assert "at most 6e-07" in capsys.readouterr().out


@pytest.mark.slow
def test_what_has_no_place_in_a_ledger_is_refused(tmp_path, written, opened, capsys):
    ledger = opened()
    stated = account(full_batches(0.3), delta=1e-6)
    assert added(ledger, written("first.json", stated.to_json())) == 0

    def refused(*words, into=ledger, action="add"):
        capsys.readouterr()
        assert main(["odometer", action, str(into), *words]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    user = dataclasses.replace(stated, unit=Unit(kind="user", max_examples=4))
    assert "no single statement covers both" in refused(written("user.json", user.to_json()))
    other = dataclasses.replace(stated, adjacency=Adjacency.REPLACE_ONE)
    assert "replace_one" in refused(written("replaced.json", other.to_json()))
    small = written("small.json", account(full_batches(0.1, size=900), delta=1e-6).to_json())
    assert "a ledger of its own" in refused(small)
    assert added(ledger, small, "--overlapping") == 0
    guess = dataclasses.replace(stated, kind=Kind.ESTIMATE)
    assert "estimate" in refused(written("guess.json", guess.to_json()))
    assert "no file" in refused("nowhere.json")
    assert "not describe the privacy of a run" in refused(written("x.json", {"a": 1}))
    assert "--slack" in refused(small, "--overlapping", "--slack", "0")
    assert "too small" in refused(small, "--overlapping", "--slack", "1e-15")
    assert "no ledger" in refused(small, into=tmp_path / "nowhere.jsonl")
    assert "is empty" in refused(into=written("empty.jsonl", ""), action="check")
    assert "line 1" in refused(into=written("other.jsonl", "{}\n"), action="show")
    assert "line 1" in refused(into=written("deep.jsonl", "[" * 100_000 + "\n"), action="show")
    numbers = ("--epsilon", "1", "--delta", "1e-5")
    assert "exists" in refused(*numbers, action="open")
    fresh = tmp_path / "fresh.jsonl"
    for words in (
        ("--epsilon", "0", "--delta", "1e-5"),
        ("--epsilon", "1", "--delta", "1"),
        (*numbers, "--share", "1"),
    ):
        refused(*words, into=fresh, action="open")
        assert not fresh.exists()
    users = opened("--unit", "user", "--adjacency", "replace-one", name="users.jsonl")
    assert "--unit user" in refused(written("first.json", stated.to_json()), into=users)
    replaced = opened("--adjacency", "replace-one", name="replaced.jsonl")
    assert "opened for" in refused(written("first.json", stated.to_json()), into=replaced)
    # A bare mechanism is accounted for as the ledger wants it.
    assert added(replaced, written("bare.json", full_batches(0.2).to_json())) == 0
    assert read_ledger(replaced).entries[0].adjacency is Adjacency.REPLACE_ONE


@pytest.fixture
def ledger_of_three(written, opened):
    ledger = opened()
    for mu in (0.1, 0.2, 0.3):
        assert added(ledger, written(f"{mu}.json", full_batches(mu).to_json())) == 0
    return ledger


def rewritten(lines):
    """Lines whose hashes fit to each other again, as a careful forger has them."""
    previous, found = "0" * 64, []
    for line in lines:
        found.append(json.dumps({**json.loads(line), "previous": previous}, ensure_ascii=False))
        previous = hashlib.sha256(found[-1].encode()).hexdigest()
    return "".join(f"{line}\n" for line in found)


def test_what_was_changed_is_noticed(ledger_of_three, capsys):
    ledger = ledger_of_three
    lines = ledger.read_text().splitlines()
    last = hashlib.sha256(lines[-1].encode()).hexdigest()

    def check(text, *words):
        ledger.write_text(text)
        capsys.readouterr()
        status = main(["odometer", "check", str(ledger), *words])
        told = capsys.readouterr()
        return status, told.err + told.out

    whole = "".join(f"{line}\n" for line in lines)
    assert check(whole, "--last", last)[0] == 0
    assert last in check(whole)[1]
    assert rewritten(lines) == whole
    # A charge, a date, a line taken out of the middle, two exchanged, the total.
    changed = [
        [lines[0], lines[1].replace('"date": "2', '"date": "1', 1), *lines[2:]],
        [lines[0], *lines[2:]],
        [lines[0], lines[2], lines[1], lines[3]],
        [lines[0].replace('"epsilon": 3.0', '"epsilon": 4.0'), *lines[1:]],
    ]
    for each in changed:
        assert each != lines
        status, told = check("".join(f"{line}\n" for line in each))
        assert status == 2
        assert "its hash of the previous line" in told
    # With hashes made anew: what does not add up is noticed, the rest only by the noted hash.
    cheaper = {**json.loads(lines[2]), "mu": 0.01}
    forged = rewritten([*lines[:2], json.dumps(cheaper), lines[3]])
    assert "the curve of" in check(forged)[1]
    richer = {**json.loads(lines[0]), "mu": 3.0}
    assert "do not keep" in check(rewritten([json.dumps(richer), *lines[1:]]))[1]
    spent = rewritten([lines[0], *[lines[3]] * 9])
    assert "does not fit" in check(spent)[1]
    missing = rewritten([lines[0], json.dumps({"what": "charged"})])
    assert "line 2: 'failure_probability' is missing" in check(missing)[1]
    shorter = rewritten([lines[0], lines[1], lines[3]])
    assert check(shorter)[0] == 0
    assert "no line has the hash" in check(shorter, "--last", last)[1]
    # The end cut off: only the noted hash tells.
    cut = "".join(f"{line}\n" for line in lines[:-1])
    assert check(cut)[0] == 0
    assert check(cut, "--last", last)[0] == 2
    # An interrupted writer.
    status, told = check(whole[:-10])
    assert status == 2
    assert "line 4 is not complete" in told


@pytest.mark.slow
def test_curves_that_do_not_say_what_they_are_about_are_of_their_release(ledger_of_three):
    """As in ledgers of before curves said so."""
    for entry in read_ledger(ledger_of_three).entries:
        value = entry.to_dict()
        assert value["curve"].pop("unit") == value["unit"]
        assert value["curve"].pop("adjacency") == value["adjacency"]
        assert LedgerEntry.from_dict(value) == entry


@pytest.mark.slow
def test_writers_at_the_same_time_take_turns(ledger_of_three):
    small = read_ledger(ledger_of_three).entries[0]
    count = 24

    def write(_):
        with locked_ledger(ledger_of_three) as (ledger, file):
            try:
                append(ledger, file, small)
            except ValueError:
                return False
            return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        done = list(pool.map(write, range(count)))
    ledger = read_ledger(ledger_of_three)
    assert len(ledger.entries) == 3 + sum(done)
    # As many fit as one writer alone would have written, and no more.
    alone = BudgetFilter(mu=ledger.budget.mu, slack=ledger.budget.slack)
    for each in ledger.entries:
        alone.spend(each.charge)
    assert 0 < sum(done) < count
    assert not alone.fits(small.charge)


def test_a_writer_waits_for_the_one_before(ledger_of_three):
    entry = read_ledger(ledger_of_three).entries[0]
    finished = threading.Event()

    def write():
        with locked_ledger(ledger_of_three) as (ledger, file):
            append(ledger, file, entry)
        finished.set()

    with locked_ledger(ledger_of_three) as (ledger, file):
        other = threading.Thread(target=write)
        other.start()
        assert not finished.wait(0.3)
        append(ledger, file, entry)
    other.join(30)
    assert finished.is_set()
    assert len(read_ledger(ledger_of_three).entries) == 5
