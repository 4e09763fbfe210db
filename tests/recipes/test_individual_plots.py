"""The plots of groups: what is drawn, and that each is marked."""

import stat

import numpy as np
import pytest

from dptrain.contrib.individual import report_plots as plots
from dptrain.reporting import GroupRow, GroupTable, plot_active
from recipes.individual_plots import plot_groups


def table(factor, losses=True, groups=("ill", "healthy"), delta=1e-5):
    rows = tuple(
        GroupRow(
            group=group,
            size=10,
            mean_epsilon=factor * (i + 1),
            share_active=0.5,
            mean_loss=0.1 * factor * (i + 1) if losses else None,
        )
        for i, group in enumerate(groups)
    )
    return GroupTable(delta=delta, rows=rows)


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


@pytest.mark.parametrize(
    "draw",
    [
        lambda path: plot_groups({"before": table(1), "after": table(2)}, path, bound=3.0),
        lambda path: plot_groups({10: table(1), 20: table(2)}, path),
    ],
)
def test_every_plot_is_a_marked_image_of_its_owner(tmp_path, drawn, draw):
    path = tmp_path / "new" / "plot.png"
    draw(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert drawn[-1].get_suptitle().startswith("NOT FOR RELEASE")


def test_nothing_overlaps(tmp_path, drawn):
    names = [f"a group with a long name, number {i}" for i in range(7)]
    plot_groups(
        {"before": table(1, groups=names), "after": table(2, groups=names)}, tmp_path / "a.png"
    )
    plot_active({name: [7, 3, 1] for name in names}, tmp_path / "b.png", size=9, start=1)
    for figure in drawn:
        figure.canvas.draw()  # at the figure's own resolution, not the file's
        boxes = [ax.get_tightbbox() for ax in figure.axes]
        boxes += [figure.legends[0].get_window_extent(), figure._suptitle.get_window_extent()]
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
        whole = figure.bbox
        assert all(box.x0 >= 0 and box.x1 <= whole.x1 for box in boxes)
        assert all(box.y0 >= 0 and box.y1 <= whole.y1 for box in boxes)


def test_groups_before_and_after(tmp_path, drawn):
    """As Fig. 2 of Koskela et al. 2023: test loss, training loss and ε, a bar for each time."""
    losses = {
        "test loss": {"before": {"healthy": 4.0, "ill": 3.0}, "after": {"ill": 5.0, "healthy": 6.0}}
    }
    plot_groups(
        {"before": table(1), "after": table(2)}, tmp_path / "a.png", losses=losses, bound=9.0
    )
    heights = [[bar.get_height() for bar in ax.patches] for ax in drawn[0].axes]
    assert heights[0] == [3.0, 4.0, 5.0, 6.0]
    assert heights[1] == pytest.approx([0.1, 0.2, 0.2, 0.4])
    assert heights[2] == [1, 2, 2, 4]
    assert [t.get_text() for t in drawn[0].axes[0].get_xticklabels()] == ["ill", "healthy"]
    assert legend(drawn[0]) == ["before", "after", "bound of the run: ε = 9"]


def test_groups_over_steps(tmp_path, drawn):
    plot_groups({200: table(2, False), 10: table(0.01, False)}, tmp_path / "a.png")
    (ax,) = drawn[0].axes  # no losses, no panel
    assert [line.get_label() for line in ax.lines] == ["ill", "healthy"]
    assert list(ax.lines[1].get_xdata()) == [10, 200]
    assert list(ax.lines[1].get_ydata()) == [0.02, 4]
    assert ax.get_yscale() == "log"  # from 0.01 to 4


@pytest.mark.parametrize(
    ("tables", "losses", "words"),
    [
        ({}, None, "nothing to plot"),
        ({"a": table(1), "b": table(1, delta=1e-4)}, None, "same δ"),
        ({"a": table(1), "b": table(1, groups=("ill",))}, None, "of 'b' is of groups"),
        ({"a": table(1), "b": table(1, False)}, None, "to all or none"),
        ({"a": table(1)}, {"test loss": {}}, "the same keys"),
        ({"a": table(1)}, {"test loss": {"a": {"ill": 1.0}}}, "test loss of 'a' is of groups"),
        ({"a": table(np.inf)}, None, "not finite for group 'ill'"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, tables, losses, words):
    with pytest.raises(ValueError, match=words):
        plot_groups(tables, tmp_path / "a.png", losses=losses)
