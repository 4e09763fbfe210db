"""Tables of the site say what the files of results say, and where they come from."""

import json
import pathlib
import re
import statistics
from typing import Any

import numpy as np
import pytest
import scipy.stats

from scripts import results
from scripts.docs import claims, tables
from scripts.docs.pages import ROOT


@pytest.mark.parametrize("name", tables.names())
def test_every_table_is_made_and_says_what_made_it(name: str) -> None:
    body, *_, origin = tables.table(name).strip().split("\n\n")
    head, rule, *rows = body.splitlines()
    assert rows
    columns = head.count("|")
    for line in (rule, *rows):
        assert len(re.findall(r"(?<!\\)\|", line)) == columns, line
    for path in re.findall(r"`(scripts/[\w/.]+)`", f"{origin}{body}"):
        assert (ROOT / path).exists(), path
    assert re.search(r"made by `(scripts/|dptrain strategies)|`dptrain account --support`", origin)


def test_every_file_of_a_benchmark_is_shown() -> None:
    for path in (ROOT / "scripts/bench/results").glob("*.json"):
        assert results.read(path)["tables"] or path.stem in tables.names(), path.name


@pytest.mark.parametrize("name", tables.figures())
def test_every_plot_says_what_drew_it(name: str) -> None:
    image, _, origin = tables.insert(f"<!-- figure: {name} -->\n", "x").strip().splitlines()
    assert image == f"![{name}](x/{name}.png)"
    made_by = re.findall(r"made by `(.*)`", origin)[0]
    drawn = name.removesuffix("_mnist")
    assert made_by == "dptrain strategies" or drawn[:-1] in (ROOT / made_by).read_text()


def _cells(name: str) -> list[list[str]]:
    lines = tables.table(name).splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[2:]
        if line.startswith("|")
    ]


BENCH, PAPER = ROOT / "scripts/bench/results", ROOT / "scripts/paper/results"


def _runs(path: pathlib.Path) -> dict[tuple[str, str, str], dict[float, list[dict[str, Any]]]]:
    """Finished runs of a contest by kind, method and ε, then by learning rate."""
    found: dict[tuple[str, str, str], dict[float, list[dict[str, Any]]]] = {}
    for run in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if run["kind"] != "noise":
            key = run["kind"], run["method"], f"{run['epsilon']:g}"
            found.setdefault(key, {}).setdefault(run["rate"], []).append(run)
    return found


DIGITS = (0.0075, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5)
CIFAR10 = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.6, 1.0)
OF_ARXIV = ("dp-sgd", "cyclic", "min-sep", "unamplified")


@pytest.mark.parametrize(
    ("name", "folder", "methods", "rates", "searched"),
    [
        ("utility_digits", BENCH, ("opacus", "identity", "bandmf"), DIGITS, False),
        ("utility_mnist", BENCH, ("opacus", "poisson", "min-sep"), (0.06, *DIGITS[4:], 1.0), False),
        ("arxiv_fig5", PAPER, OF_ARXIV, (0.03, 0.1, 0.3, 1.0), True),
        ("arxiv_fig5_whole", PAPER, OF_ARXIV, (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), True),
        ("cifar10_fig4", PAPER, ("dp-sgd", "cyclic", "balls-in-bins", "min-sep"), CIFAR10, True),
    ],
)
def test_a_contest_shows_the_mean_of_its_runs(name, folder, methods, rates, searched) -> None:
    """At the rate with the best tuning runs, if it is known: all, or its neighbors, were tried."""
    runs = _runs(folder / f"{name}.jsonl")
    sign, key, digits = (-1, "loss", 4) if "arxiv" in name else (100, "accuracy", 1)
    for epsilon, *cells in _cells(name):
        for method, cell in zip(methods, cells, strict=True):
            tuning = runs.get(("tuning", method, epsilon), {})
            score = {rate: statistics.mean(r[key] for r in each) for rate, each in tuning.items()}
            best = max(score, key=lambda rate: sign * score[rate], default=1.0)
            at = rates.index(best)
            wanted = rates[max(at - 1, 0) : at + 2] if searched else rates
            final = runs.get(("final", method, epsilon), {}).get(best, [])
            final = [run for run in final if run["seed"] < 5]
            if not {*wanted} <= {*score} or not final:
                assert cell == "not run"
                continue
            mean = abs(sign) * statistics.mean(run[key] for run in final)
            assert float(cell.split()[0]) == pytest.approx(mean, abs=0.51 * 10**-digits)
            assert not searched or cell.endswith(f"({len(final)})")


