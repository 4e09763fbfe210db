"""Grids of runs: which ones there are, and that finished ones are not run again."""

from __future__ import annotations

import json
import pathlib

import pytest
import yaml

from recipes.command import INTERRUPTED
from recipes.sweep import main, members
from tests.helpers.stopping import ctrl_c, stop_at

TINY = """
data: {image_size: 8}
model: {channels: [4], groups: 2, hidden: 4}
scheme: {type: MinSep, batch_size: 40, min_sep: 2}
strategy: {type: BandMF, bands: 2}
privacy: {epsilon: null, noise_multiplier: 1}
plots: false
steps: 2
"""


def _points(grid, output=pathlib.Path("runs")):
    return [member.overrides for member in members(grid, output)]


def test_products_and_references(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("")
    grid = {
        "recipe": "vision",
        "common": {"privacy.epsilon": [1, 2]},
        "runs": [
            {"config": "a.yaml"},
            {
                "config": "b.yaml",
                "grid": {"strategy.bands": [2, 4], "scheme.min_sep": ["=strategy.bands", 4]},
            },
        ],
    }
    found = _points(grid)
    assert found[:2] == [{"privacy.epsilon": 1}, {"privacy.epsilon": 2}]
    # With 4 bands the reference is the listed 4: one run, not two.
    pairs = [(p["strategy.bands"], p["scheme.min_sep"]) for p in found[2:]]
    assert pairs == [(2, 2), (2, 2), (2, 4), (2, 4), (4, 4), (4, 4)]
    folders = [member.folder.name for member in members(grid, pathlib.Path("runs"))]
    assert len(set(folders)) == 8
    assert folders[0] == "a_epsilon=1"


def test_the_grids_of_the_paper(monkeypatch):
    """Section 7.2 of Dong & Ganesh 2026: 25 runs of DP-SGD, and 25 for each choice of BandMF."""
    root = pathlib.Path(__file__).parents[2]
    monkeypatch.chdir(root)
    for path in (root / "configs" / "grids").glob("c*10.yaml"):
        grid = yaml.safe_load(path.read_text())
        found = members(grid, pathlib.Path("runs"))
        assert len(found) == 25 * (1 + 6 + 6 + 18)
        assert {path.stem, *(m.config.partition("_")[0][8:] for m in found)} == {path.stem}


def test_the_clipping_norms_on_digits(monkeypatch):
    """Koskela et al. 2023, Fig. 6: multiples of the optimum, which is the configuration's."""
    root = pathlib.Path(__file__).parents[2]
    monkeypatch.chdir(root)
    grid = yaml.safe_load((root / "configs" / "grids" / "digits_individual.yaml").read_text())
    config = yaml.safe_load((root / "configs" / "digits_individual.yaml").read_text())
    found = members(grid, pathlib.Path("runs"))
    norms = [member.overrides["privacy.max_grad_norm"] for member in found]
    optimum = config["privacy"]["max_grad_norm"]
    assert [norm / optimum for norm in norms] == pytest.approx([0.5, 1, 1.5, 3, 5, 10, 20])


def _grid(tmp_path, **entries):
    (tmp_path / "tiny.yaml").write_text(TINY)
    grid = {
        "recipe": "vision",
        "output": str(tmp_path / "runs"),
        "runs": [{"config": str(tmp_path / "tiny.yaml"), "grid": {"optimizer.lr": [0.1, 0.2]}}],
        **entries,
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    return path


@pytest.mark.slow
def test_runs_once_and_compares(tmp_path, capsys):
    path = _grid(tmp_path)
    assert main(["--grid", str(path), "--list"]) == 0
    assert len(capsys.readouterr().out.split()) == 2
    assert not (tmp_path / "runs").exists()
    assert main(["--grid", str(path), "steps=3"]) == 0
    assert "2 of 2 runs are finished" in capsys.readouterr().out
    rows = json.loads((tmp_path / "runs" / "results.json").read_text())
    assert [row["optimizer.lr"] for row in rows] == [0.1, 0.2]
    assert all(0 <= row["accuracy"] <= 1 and row["step"] == 3 for row in rows)
    before = [(tmp_path / "runs" / r["folder"] / "metrics.jsonl").stat().st_mtime for r in rows]
    assert main(["--grid", str(path), "steps=3"]) == 0
    after = [(tmp_path / "runs" / r["folder"] / "metrics.jsonl").stat().st_mtime for r in rows]
    assert before == after


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, capsys):
    runs = [{"config": str(tmp_path / "tiny.yaml"), "grid": {"optimizer.momentum": [2.0, 0.5]}}]
    assert main(["--grid", str(_grid(tmp_path, runs=runs))]) == 1
    captured = capsys.readouterr()
    assert "1 of 2 runs are finished" in captured.out
    assert "1 runs failed: tiny_momentum=2.0" in captured.err


@pytest.mark.slow
def test_an_interruption_ends_the_sweep(tmp_path, monkeypatch):
    """The run that was stopped says so, and the ones after it are not begun."""
    path = _grid(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 1, ctrl_c)
        assert main(["--grid", str(path)]) == INTERRUPTED
    assert len(list((tmp_path / "runs").glob("tiny_*"))) == 1
    assert main(["--grid", str(path)]) == 0
    assert len(list((tmp_path / "runs").glob("tiny_*/summary.txt"))) == 2


def test_a_misspelt_field_is_refused_once(tmp_path, capsys):
    path = _grid(tmp_path, common={"privacy.epsilom": [1, 2]})
    assert main(["--grid", str(path)]) == 2
    assert "did you mean 'privacy.epsilon'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    assert main(["--grid", str(_grid(tmp_path)), "--output", str(tmp_path / "grid.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"recipe": "audio"}, "choose one of vision"),
        ({"runs": []}, "at least one configuration"),
        ({"runs": [{"grid": {}}]}, "should have 'config'"),
        ({"color": 1}, "unknown entries \\['color'\\]"),
        ({"common": {"steps": 3}}, "steps: 3 should be a list"),
        ({"common": {"steps": ["=stepz"]}}, "names no field of the grid"),
        ({"common": 3}, "common: 3 should be"),
        ({"runs": 3}, "runs: 3 should be a list"),
        ({"runs": [{"config": "a.yaml", "grid": [1]}]}, r"grid: \[1\] should be"),
        ({"runs": [{"config": "nowhere.yaml"}]}, "'nowhere.yaml' is no file"),
    ],
)
def test_impossible_grids(tmp_path, entries, message):
    grid = yaml.safe_load(_grid(tmp_path, **entries).read_text())
    with pytest.raises(ValueError, match=message):
        members(grid, tmp_path)
    assert main(["--grid", str(tmp_path / "grid.yaml")]) == 2
