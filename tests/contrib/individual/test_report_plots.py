"""The plots of individual privacy: what is drawn, and that each is marked."""

import stat
import sys

import numpy as np
import pytest
import torch

from dptrain.contrib.individual import report_plots as plots
from dptrain.contrib.individual.report_plots import plot_active, plot_histogram

PNG = b"\x89PNG\r\n\x1a\n"
EPSILONS = np.linspace(0.01, 0.8, 500)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    save = plots.save

    def keep(figure, path):
        figures.append(figure)
        save(figure, path)

    monkeypatch.setattr(plots, "save", keep)
    return figures


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def outlines(ax):
    """The histograms of a panel, each once: the outlines are those without a filling."""
    return [p.get_data() for p in ax.patches if not p.get_fill()]


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot_histogram({"PLD": EPSILONS}, path, delta=1e-5, bound=0.8),
        lambda path: plot_active({"run": [24, 20, 3]}, path),
    ],
)
def test_every_plot_is_a_marked_image_of_its_owner(tmp_path, drawn, draw):
    path = tmp_path / "new" / "plot.png"
    for _ in range(2):  # a plot may be drawn again
        draw(path)
    assert path.read_bytes().startswith(PNG)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["plot.png"]
    assert drawn[-1].get_suptitle().startswith("NOT FOR RELEASE")
    draw(tmp_path / "plot.svg")
    assert b"<svg" in (tmp_path / "plot.svg").read_bytes()


def test_the_histogram_holds_every_example(tmp_path, drawn):
    values = {"PLD": EPSILONS, "Rényi": torch.tensor(EPSILONS * 1.2)}
    plot_histogram(values, tmp_path / "a.png", delta=1e-5, bound=1.0, bins=40)
    (ax,) = drawn[0].axes
    for data, epsilon in zip(outlines(ax), values.values(), strict=True):
        assert data.values.sum() == len(epsilon)
        assert len(data.values) == 40
        assert data.edges[-1] == pytest.approx(1.0)
    assert ax.get_xscale() == ax.get_yscale() == "linear"
    assert legend(drawn[0]) == ["PLD", "Rényi", "bound of the run: ε = 1"]
    assert ax.lines[0].get_xdata()[0] == 1.0
    assert "1e-05" in ax.get_xlabel()


def test_a_histogram_over_decades_is_logarithmic_and_counts_what_it_leaves_out(tmp_path, drawn):
    spread = np.concatenate([np.geomspace(1e-4, 0.5, 300), np.zeros(7), [np.inf] * 2])
    plot_histogram({"run": spread}, tmp_path / "a.png", delta=1e-5)
    (ax,) = drawn[0].axes
    assert ax.get_xscale() == "log"
    assert outlines(ax)[0].values.sum() == 300
    assert legend(drawn[0]) == ["run (without 2 with ε = ∞ and 7 with ε = 0)"]


def test_a_spike_at_the_budget_does_not_hide_the_others(tmp_path, drawn):
    spike = np.concatenate([EPSILONS, np.full(5000, 0.8)])
    plot_histogram({"run": spike}, tmp_path / "a.png", delta=1e-5, bound=0.8)
    (ax,) = drawn[0].axes
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[0] < 1
    assert ax.get_ylim()[1] > 5008


@pytest.mark.parametrize("value", [0.0, 0.8])
def test_equal_values_are_one_bin(tmp_path, drawn, value):
    plot_histogram({"run": np.full(10, value)}, tmp_path / "a.png", delta=1e-5)
    counts = outlines(drawn[0].axes[0])[0].values
    assert counts.max() == counts.sum() == 10


@pytest.mark.parametrize(
    ("epsilons", "words"),
    [
        ({}, "no finite"),
        ({"a": [np.inf]}, "no finite"),
        ({"a": [0.1, np.nan]}, r"epsilons\['a'\]"),
        ({"a": [-0.1]}, r"epsilons\['a'\]"),
        ({"a": [[0.1]]}, "shape"),
    ],
)
def test_a_histogram_of_nothing_is_refused(tmp_path, epsilons, words):
    with pytest.raises(ValueError, match=words):
        plot_histogram(epsilons, tmp_path / "a.png", delta=1e-5)
    assert not list(tmp_path.iterdir())


def test_active_examples_over_the_steps(tmp_path, drawn):
    counts = {"R = 1": [24, 24, 20, 3], "R = 2": [24, 24, 24]}
    plot_active(counts, tmp_path / "a.png", size=24, start=2)
    (ax,) = drawn[0].axes
    for line, (name, steps) in zip(ax.lines, counts.items(), strict=False):
        assert line.get_label() == name
        assert line.get_xdata().tolist() == list(range(1, len(steps) + 1))
        assert list(line.get_ydata()) == steps
    assert legend(drawn[0])[2:] == ["all 24 examples", "filter from step 3 on"]
    assert ax.lines[3].get_xdata()[0] == 2.5  # between steps 2 and 3
    assert ax.get_ylim()[0] == 0
    assert all(tick == round(tick) for axis in (ax.xaxis, ax.yaxis) for tick in axis.get_ticklocs())
    for nothing in ({}, {"a": []}):
        with pytest.raises(ValueError, match="no step"):
            plot_active(nothing, tmp_path / "b.png")


def test_a_path_without_suffix_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "plot"):
        with pytest.raises(ValueError, match="suffix"):
            plot_active({"run": [1]}, path)
    with pytest.raises(ValueError, match="xyz"):
        plot_active({"run": [1]}, tmp_path / "plot.xyz")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    for draw in (
        lambda: plot_histogram({"a": EPSILONS}, tmp_path / "a.png", delta=1e-5),
        lambda: plot_active({"a": [1]}, tmp_path / "a.png"),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"dptrain\[recipes\]"):
            draw()