def test_the_tuning_runs_on_arxiv_are_those_of_the_files() -> None:
    """The least loss of what was tried; the search is over where both neighbors were tried."""
    runs, ladder = _runs(PAPER / "arxiv_fig5_whole.jsonl"), (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
    for epsilon, *cells in _cells("arxiv_fig5_whole_tuning"):
        for method, cell in zip(OF_ARXIV, cells, strict=True):
            found = runs.get(("tuning", method, epsilon), {})
            tried = {rate: run["loss"] for rate, (run,) in found.items()}
            if not tried:
                assert cell == "not run"
                continue
            best = min(tried, key=lambda rate: tried[rate])
            at = ladder.index(best)
            more = "" if {*ladder[max(at - 1, 0) : at + 2]} <= {*tried} else " …"
            assert cell == f"{tried[best]:.4f} ({best:g}{more})"


def test_claims_on_arxiv_by_their_intervals() -> None:
    """Welch's interval of a difference against scipy's test on samples of those moments."""
    rng = np.random.default_rng(0)

    def cell(values: np.ndarray) -> dict[str, float]:
        low, high = scipy.stats.t.interval(
            0.95, len(values) - 1, values.mean(), scipy.stats.sem(values)
        )
        return {
            "mean": values.mean(), "half_width": (high - low) / 2, "seeds": len(values)
        }  # fmt: skip

    seen = set()
    for shift in (-0.5, -0.1, 0.0, 0.1, 0.5) * 4:
        one, two = rng.normal(0, 0.1, 3), rng.normal(shift, 0.2, 5)
        low, high = scipy.stats.ttest_ind(two, one, equal_var=False).confidence_interval(0.95)
        expected = "holds" if low > 0 else "does not hold" if high < 0 else "cannot be told"
        assert claims.told(cell(one), cell(two)) == expected
        seen.add(expected)
    assert len(seen) == 3
    assert claims.told(None, cell(two)) == claims.NOT_RUN


def test_predicted_claims_on_arxiv_are_what_the_page_says() -> None:
    """Words of docs/benchmarks/arxiv.md that no table makes."""
    errors = {epsilon: claims.errors_by_authors(epsilon) for epsilon in ("1", "2", "4", "8", "16")}
    for epsilon, each in errors.items():
        assert (each["min-sep"] < each["dp-sgd"]) == (epsilon == "16")
        assert each["unamplified"] < each["min-sep"]
        assert each["cyclic"] < each["dp-sgd"]
        assert (each["cyclic"] < each["unamplified"]) == (epsilon != "16")
    assert min(errors["1"], key=lambda name: errors["1"][name]) == "cyclic"
    assert errors["1"]["dp-sgd"] < errors["1"]["unamplified"]


def test_figures_on_arxiv_that_no_table_makes_are_those_of_the_files() -> None:
    page = " ".join((ROOT / "docs/benchmarks/arxiv.md").read_text().split())
    outside = json.loads((PAPER / "arxiv_fig5_outside.json").read_text())
    assert f"There are {outside['papers']:,}. Every one has a single author" in page
    assert outside["of_one_author"] == outside["papers"]
    assert f"{outside['not_outside_of_users']:,} more papers of a single author" in page
    assert f"{outside['not_outside_of_bounded_away']:,} more are by authors" in page
    passes = outside["settings"]["epochs"]
    assert f"({passes} passes, {outside['cpu_seconds']:.0f} CPU-seconds)" in page
    runs = _runs(PAPER / "arxiv_fig5.jsonl").items()
    tuning = [each for (kind, *_), found in runs if kind == "tuning" for each in found.values()]
    before = [run["before"] for same in tuning for run in same]
    assert all(each == before[0] for each in before)
    accuracy, loss = before[0]["accuracy"], before[0]["loss"]
    assert f"names {100 * accuracy:.1f} % of the archives" in page
    assert f"with a loss of {loss:.3f}" in page


def test_noise_of_both_libraries_is_that_of_the_runs() -> None:
    lines = map(json.loads, (BENCH / "utility_digits.jsonl").read_text().splitlines())
    noise = {
        (line["method"], f"{line['epsilon']:g}"): line["noise"]
        for line in lines
        if line["kind"] == "noise"
    }
    for epsilon, theirs, ours in _cells("utility_digits_sigma"):
        assert float(theirs) == pytest.approx(noise["opacus", epsilon], abs=5.1e-5)
        sigma = noise["identity", epsilon]["noise_multiplier"]
        assert float(ours) == pytest.approx(sigma, abs=5.1e-5)


def test_memory_is_what_a_step_adds_over_what_an_ordinary_one_adds() -> None:
    (tree,) = results.read(BENCH / "step_time.json")["devices"]
    added = {
        (each["allocator"], each["side"]): each["peak_bytes"] - each["start_bytes"]
        for each in tree["memory"]
        if each["model"] == "vgg"
    }
    shown = {
        row[2]: row[-1] for row in _cells("step_time") if row[:2] == ["memory", "VGG, 32×32; 256"]
    }
    for allocator, cell in shown.items():
        ratio = added[allocator, "bookkeeping"] / added[allocator, "ordinary"]
        assert float(cell) == pytest.approx(ratio, abs=0.0051)
    assert len(shown) == 2


def test_papers_numbers_where_they_are_known() -> None:
    """Choquette-Choo et al. 2024 state .397, .189 and .0901 (Fig. 8) and .806 (App. F.5)."""
    said = dict(_cells("papers"))
    unamplified = re.findall(r"[\d.]+", said["`scripts/paper/matrix_fig8.py`"].partition(":")[2])
    assert [float(each) for each in unamplified] == pytest.approx([0.397, 0.189, 0.0901], rel=2e-3)
    assert "all steps 0.806;" in said["`scripts/paper/linear_last_iterate.py`"]


def test_a_table_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'step_tiem'.*step_time"):
        tables.insert("a\n<!-- table: step_tiem -->\n", "x")


def test_only_comments_outside_of_code_are_replaced() -> None:
    shown = "```text\n<!-- table: noise -->\n```\n"
    assert tables.insert(shown, "x") == shown
    assert "ring, 16 bands" in tables.insert("<!-- table: noise -->\n", "x")


def test_tables_of_the_readme_are_those_of_today() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.written_out(text) == text, "run: python -m scripts.docs readme"


def test_a_written_table_is_brought_up_to_date() -> None:
    text = "a\n<!-- table: noise_peer -->\nold\n<!-- end of table -->\nb\n"
    new = tables.written_out(text)
    assert tables.table("noise_peer") in new
    assert "old" not in new
    assert tables.written_out(new) == new
