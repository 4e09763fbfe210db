"""Plans: every σ is what the accountant says, estimates are named so, the YAML trains that."""

import dataclasses
import json
import math

import pytest
from scipy.stats import binom

from dptrain.accounting import calibrate
from dptrain.accounting.min_sep import min_sep_law
from dptrain.commands.cli import main
from dptrain.configuration import build_scheme, build_strategy, read_yaml
from dptrain.core.guarantee import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.planning import Question, compare, training_yaml
from dptrain.planning.estimate import estimate_noise
from dptrain.planning.truncation import (
    SHARE,
    displacements,
    least_max_batch_size,
    least_min_sep_batch_size,
)
from dptrain.sampling import MinSep, Poisson
from dptrain.strategies import BandMF, Identity
from tests.helpers.min_sep_losses import MinSepLosses

SMALL = {
    "epsilon": 4.0, "delta": 1e-4, "dataset_size": 1000, "batch_size": 100,
    "parameters": 1000,
}  # fmt: skip


QUICK = {"timed": False, "progress": False}


def small(**options):
    return Question.of_run(**{**SMALL, "epochs": 2, "max_bands": 2, "buffers": 0, **options})


@pytest.fixture(scope="module")
def plan():
    return compare(small(buffers=1), **QUICK)


@pytest.mark.slow
def test_rows_are_the_accountants_answers(plan):
    assert plan.question.steps == 20
    proven = [row for row in plan.rows if not row.is_estimate]
    assert {row.candidate.scheme["type"] for row in proven} >= {
        "Poisson", "CyclicPoisson", "BallsInBins", "Shuffled",
    }  # fmt: skip
    for row in proven:
        mechanism = row.mechanism
        shown = calibrate(
            scheme=mechanism.scheme,
            strategy=mechanism.strategy,
            epsilon=4.0,
            delta=1e-4,
            accountant=row.accountant.name,
        )
        assert row.noise_multiplier == shown.mechanism.noise_multiplier
        assert row.kind is shown.guarantee.kind
        assert row.total_error == row.noise_multiplier * mechanism.strategy.rmse(20)
        assert row.error == row.total_error / mechanism.scheme.expected_batch_size
    assert list(plan.rows) == sorted(plan.rows, key=lambda row: row.error)


@pytest.mark.slow
def test_estimates_are_named_everywhere(plan):
    estimates = [row for row in plan.rows if row.is_estimate]
    assert {row.candidate.scheme["type"] for row in estimates} >= {"MinSep"}
    lines = plan.to_markdown().splitlines()[2:]
    for row, line in zip(plan.rows, lines, strict=True):
        assert ("ESTIMATE" in line) == ("≈" in line) == row.is_estimate
        value = row.to_dict()
        assert ("noise_multiplier" in value) != row.is_estimate
        assert ("noise_multiplier_estimate" in value) == row.is_estimate
        assert (value["kind"] == "estimate") == row.is_estimate
    assert "no guarantees" in str(plan)
    assert plan.best_proven is not None
    assert not plan.best_proven.is_estimate


@pytest.mark.slow
def test_says_what_each_choice_buys(plan):
    words = [words for words, _ in plan.gains]
    assert words[0].startswith("Poisson")
    errors = [row.error for _, row in plan.gains]
    assert errors == sorted(errors, reverse=True)
    assert plan.gains[-1][1] is plan.best
    for each in words:
        assert f"- {each}: " in str(plan)
    chosen = [row for row in plan.rows if row.candidate.strategy.get("overlap")]
    assert chosen
    for row in chosen:
        # The declaration in the configuration names the matrix that was priced.
        declared = BandMF(**{k: v for k, v in row.candidate.strategy.items() if k != "type"})
        assert declared.bind(20) == row.mechanism.strategy


