"""Tables of the site say what the files of results say, and where they come from."""

import json
import re
import statistics

import numpy as np
import pytest
import scipy.stats

from scripts.docs import contests, tables
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
    files = {path.stem for path in (ROOT / "scripts/bench/results").glob("*.json")}
    assert files <= set(tables.names())


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


def test_accuracies_are_those_of_the_runs() -> None:
    """Means over seeds 0 to 4 at the learning rate that the file says was chosen, from the runs."""
    tree = json.loads((ROOT / "scripts/bench/results/utility_digits.json").read_text())
    for epsilon, *cells in _cells("utility_digits"):
        for side, cell in zip(("opacus", "identity", "bandmf"), cells, strict=True):
            rate = tree["table"][f"{side} {epsilon}"]["lr"]
            runs = [tree["runs"][f"{side} {epsilon} lr={rate} seed={seed}"] for seed in range(5)]
            assert float(cell.split()[0]) == pytest.approx(100 * sum(runs) / 5, abs=0.051)


def test_accuracies_on_mnist_are_those_of_the_runs() -> None:
    """Means over five seeds at the learning rate with the best tuning run, from the runs' files."""
    folder = ROOT / "scripts/bench/results/utility_mnist/finished"
    for epsilon, *cells in _cells("utility_mnist"):
        for method, cell in zip(("opacus", "poisson", "min-sep"), cells, strict=True):
            start = f"_{method}_eps{epsilon}_lr"
            tried = {
                path: json.loads(path.read_text())["accuracy"]
                for path in folder.glob(f"tuning{start}*_seed100.json")
            }
            best = max(tried, key=lambda path: tried[path])
            chosen = best.stem.removeprefix(f"tuning{start}").removesuffix("_seed100")
            runs = [
                json.loads((folder / f"final{start}{chosen}_seed{seed}.json").read_text())
                for seed in range(5)
            ]
            mean = sum(run["accuracy"] for run in runs) / 5
            assert float(cell.split()[0]) == pytest.approx(100 * mean, abs=0.051)


def test_losses_on_arxiv_are_those_of_the_runs() -> None:
    """Means over the seeds that are there, at the rate with the least loss of the tuning runs."""
    folder = ROOT / "scripts/paper/results/arxiv_fig5/finished"
    for epsilon, *cells in _cells("arxiv_fig5"):
        for method, cell in zip(("dp-sgd", "cyclic", "min-sep", "unamplified"), cells, strict=True):
            start = f"_{method}_eps{epsilon}_lr"
            tried = {
                path: json.loads(path.read_text())["loss"]
                for path in folder.glob(f"tuning{start}*_seed100.json")
            }
            best = min(tried, key=lambda path: tried[path]).stem if len(tried) == 4 else None
            chosen = best.removeprefix(f"tuning{start}").removesuffix("_seed100") if best else ""
            runs = [
                json.loads((folder / f"final{start}{chosen}_seed{seed}.json").read_text())["loss"]
                for seed in range(5)
                if (folder / f"final{start}{chosen}_seed{seed}.json").exists()
            ]
            if not runs:
                assert cell == "not run"
                continue
            assert float(cell.split()[0]) == pytest.approx(statistics.mean(runs), abs=5.1e-5)
            assert cell.endswith(f"({len(runs)})")


def test_accuracies_on_cifar10_are_those_of_the_runs() -> None:
    """Means over the seeds that are there, at a rate whose neighbours were tried and are worse."""
    folder = ROOT / "scripts/paper/results/cifar10_fig4/finished"
    for epsilon, *cells in _cells("cifar10_fig4"):
        names = ("dp-sgd", "cyclic", "balls-in-bins", "min-sep")
        for method, cell in zip(names, cells, strict=True):
            start = f"_{method}_eps{epsilon}_lr"
            rates = ("0.003", "0.01", "0.02", "0.03", "0.05", "0.1", "0.2", "0.3", "0.6", "1")
            tried = {
                rate: json.loads((folder / f"tuning{start}{rate}_seed100.json").read_text())
                for rate in rates
                if (folder / f"tuning{start}{rate}_seed100.json").exists()
            }
            best = max(tried, key=lambda rate: tried[rate]["accuracy"], default="1")
            at = rates.index(best)
            runs = []
            if {*rates[max(at - 1, 0) : at + 2]} <= {*tried}:
                paths = [folder / f"final{start}{best}_seed{seed}.json" for seed in range(5)]
                runs = [json.loads(p.read_text())["accuracy"] for p in paths if p.exists()]
            if not runs:
                assert cell == "not run"
                continue
            assert float(cell.split()[0]) == pytest.approx(100 * sum(runs) / len(runs), abs=0.051)
            assert cell.endswith(f"({len(runs)})")


