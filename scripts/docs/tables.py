"""Tables of what was measured, from the files that the measuring scripts wrote.

A page says ``<!-- table: NAME -->`` for a table of that name in a file under
``scripts/bench/results`` or ``scripts/paper/results`` (``scripts.results``), and
``<!-- figure: NAME -->`` for a plot from there. Tables that no script measures are made here:
``support`` is what ``dptrain account --support`` prints, ``strategy_table`` what ``dptrain
strategies`` found, ``papers`` says in a sentence each what the redrawn figures come out as, and the
claims of a paper are held beside two files of results each.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pathlib
import re
from collections.abc import Callable

from dptrain.commands import cli
from scripts.docs import claims, paper_summary
from scripts.docs.pages import ROOT, outside_of_code
from scripts.results import Table, markdown, read, words

FOLDERS = (ROOT / "scripts/bench/results", ROOT / "scripts/paper/results")
_MARK = re.compile(r"^<!-- (table|figure): (\w+) -->[ \t]*$", re.MULTILINE)
_WRITTEN = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def names() -> list[str]:
    """Every name that a page may use for a table."""
    return sorted({*_measured(), *_MADE})


def figures() -> dict[str, pathlib.Path]:
    """Plots by name."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.png"))}


def table(name: str) -> str:
    """Markdown of a table and a line on its origin.

    Raises:
        ValueError: if there is none of this name.
    """
    if name in _MADE:
        return _MADE[name]()
    if name not in _measured():
        raise ValueError(f"there is no table {name!r}; there are {', '.join(names())}")
    path = _measured()[name]
    tree = read(path)
    machine = words(tree["machine"])
    origin = _origin(path, tree["script"]) + (f" Machine: {machine}." if machine else "")
    return _page(tree["tables"][name].markdown(), origin)


def insert(text: str, figure_folder: str) -> str:
    """A page with its tables and figures in place of the comments that name them.

    Args:
        text: the page.
        figure_folder: where the plots are, seen from the page.

    Raises:
        ValueError: if there is no table or figure of a name.
    """

    def found(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "table":
            return table(name)
        if name not in figures():
            raise ValueError(f"there is no figure {name!r}; there are {', '.join(figures())}")
        path = figures()[name]
        return f"![{name}]({figure_folder}/{path.name})\n\n*{_origin(path, _script(path))}*"

    return outside_of_code(text, lambda part: _MARK.sub(found, part))


def written_out(text: str) -> str:
    """A page whose tables are written below their comments, with those of today."""
    return _WRITTEN.sub(lambda match: f"{match[1]}\n{table(match[2])}\n{match[3]}", text)


@functools.cache
def _measured() -> dict[str, pathlib.Path]:
    """Files by the names of their tables."""
    paths = [path for folder in FOLDERS for path in sorted(folder.glob("*.json"))]
    return {name: path for path in paths for name in read(path)["tables"]}


def _page(body: str, origin: str) -> str:
    return f"{body}\n\n*{origin}*\n"


def _origin(path: pathlib.Path, script: str) -> str:
    return f"From `{path.relative_to(ROOT)}`, made by `{script}`."


def _script(path: pathlib.Path) -> str:
    """The script of a file's name, or the one that writes several.

    Raises:
        ValueError: if there is none.
    """
    script = path.parent.parent / f"{path.stem}.py"
    for stem in (path.stem, path.stem.removesuffix("_mnist")):  # the data come after the figure
        if stem in _WRITTEN_BY:
            return _WRITTEN_BY[stem]
        if (found := script.with_stem(stem)).is_file():
            return str(found.relative_to(ROOT))
    raise ValueError(f"{script.relative_to(ROOT)} is no file: name what writes {path.name}")


_WRITTEN_BY = {
    "strategy_table": "dptrain strategies",
    **dict.fromkeys(
        (
            "individual_fig2",
            "individual_fig6_active",
            "individual_fig6_auc",
            "individual_fig7",
            "individual_fig8",
        ),
        "scripts/paper/individual_fig6.py",
    ),
    "arxiv_fig5_whole": "scripts/paper/arxiv_fig5.py",
    "min_sep_fig2": "scripts/paper/min_sep_fig2_fig3.py",
    "min_sep_fig3": "scripts/paper/min_sep_fig2_fig3.py",
}


# Tables that no script of ours writes.


@functools.cache
def _support() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main(["account", "--support"])
    return _page(said.getvalue().strip(), "As `dptrain account --support` prints it.")


def _papers() -> str:
    rows = [[f"`scripts/paper/{script}.py`", said] for script, said in paper_summary.summaries()]
    origin = "From `scripts/paper/results`, made by `scripts/paper`."
    return _page(markdown(["made by", "result"], rows), origin)


def _strategy_table() -> str:
    path = FOLDERS[0] / "strategy_table.json"
    rows = [
        {
            **each,
            "rmse_sensitivity": each["rmse"] * each["sensitivity"],
            "max_sensitivity": each["max_error"] * each["sensitivity"],
        }
        for each in read(path)["rows"]
    ]
    columns = (
        ("strategy", "`{name}`"),
        ("RMSE", "{rmse:.4g}"),
        ("sensitivity", "{sensitivity:.4g}"),
        ("RMSE × sens.", "{rmse_sensitivity:.4g}"),
        ("max × sens.", "{max_sensitivity:.4g}"),
        ("buffers", "{bytes:bytes}"),
        ("step", "{seconds:time}"),
    )
    return _page(Table(columns, rows).markdown(), _origin(path, _script(path)))


def _claims(name: str, made: Callable[..., str]) -> str:
    path = FOLDERS[1] / f"{name}.json"
    tree = read(path)
    origin = f"{_origin(path, tree['script'])} Machine: {tree['machine']}."
    return _page(made(tree["tables"][name].rows), origin)


_MADE: dict[str, Callable[[], str]] = {
    "support": _support,
    "papers": _papers,
    "strategy_table": _strategy_table,
    "arxiv_fig5_claims": functools.partial(_claims, "arxiv_fig5", claims.on_arxiv),
    "cifar10_fig4_claims": functools.partial(_claims, "cifar10_fig4", claims.on_cifar10),
}