@pytest.mark.slow
def test_what_is_left_out_has_a_reason(plan):
    tried = {(r.candidate.scheme_name, r.candidate.strategy_name) for r in plan.rows}
    for each in plan.skipped:
        assert each.reason
        assert each.reason in str(plan)
    skipped = {(s.candidate.scheme_name, s.candidate.strategy_name) for s in plan.skipped}
    assert ("Poisson()", "Identity()") in tried
    for scheme in ("CyclicPoisson(cycle=2)", "MinSep(min_sep=2)", "BallsInBins()"):
        assert (scheme, "BandMF(bands=2)") in tried | skipped
    odd = small(epochs=None, steps=15, max_bands=1)
    found = compare(odd, accountant="poisson-pld", **QUICK)
    reasons = [s.reason for s in found.skipped if s.candidate.scheme["type"] == "BallsInBins"]
    assert any("whole epochs of 10 steps" in reason for reason in reasons)


@pytest.mark.slow
def test_best_obeys_memory_and_constant_batches():
    only = {"accountant": "poisson-pld", **QUICK}
    found = compare(small(fixed_size=True), **only)
    assert "max_batch_size" in found.best.candidate.scheme
    cut = [row.candidate.scheme.get("max_batch_size") is not None for row in found.rows]
    assert [row.eligible for row in found.rows] == cut
    assert 0 < sum(cut) < len(cut)
    found = compare(small(memory=100.0), **only)  # two bands need 4 bytes a parameter
    assert {row.eligible: row.candidate.strategy["type"] for row in found.rows} == {
        False: "BandMF", True: "Identity",
    }  # fmt: skip
    found = compare(small(fixed_size=True), accountant="mmcc", **QUICK)
    assert found.best is None
    assert "Nothing is eligible" in str(found)
    assert found.to_dict()["best"] is None


@pytest.mark.slow
def test_certifies_while_an_estimate_is_best(tmp_path):
    # At the δ of a small data set this takes seconds.
    question = Question(
        epsilon=4.0, delta=2e-3, dataset_size=100, batch_size=25, steps=15, max_bands=2,
        parameters=1000, buffers=0,
    )  # fmt: skip
    options = {"accountant": "min-sep-importance", **QUICK}
    rough = compare(question, **options)
    assert rough.best.is_estimate
    assert rough.best_proven is None
    found = compare(question, certify=True, certificates=tmp_path, **options)
    assert not found.best.is_estimate
    certified = [row for row in found.rows if row.kind is Kind.VERIFIED]
    assert certified
    # What the certificates say decides which is used, so the chances of all are part of δ.
    files = sorted(tmp_path.glob("certificate-*.json"))
    evidence = [json.loads(path.read_text()) for path in files]
    attempts = sum(row.is_estimate and row.eligible for row in rough.rows)
    assert {each["request"].get("attempts", 1) for each in evidence} == {attempts}
    assert len(certified) <= len(files) <= attempts
    for each in evidence:
        wrong, violated = attempts * each["failure_probability"], each["violated"]
        assert violated + wrong * (1 - violated) <= question.delta
    # Training finds the certificate, though for one attempt a larger q would do.
    member = dataclasses.replace(found.best.accountant, cache=tmp_path)
    assert member.attempts == 1
    again = member.calibrate(found.best.mechanism, epsilon=question.epsilon, delta=question.delta)
    assert again.noise_multiplier == found.best.noise_multiplier
    assert sorted(tmp_path.glob("certificate-*.json")) == files
    for row in certified:
        before = next(r for r in rough.rows if r.candidate == row.candidate and r.is_estimate)
        assert row.noise_multiplier == pytest.approx(before.noise_multiplier, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [pytest.param(1.0, marks=pytest.mark.slow), 6.0])