def test_the_tuning_runs_on_arxiv_are_those_of_the_files() -> None:
    """The least loss of what was tried; the search is over where both neighbours were tried."""
    folder = ROOT / "scripts/paper/results/arxiv_fig5_whole/finished"
    ladder = ("0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1")
    for epsilon, *cells in _cells("arxiv_fig5_whole_tuning"):
        for method, cell in zip(("dp-sgd", "cyclic", "min-sep", "unamplified"), cells, strict=True):
            tried = {
                rate: json.loads(path.read_text())["loss"]
                for rate in ladder
                if (path := folder / f"tuning_{method}_eps{epsilon}_lr{rate}_seed100.json").exists()
            }
            if not tried:
                assert cell == "not run"
                continue
            best = min(tried, key=lambda rate: tried[rate])
            at = ladder.index(best)
            more = "" if {*ladder[max(at - 1, 0) : at + 2]} <= {*tried} else " …"
            assert cell == f"{tried[best]:.4f} ({best}{more})"


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
        assert contests.told(cell(one), cell(two)) == expected
        seen.add(expected)
    assert len(seen) == 3
    assert contests.told(None, cell(two)) == contests.NOT_RUN


def test_predicted_claims_on_arxiv_are_what_the_page_says() -> None:
    """Words of docs/benchmarks/arxiv.md that no table makes."""
    errors = {
        epsilon: contests.errors_by_authors(epsilon) for epsilon in ("1", "2", "4", "8", "16")
    }
    for epsilon, each in errors.items():
        assert (each["min-sep"] < each["dp-sgd"]) == (epsilon == "16")
        assert each["unamplified"] < each["min-sep"]
        assert each["cyclic"] < each["dp-sgd"]
        assert (each["cyclic"] < each["unamplified"]) == (epsilon != "16")
    assert min(errors["1"], key=lambda name: errors["1"][name]) == "cyclic"
    assert errors["1"]["dp-sgd"] < errors["1"]["unamplified"]


def test_figures_on_arxiv_that_no_table_makes_are_those_of_the_files() -> None:
    page = " ".join((ROOT / "docs/benchmarks/arxiv.md").read_text().split())
    results = ROOT / "scripts/paper/results"
    outside = json.loads((results / "arxiv_fig5_outside.json").read_text())
    assert f"There are {outside['papers']:,}. Every one has a single author" in page
    assert outside["of_one_author"] == outside["papers"]
    assert f"{outside['not_outside_of_users']:,} more papers of a single author" in page
    assert f"{outside['not_outside_of_bounded_away']:,} more are by authors" in page
    passes = outside["settings"]["epochs"]
    assert f"({passes} passes, {outside['cpu_seconds']:.0f} CPU-seconds)" in page
    tuning = [*(results / "arxiv_fig5/finished").glob("tuning_*.json")]
    before = [json.loads(path.read_text())["before"] for path in tuning]
    assert all(each == before[0] for each in before)
    accuracy, loss = before[0]["accuracy"], before[0]["loss"]
    assert f"names {100 * accuracy:.1f} % of the archives" in page
    assert f"with a loss of {loss:.3f}" in page


def test_noise_of_both_libraries_is_that_of_the_runs() -> None:
    tree = json.loads((ROOT / "scripts/bench/results/utility_digits.json").read_text())
    for epsilon, theirs, ours in _cells("utility_digits_sigma"):
        assert float(theirs) == pytest.approx(tree["noise"][f"opacus {epsilon}"], abs=5.1e-5)
        assert float(ours) == pytest.approx(
            tree["noise"][f"identity {epsilon}"]["noise_multiplier"], abs=5.1e-5
        )


def test_memory_is_what_a_step_adds_over_what_an_ordinary_one_adds() -> None:
    tree = json.loads((ROOT / "scripts/bench/results/step_time.json").read_text())
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "200 ms"), (2.0, "2 s"), (64.63, "64.6 s"), (528.08, "528 s"), (3.9e-6, "< 1 ms")],
)
def test_times(value: float, text: str) -> None:
    assert tables._seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (8, "8 B"), (120_000_000, "120 MB"), (2.52e9, "2.52 GB")]
)
def test_bytes(value: float, text: str) -> None:
    assert tables._bytes(value) == text


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