def test_estimate_is_near_an_exact_answer(epsilon):
    # Poisson sampling can be simulated too, and is known exactly.
    scheme = Poisson(probability=0.05, dataset_size=10_000, steps=60)
    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=1.0)
    exact = calibrate(scheme=scheme, strategy=Identity(), epsilon=epsilon, delta=5e-6).mechanism
    found = estimate_noise(MinSepLosses(min_sep_law(mechanism)), epsilon=epsilon, target=5e-6)
    assert found == pytest.approx(exact.noise_multiplier, rel=0.05)


def test_truncation_costs_nothing_that_shows():
    size, p, draws, delta = 1000, 0.1, 20, 1e-4
    found = least_max_batch_size(
        dataset_size=size, probability=p, draws=draws, delta=delta, multiple_of=8
    )
    assert found % 8 == 0

    def by_sum(largest):
        """Σ_s Pr[s others]·p·largest/(s+1) over s ≥ largest."""
        return draws * math.fsum(
            binom.pmf(s, size - 1, p) * p * largest / (s + 1) for s in range(largest, size)
        )

    for largest in (found, found - 8, 90):
        shown = displacements(dataset_size=size, probability=p, max_batch_size=largest, draws=draws)
        assert shown == pytest.approx(by_sum(largest), rel=1e-6)
    assert by_sum(found) <= SHARE * delta < by_sum(found - 8)
    assert least_max_batch_size(dataset_size=5, probability=1.0, draws=9, delta=1e-9) == 5


def test_a_cap_of_b_min_sep_sampling_adds_little():
    scheme = MinSep.for_batch_size(batch_size=512, dataset_size=50_000, min_sep=16, steps=800)
    delta, p0 = 1e-6, 512 / 50_000
    found = least_min_sep_batch_size(scheme, epsilon=8.0, delta=delta, multiple_of=8)
    assert found % 8 == 0
    tail = 800 * binom.sf([found - 1, found - 9], 49_999, p0)
    rho = scheme.probability * (1 - scheme.probability) ** -16
    # Neither direction: -log Pr[x = 0] is above ε here.
    losses = [max(2 * t * p0, t * p0 + t * math.log2(1 + rho)) for t in tail]
    assert losses[0] <= SHARE * delta < losses[1]
    tiny = MinSep(probability=1.0, min_sep=2, dataset_size=5, steps=9)
    assert least_min_sep_batch_size(tiny, epsilon=1.0, delta=1e-9) == 5


@pytest.mark.slow
def test_truncated_row_needs_no_more_noise_than_poisson(plan):
    poisson = [r for r in plan.rows if r.candidate.scheme["type"] == "Poisson"]
    (cut,) = (r for r in poisson if "max_batch_size" in r.candidate.scheme)
    (whole,) = (r for r in poisson if "max_batch_size" not in r.candidate.scheme)
    assert cut.noise_multiplier <= whole.noise_multiplier * 1.002


def test_configuration_declares_the_mechanism_and_no_more(plan, tmp_path):
    for row in plan.rows:
        path = tmp_path / "plan.yaml"
        path.write_text(training_yaml(plan.question, row, command="x"), encoding="utf-8")
        stated = read_yaml(path)
        assert set(stated) == {"scheme", "strategy", "privacy", "steps", "epochs"}
        scheme = build_scheme(stated["scheme"], dataset_size=1000, steps=stated["steps"])
        assert scheme == row.mechanism.scheme
        assert build_strategy(stated["strategy"]).bind(stated["steps"]) == row.mechanism.strategy
        assert stated["privacy"]["noise_multiplier"] is None  # training finds σ, with a proof
    added = training_yaml(plan.question, row, command="x", more={"rate": {"of": 0.5}}, usage="go")
    assert "\nrate:\n  of: 0.5\n" in added
    assert "#   go\n" in added


COMMAND = [
    "plan", "--epsilon", "4", "--delta", "1e-4", "--dataset-size", "1000", "--batch-size", "100",
    "--parameters", "1000",
]  # fmt: skip


def test_plot_shows_every_row(plan, tmp_path):
    pytest.importorskip("matplotlib")
    from dptrain.planning.plots import plot_plan

    plot_plan(plan, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text(encoding="utf-8")
    for row in plan.rows:
        assert row.candidate.scheme["type"] in text
    assert "ESTIMATE" in text


@pytest.mark.parametrize("count", [1, 2, 10, 11, 25])
def test_every_scheme_has_a_color_and_a_marker_of_its_own(count):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    from dptrain.planning.plots import styles_of

    styles = styles_of({f"scheme {i}" for i in range(count)})
    assert len({to_hex(style["color"]) for style in styles.values()}) == count
    assert len({style["marker"] for style in styles.values()}) == count


@pytest.mark.slow
def test_command_writes_what_it_says(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, figures, plot = (tmp_path / "new" / name for name in ("p.yaml", "p.json", "p.png"))
    files = ["--out", str(out), "--json", str(figures), "--plot", str(plot)]
    only = ["--accountant", "poisson-pld", "--buffers", "0"]
    assert main([*COMMAND, "--epochs", "2", "--max-bands", "2", *only, *files]) == 0
    said = capsys.readouterr().out
    for path in (out, figures, plot):
        assert str(path) in said
    assert "dptrain plan --epsilon 4" in out.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "exactly one of epochs and steps"),
        (["--epochs", "1", "--steps", "10"], "exactly one of epochs and steps"),
        (["--epochs", "-1"], "epochs=-1"),
        (["--steps", "0"], "steps=0"),
        (["--steps", "10", "--batch-size", "1001"], "1001"),
        (["--epochs", "1", "--batch-size", "1001"], "batch_size=1001"),
        (["--epochs", "1", "--batch-size", "0"], "batch_size=0"),
        (["--steps", "10", "--max-bands", "11"], "max_bands=11 exceeds steps=10"),
        (["--steps", "10", "--max-bands", "0"], "max_bands=0"),
        (["--steps", "10", "--buffers", "-1"], "buffers=-1"),
        (["--steps", "10", "--delta", "0"], "delta=0"),
        (["--steps", "10", "--delta", "1"], "delta=1"),
        (
            ["--steps", "10", "--delta", "0.001", "--out", "x.yaml"],
            "--delta 0.001 with --out: training requires δ below 1/N = 0.001",
        ),
        (["--steps", "10", "--epsilon", "-2"], "epsilon=-2"),
        (["--steps", "10", "--dataset-size", "0"], "dataset_size=0"),
        (["--steps", "10", "--momentum", "1"], "momentum=1"),
        (["--steps", "10", "--physical-batch-size", "0"], "physical_batch_size=0"),
        (
            ["--steps", "10", "--accountant", "poison"],
            "'poison' is unknown; did you mean poisson-pld?",
        ),
        (["--steps", "10", "--out", "FILE/x.yaml"], "file"),
        (["--steps", "10", "--plot", "x.txt"], ".png"),
    ],
)
def test_mistakes_are_found_before_the_work(arguments, match, tmp_path, capsys, monkeypatch):
    def never(*_, **__):
        raise AssertionError("worked")

    monkeypatch.setattr("dptrain.planning.comparison._Trials.try_out", never)
    (tmp_path / "file").touch()
    words = [word.replace("FILE", str(tmp_path / "file")) for word in arguments]
    assert main([*COMMAND, *words]) == 2
    assert match in capsys.readouterr().err


def test_memory_needs_a_unit():
    with pytest.raises(SystemExit) as error:
        main([*COMMAND, "--steps", "10", "--memory", "4 apples"])
    assert error.value.code == 2


@pytest.mark.slow
def test_the_plan_so_far_is_given_out_after_every_pair():
    grown = []
    whole = compare(small(), found=grown.append, accountant="poisson-pld", **QUICK)
    sizes = [len(plan.rows) + len(plan.skipped) for plan in grown]
    assert len(sizes) > 2
    assert sizes == sorted(sizes)
    assert grown[-1] == whole
