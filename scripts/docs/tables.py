"""Tables of what was measured, from the files that the measuring scripts wrote.

A page says ``<!-- table: NAME -->`` where NAME is a file under ``scripts/bench/results`` or
``scripts/paper/results`` without its ending, and ``<!-- figure: NAME -->`` for a plot from there.
``support`` is the table of schemes, strategies and accountants, which is asked and not measured,
and ``papers`` says in a sentence each what the redrawn figures come out as.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dptrain.commands import cli
from scripts.docs import paper_summary
from scripts.docs.cells import Table
from scripts.docs.contests import CONTESTS
from scripts.docs.pages import ROOT, outside_of_code

FOLDERS = (ROOT / "scripts/bench/results", ROOT / "scripts/paper/results")
_MARK = re.compile(r"^<!-- (table|figure): (\w+) -->[ \t]*$", re.MULTILINE)
_WRITTEN = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def names() -> list[str]:
    """Every name that a page may use for a table."""
    return sorted({*_BENCHMARKS, *_PAPERS, *CONTESTS, "papers", "support"})


def figures() -> dict[str, pathlib.Path]:
    """Plots by name."""
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.png"))}


def table(name: str) -> str:
    """Markdown of a table and a line on its origin.

    Raises:
        ValueError: if there is none of this name.
    """
    if name == "support":
        return f"{_support()}\n\n*As `dptrain account --support` prints it.*\n"
    if name == "papers":
        rows = [[f"`{_script(_csv(each))}`", said] for each, said in paper_summary.summaries()]
        return f"{Table(['made by', 'result'], rows).markdown()}\n\n*{_PAPERS_ORIGIN}*\n"
    if name in _BENCHMARKS:
        path = FOLDERS[0] / f"{_FILES.get(name, name)}.json"
        tree = json.loads(path.read_text(encoding="utf-8"))
        found, machine = _BENCHMARKS[name](tree), _machine(tree)
    elif name in CONTESTS:
        file, made = CONTESTS[name]
        path = FOLDERS[1] / f"{file}.json"
        tree = json.loads(path.read_text(encoding="utf-8"))
        found, machine = made(tree), _machine(tree)
    elif name in _PAPERS:
        path = _csv(name)
        with path.open(encoding="utf-8", newline="") as file:
            found, machine = _PAPERS[name](list(csv.DictReader(file))), None
    else:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(names())}")
    return f"{found.markdown()}\n\n*{_origin(path, machine)}*\n"


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
        return f"![{name}]({figure_folder}/{path.name})\n\n*{_origin(path, None)}*"

    return outside_of_code(text, lambda part: _MARK.sub(found, part))


def written_out(text: str) -> str:
    """A page whose tables are written below their comments, with those of today."""
    return _WRITTEN.sub(lambda match: f"{match[1]}\n{table(match[2])}\n{match[3]}", text)


_PAPERS_ORIGIN = "From `scripts/paper/results`, made by `scripts/paper`."


def _csv(name: str) -> pathlib.Path:
    return FOLDERS[1] / f"{name}.csv"


@functools.cache
def _support() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main(["account", "--support"])
    return said.getvalue().strip()


def _origin(path: pathlib.Path, machine: str | None) -> str:
    words = f"From `{path.relative_to(ROOT)}`, made by `{_script(path)}`."
    return f"{words} Machine: {machine}." if machine else words


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
    "step_time_gpu": "scripts/bench/step_time.py",
    "noise_gpu": "scripts/bench/noise.py",
    **dict.fromkeys(
        ("individual_fig1_curve", "individual_fig1_mnist_curve"),
        "scripts/paper/individual_fig1.py",
    ),
    **dict.fromkeys(
        (
            "individual_fig2",
            "individual_fig6_active",
            "individual_fig6_auc",
            "individual_fig7",
            "individual_fig8",
            "individual_fig7_fig8",
        ),
        "scripts/paper/individual_fig6.py",
    ),
    "arxiv_fig5_whole": "scripts/paper/arxiv_fig5.py",
    "linear_last_iterate_groups": "scripts/paper/linear_last_iterate.py",
    "min_sep_fig2": "scripts/paper/min_sep_fig2_fig3.py",
    "min_sep_fig3": "scripts/paper/min_sep_fig2_fig3.py",
}


def _machine(tree: Any) -> str | None:
    """What a file says about the machine, in words."""
    if not isinstance(tree, Mapping):
        return None
    said = tree.get("machine")
    if said is None and isinstance(tree.get("accountant"), Mapping):
        said = tree["accountant"].get("machine")
    if said is None:
        said = {key: tree[key] for key in ("device", "cores", "torch", "python") if key in tree}
        said |= tree.get("versions", {})
    if isinstance(said, str):
        return said
    words = []
    for key, value in _flat(said):
        if key in ("processor", "device", "libc"):
            words.append(str(value))
        elif key in ("cores", "threads"):
            words.append(f"{value} {key}")
        elif key.startswith("load"):
            words.append(f"load before the run {float(value):.1f}")
        elif key != "OMP_NUM_THREADS":
            words.append(f"{key} {value}")
    found = ", ".join(words)
    if "runs_by_device" in tree:
        runs = [
            f"{runs} runs on {'one core each' if device == 'cpu' else device}"
            for device, runs in tree["runs_by_device"].items()
        ]
        found = f"{', '.join(runs)}; the table was made with {found}"
    return found or None


def _flat(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, value


# How numbers are written.


def _figures(value: float, digits: int = 3) -> str:
    """So many significant digits, without an exponent where that is short."""
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    if abs(value) >= 10**digits and abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return "< 1 ms"
    return f"{_figures(1e3 * value)} ms" if value < 1 else f"{_figures(value)} s"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return f"{_figures(value)} {unit}"
        value /= 1000
    raise AssertionError


def _mebibytes(value: float) -> str:
    return f"{value:,.0f} MiB"


# One function for every file: from what it holds to cells of text.


def _accuracies(cells: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """A line for each ε of cells by "method ε"; columns are titles by method."""
    rows = []
    for epsilon in sorted({key.split()[1] for key in cells}, key=float):
        line = [cells.get(f"{name} {epsilon}") for name in columns]
        rows.append([epsilon, *(_accuracy(cell) for cell in line)])
    return Table(["ε", *columns.values()], rows)


def _accuracy(cell: Mapping[str, Any] | None) -> str:
    """In per cent with its 95 % interval, if there are as many runs as that takes."""
    if cell is None or cell["half_width"] is None:
        return "–"
    return f"{100 * cell['mean']:.1f} ± {100 * cell['half_width']:.1f}"


def _utility_digits(tree: Mapping[str, Any]) -> Table:
    columns = {
        "opacus": "Opacus DP-SGD",
        "identity": "`Identity` + `Poisson`",
        "bandmf": "`BandMF(10)` + `MinSep(10)`",
    }
    return _accuracies(tree["table"], columns)


def _utility_digits_sigma(tree: Mapping[str, Any]) -> Table:
    cells, sides = tree["table"], ("opacus", "identity")
    rows = [
        [str(epsilon), *(f"{cells[f'{side} {epsilon}']['sigma']:.4f}" for side in sides)]
        for epsilon in sorted({int(key.split()[1]) for key in cells})
    ]
    return Table(["ε", "Opacus: σ", "dptrain: σ"], rows)


def _utility_mnist(tree: Mapping[str, Any]) -> Table:
    columns = {
        "opacus": "Opacus DP-SGD",
        "poisson": "`Identity` + `Poisson`",
        "min-sep": "`BandMF(16)` + `MinSep(16)`",
    }
    return _accuracies(tree["cells"], columns)


def _clipping_norm(tree: Mapping[str, Any]) -> Table:
    """A clipping norm a line, with the learning rate that was best for it."""
    cells = {float(key.split()[0].removeprefix("R=")): v for key, v in tree["cells"].items()}
    rows = [
        [f"{norm:g}", f"{cells[norm]['lr']:g}", _accuracy(cells[norm])] for norm in sorted(cells)
    ]
    return Table(["R", "its best learning rate", "test accuracy, %"], rows)


_STEP_MODELS = {
    "vgg": "VGG, 32×32",
    "bert": "BERT-tiny, 128 tokens",
    "mlp": "MLP 784-512-512-10",
    "mnist": "Opacus's MNIST CNN",
    "resnet10": "ResNet-10, GroupNorm, 32×32",
    "resnet18": "ResNet-18, GroupNorm, 32×32",
    "resnet18-large": "ResNet-18, GroupNorm, 32×32",
    "gpt2": "GPT-2, 4 layers, 256 wide, 256 tokens, vocabulary 5,000",
    "gpt2-50k": "the same, vocabulary 50,257",
    "llama": "Llama, 4 layers, 256 wide, 256 tokens, vocabulary 32,000",
    "vit": "ViT-tiny/4, 32×32",
    "convnext": "ConvNeXt-atto, 64×64",
    "unet": "diffusion UNet, 32×32",
    "lstm": "LSTM tagger, 64 tokens",
}


_STEP_SIDES = {
    "opacus-hooks": "Opacus hooks",
    "opacus-functorch": "Opacus functorch",
    "opacus-ghost": "Opacus ghost",
    "opake": "opake",
    "bookkeeping": "dptrain bookkeeping",
}


def _step_case(case: Mapping[str, Any]) -> str:
    """A model with its batch."""
    return f"{_STEP_MODELS[case['model']]}; {case['batch']:,}"


def _step_time(tree: Mapping[str, Any]) -> Table:
    sides = _measured_sides(tree["time"])
    rows = []
    for case in tree["time"]:
        cells = []
        for side in sides:
            ratio = case["ratio"].get(side)
            if ratio is None:
                cells.append("–")
                continue
            spread = f" ({ratio['q1']:.2f}–{ratio['q3']:.2f})" if side == "bookkeeping" else ""
            cells.append(f"{ratio['median']:.2f}{spread}")
        ordinary = _seconds(case["seconds"]["ordinary"])
        rows.append(["time", _step_case(case), case["allocator"], ordinary, *cells])
    added = {
        (each["model"], each["allocator"], each["side"]): each["peak_bytes"] - each["start_bytes"]
        for each in tree["memory"]
        if "peak_bytes" in each
    }
    for case in tree["time"]:
        key = (case["model"], case["allocator"])
        ordinary = added[*key, "ordinary"]
        cells = [
            f"{added[*key, side] / ordinary:.2f}" if (*key, side) in added else "–"
            for side in sides
        ]
        spent = _mebibytes(ordinary / 2**20)
        rows.append(["memory", _step_case(case), case["allocator"], spent, *cells])
    return Table(["", "model; batch", "allocator", "ordinary", *sides.values()], rows)


def _step_costs(tree: Mapping[str, Any]) -> Table:
    """A model a row: both steps, and what the largest three extra costs are."""

    def time(seconds: float) -> str:
        return f"{_figures(1e3 * seconds, 3)} ms"

    order, rows = list(_STEP_MODELS), []
    for each in sorted(tree["rows"], key=lambda each: order.index(each["model"])):
        costs = sorted(each["extra"].items(), key=lambda item: -item[1])[:3]
        steps = each["seconds"]
        rows.append(
            [
                _step_case(each),
                time(steps["ordinary"]),
                time(steps["bookkeeping"]),
                *(f"{name} {time(seconds)}" for name, seconds in costs),
            ]
        )
    return Table(["model; batch", "ordinary", "bookkeeping", "first", "second", "third"], rows)


def _step_time_gpu(tree: Mapping[str, Any]) -> Table:
    """A GPU and a model a row."""
    sides = _measured_sides([case for each in tree["devices"] for case in each["time"]])
    rows = []
    for each in tree["devices"]:
        for case in each["time"]:
            found = [case["ratio"].get(side) for side in sides]
            rows.append(
                [
                    each["machine"]["device"],
                    _step_case(case),
                    _seconds(case["seconds"]["ordinary"]),
                    *(f"{ratio['median']:.2f}" if ratio else "–" for ratio in found),
                ]
            )
    return Table(["device", "model; batch", "ordinary", *sides.values()], rows)


def _autocast(tree: Mapping[str, Any]) -> Table:
    """A model a row; the last column is what a private step gains."""
    rows = []
    plain, ours = "ordinary", "bookkeeping"
    for case in tree["time"]:
        sides = (plain, f"{plain} in bfloat16", ours, f"{ours} in bfloat16")
        ratios = [case["ratio"][side]["median"] for side in sides]
        rows.append(
            [
                f"{case['title']}; {case['batch']:,}",
                _seconds(case["seconds"][plain]),
                *(f"{ratio:.2f}" for ratio in ratios[1:]),
                f"{ratios[2] / ratios[3]:.2f}",
            ]
        )
    head = [plain, f"{plain}, bfloat16", ours, f"{ours}, bfloat16", "gain"]
    return Table(["model; batch", *head], rows)


def _measured_sides(cases: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Titles of the sides that ran for some model."""
    return {
        side: title
        for side, title in _STEP_SIDES.items()
        if any(side in case["ratio"] for case in cases)
    }


def _noise(tree: Mapping[str, Any], digits: int = 0) -> Table:
    rows = [
        [
            name,
            f"{each['step']:,.{digits}f} ms",
            f"{each['floor']:,.{digits}f} ms",
            f"{each['ratio']:.2f}",
            f"{each['peak MB']:,.0f} MB",
        ]
        for name, each in tree["streams"].items()
    ]
    return Table(["stream", "step", "read + draw", "ratio", "peak memory"], rows)


def _noise_peer(tree: Mapping[str, Any]) -> Table:
    rows = [
        [
            each["name"],
            f"{each['ours_ms']:,.0f} ms",
            f"{each['peer_ms']:,.0f} ms",
            f"{each['ratio']:.1f}",
        ]
        for each in tree["cases"]
    ]
    return Table(["noise", "dptrain", "jax_privacy", "ratio"], rows)


def _strategies(tree: Mapping[str, Any]) -> Table:
    rows = []
    for each in tree["cases"]:
        peer = [""] * 3
        if "peer_seconds" in each:
            peer = [
                _seconds(each["peer_seconds"]),
                f"{each['peer_error']:.7g}",
                f"{each['ratio']:,.0f}",
            ]
        rows.append([each["name"], _seconds(each["seconds"]), f"{each['error']:.7g}", *peer])
    head = ["strategy", "time", "error", "jax_privacy: time", "its error", "ratio of times"]
    return Table(head, rows)


def _strategy_table(tree: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"`{each['name']}`",
            f"{each['rmse']:.4g}",
            f"{each['sensitivity']:.4g}",
            f"{each['rmse'] * each['sensitivity']:.4g}",
            f"{each['max_error'] * each['sensitivity']:.4g}",
            _bytes(each["bytes"]),
            _seconds(each["seconds"]),
        ]
        for each in tree["rows"]
    ]
    head = ["strategy", "RMSE", "sensitivity", "RMSE × sens.", "max × sens.", "buffers", "step"]
    return Table(head, rows)


def _samplers(tree: Mapping[str, Any]) -> Table:
    largest = max(tree["sizes"], key=int)
    rows = [
        [
            name,
            _seconds(each["open_s"]),
            f"{each['peak_bytes']:.1f} B",
            f"{each['batch_ms']:.2f} ms",
        ]
        for name, each in tree["sizes"][largest].items()
    ]
    return Table(["scheme", "construction", "peak, an example", "a batch"], rows)


def _graph(tree: Mapping[str, Any]) -> Table:
    rows = [
        [
            name,
            _seconds(each["load_seconds"]),
            _seconds(each["bound_seconds"]),
            _mebibytes(each["peak_mebibytes"]),
        ]
        for name, each in tree["sources"].items()
    ]
    return Table(["source", "load", "bound", "peak memory"], rows)


def _user_samplers(tree: Mapping[str, Any]) -> Table:
    rows = []
    for name, each in tree.items():
        if isinstance(each, Mapping) and "batch_ms_median" in each:
            rows.append(
                [
                    name,
                    _seconds(each["construction_s"]),
                    f"{each['batch_ms_median']:.2f} ms",
                    f"{each['mean_batch']:,.1f}",
                ]
            )
        elif isinstance(each, Mapping) and "seconds" in each:
            rows.append([f"finding {name}", _seconds(each["seconds"]), "", ""])
    return Table(["", "time", "a batch", "mean batch"], rows)


def _user_accounting(tree: list[Mapping[str, Any]]) -> Table:
    return _by_accountant(tree, {"sigma": "σ"})


def _user_level(tree: list[Mapping[str, Any]]) -> Table:
    return _by_accountant(tree, {"min_sep": "b", "sigma": "σ", "exclusion": "exclusion"})


def _user_errors(tree: Mapping[str, Any]) -> Table:
    """A scheme a row, ε in columns: the least error of its settings at each."""
    epsilons = list(tree["table"][0]["error"])
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for each in tree["table"]:
        kinds.setdefault(_user_scheme(each["scheme"]), []).append(each)
    rows = []
    for name, members in kinds.items():
        best = {e: min(members, key=lambda each, e=e: each["error"][e]) for e in epsilons}
        rows.append([name, *(f"{best[e]['error'][e]:.4f}" for e in epsilons)])
    rows.sort(key=lambda row: row[-2])
    return Table(["", *(f"ε = {e}" for e in epsilons)], rows)


def _user_scheme(settings: Mapping[str, Any]) -> str:
    name = f"`{settings['type']}`"
    if settings["type"] == "UserCyclic":
        return f"{name}, spread over {settings['spread']} slots" if "spread" in settings else name
    if settings["type"] == "UserMinSep" and settings["min_sep"] == 1:
        revealed = "accountant" in settings
        return f"{name}, `min_sep=1`, " + ("draws revealed" if revealed else "draws hidden")
    return name


def _user_bounds(tree: Mapping[str, Any]) -> Table:
    """The best scheme of every bound."""
    best: dict[tuple[int, bool], Mapping[str, Any]] = {}
    for each in tree["bounds"]:
        key = (each["max_examples"], each["duplicates"])
        if key not in best or each["error_over_kept"] < best[key]["error_over_kept"]:
            best[key] = each
    rows = [
        [
            str(k),
            "yes" if copies else "no",
            f"{each['kept']:.1%}",
            _call(each["scheme"]),
            str(each["strategy"].get("bands", 1)),
            f"{each['error']:.4f}",
            f"{each['error_over_kept']:.4f}",
        ]
        for (k, copies), each in sorted(best.items())
    ]
    return Table(["k", "copies", "kept", "scheme", "bands", "error", "error / kept"], rows)


def _call(settings: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{name}={value}" for name, value in settings.items() if name != "type")
    return f"`{settings['type']}({rest})`"


def _by_accountant(tree: list[Mapping[str, Any]], keys: Mapping[str, str]) -> Table:
    """ε in a column for every accountant and a row for each value of the keys."""
    accountants = list(dict.fromkeys(each["accountant"] for each in tree))
    cells: dict[tuple, dict[str, str]] = {}
    for each in tree:
        row = cells.setdefault(tuple(each[key] for key in keys), {})
        row[each["accountant"]] = f"{each['epsilon']:.2f}"
    rows = [
        [*(f"{part:g}" if isinstance(part, int | float) else part for part in key)]
        + [row.get(name, "") for name in accountants]
        for key, row in sorted(cells.items())
    ]
    return Table([*keys.values(), *accountants], rows)


def _accounting(tree: Mapping[str, Any]) -> Table:
    rows: list[list[str]] = []

    def row(what: str, size: str, time: str, result: str = "", peer: str = "") -> None:
        rows.append([what, size, time, result, peer])

    for name, each in (
        ("b-min-sep losses", tree["min_sep_losses"]),
        ("balls-in-bins losses", tree["balls_in_bins_losses"]),
    ):
        for size, rate in each["samples_per_s"].items():
            row(name, size, "", f"{rate:,.0f} samples a second")
    for size, each in tree["certificate"]["certificates"].items():
        row(
            "b-min-sep certificate",
            f"δ = {size.removeprefix('delta=')}",
            _seconds(each["seconds"]),
            f"{each['samples_a_direction']:,} samples a direction",
            f"plain simulation: {each['plain_samples_a_direction']:,} samples",
        )
    for size in ("C = I", "banded"):
        row("balls-in-bins Rényi", size, _seconds(tree["renyi"][size]))
    for size, each in tree["allocation"].items():
        if isinstance(each, Mapping):
            low, high = each["bracket"]
            row(
                "random allocation",
                size,
                _seconds(each["seconds"]),
                f"ε = {each['epsilon']:.4f}",
                f"published bracket: {low:g} to {high:g}",
            )
    for name, group in (
        ("conditional composition", tree["conditional_composition"]),
        ("MMCC", tree["mmcc"]),
    ):
        for size, each in group.items():
            if isinstance(each, Mapping) and "seconds" in each:
                row(name, size, _seconds(each["seconds"]), f"ε = {each['epsilon']:.4g}")
    for name, each, symbol in (
        ("truncated Poisson", tree["truncated_poisson"], "ε"),
        ("calibrating Poisson", tree["calibrate_poisson"], "σ"),
    ):
        row(
            name,
            "",
            _seconds(each["seconds"]),
            f"{symbol} = {each['value']:.4g}",
            f"dp_accounting: {_seconds(each['dp_accounting_seconds'])}, "
            f"{symbol} = {each['dp_accounting_value']:.4g}",
        )
    return Table(["accountant", "case", "time", "result", "beside it"], rows)


_PEERS = ("dp_accounting", "PLD_accounting", "jax_privacy", "opake")


def _accounting_peers(tree: Mapping[str, Any]) -> Table:
    """ε and time of everybody, and the most that another one's smaller ε would cost us in σ."""
    rows = []
    for case in tree["cases"]:
        cells = []
        for name in ("dptrain", *_PEERS):
            each = case.get(name)
            said = case["failed"].get(name)
            failed = {None: "–", "not asked": said}.get(said, "no answer")
            cells.append(
                failed if each is None else f"{each['epsilon']:.4f} ({_seconds(each['seconds'])})"
            )
        ratios = [
            case[name]["sigma_ratio"] for name in _PEERS if "sigma_ratio" in case.get(name, {})
        ]
        most = f"{max(ratios):.4f}" if ratios else "–"
        name = f"{case['case']} ({case['remark']})" if case["remark"] else case["case"]
        rows.append([name, *cells, most])
    return Table(["mechanism", "dptrain", *_PEERS, "σ ratio"], rows)


def _accounting_scale(tree: Mapping[str, Any]) -> Table:
    """What the default accountant finds at the size of production, in which time and memory."""
    rows = []
    for each in tree["cases"].values():
        run = f"{each['dataset_size']:,} examples, batches of {each['batch_size']:,}"
        run += f", {each['steps']:,} steps"
        if each.get("max_batch_size"):
            run += f", cut to {each['max_batch_size']:,}"
        bands = f"{each['min_sep']}, {each['bands']} bands"
        goal = f"({each['epsilon']:g}, {each['delta']:g})"
        if "sigma" in each:
            kind = each["kind"]
            kind += f", {each['samples']:,} samples" if each["samples"] else ""
            cells = [f"{each['sigma']:.4f}", kind, _seconds(each["seconds"])]
            cells.append(f"{each['peak_mib']:,} MiB")
        else:
            cells = ["–", "stopped", f"over {_seconds(each['stopped_after'])}", ""]
        rows.append([run, bands, goal, *cells])
    return Table(["run", "b", "(ε, δ)", "σ", "kind", "time", "memory"], rows)


def _amplified_strategies(tree: Mapping[str, Any]) -> Table:
    """Least RMSE·σ/B̄ of ordinary pairs and of a C chosen for the sampling, by whom σ is from."""
    rows = []
    for name, each in tree.items():
        if name == "machine":
            continue
        proven = all("error" in each[side] for side in ("ordinary", "chosen"))
        key = "error" if proven else "estimated_error"
        sides = [each["ordinary"], each["chosen"]]
        cells = []
        for side in sides:
            cells += [side["pair"], f"{_figures(side[key], 4)}"]
        gain = 100 * (1 - sides[1][key] / sides[0][key])
        kind = sides[1]["kind"] if proven else "estimate"
        run = f"({each['epsilon']:g}, {each['delta']:.3g}), {each['steps']:,} steps"
        rows.append([run, *cells, f"{gain:.1f} %", kind])
    return Table(["run", "ordinary", "error", "chosen", "error", "less error", "σ by"], rows)


def _masked_head(tree: Mapping[str, Any]) -> Table:
    """Seconds of a step with scores everywhere and at masked positions, and their ratio."""
    rows = []
    for case in tree["cases"]:
        seconds, ratio = case["seconds"], case["ratio"]
        rows.append(
            [
                f"{case['vocabulary']:,}",
                _seconds(seconds["every"]),
                _seconds(seconds["masked"]),
                f"{ratio['median']:.2f} ({ratio['q1']:.2f}–{ratio['q3']:.2f})",
            ]
        )
    return Table(["vocabulary", "every position", "masked ones", "ratio"], rows)


def _trainer_time(tree: Mapping[str, Any]) -> Table:
    """CPU seconds of a step of either trainer, and their ratio."""
    rows = []
    for case in tree["cases"]:
        seconds, ratio = case["seconds"], case["ratio"]
        rows.append(
            [
                case["model"],
                str(case["microbatches"]),
                _seconds(seconds["ordinary"]),
                _seconds(seconds["private"]),
                f"{ratio['median']:.2f} ({ratio['q1']:.2f}–{ratio['q3']:.2f})",
            ]
        )
    return Table(["model", "microbatches", "Trainer", "PrivateTrainer", "ratio"], rows)


def _cifar10_scattering(tree: Mapping[str, Any]) -> Table:
    """A line for each run."""
    rows = [
        [
            f"{run['batch']:,}",
            run["autocast"] or "float32",
            *(f"{100 * run[name]:.1f}" for name in ("training_accuracy", "accuracy")),
            "–" if (time := run["processor_seconds"]) is None else f"{time / 60:.0f}",
            f"{run['epsilon']:.2f}",
            _figures(run["delta"]),
            f"{run['noise_multiplier']:.3f}",
            f"{run['scheme']['steps']:,}",
        ]
        for run in tree["runs"]
    ]
    head = ["batch", "products", "training accuracy, %"]
    head += ["test accuracy, %", "minutes of a core", "ε", "δ", "σ", "steps"]
    return Table(head, rows)


def _cifar10_scattering_errors(tree: Mapping[str, Any]) -> Table:
    """Predicted errors, as multiples of the first line's, which is that of the runs."""
    first, *_ = tree["errors"]
    rows = [
        [
            f"{row['steps']:,}",
            f"{row['batch']:,}",
            f"{row['bands']}",
            f"{row['min_sep']}",
            f"{row['noise_multiplier']:.3f}",
            f"{row['error'] / first['error']:.2f}",
        ]
        for row in tree["errors"]
    ]
    return Table(["steps", "batch", "bands", "separation", "σ", "predicted error"], rows)


def _individual(tree: Mapping[str, Any]) -> Table:
    ours = tree["accountant"]
    low, *_, high = ours["epsilon_quantiles"]
    rows = [
        [
            "dptrain",
            _seconds(ours["seconds"]),
            _mebibytes(ours["peak_mib"]),
            f"ε from {low:.3g} to {high:.3g}",
        ]
    ]
    for name, each in ours["alternatives"].items():
        least, most = each["our_epsilon_over_theirs"]
        hours = each["extrapolated_hours_for_all"]
        rows.append(
            [
                f"{name}, one composition an example",
                f"{hours:,.0f} h (extrapolated)",
                "",
                f"our ε over theirs: {least:.4f} to {most:.4f}",
            ]
        )
    return Table(["accountant", "time for all", "peak memory", "result"], rows)


def _individual_step(tree: Mapping[str, Any]) -> Table:
    rows = [
        [
            f"{each['model'].upper()}, {each['examples']:,}, {each['batch']:,}",
            each["filter"],
            _seconds(each["seconds_without"]),
            f"{each['ratio']:.3f}",
            f"{each['ratio_of_totals']:.3f}",
        ]
        for each in tree["rows"]
    ]
    head = ["model, N, batch", "filter", "step without", "median ratio", "whole run"]
    return Table(head, rows)


def _sharded_noise(tree: Mapping[str, Any]) -> Table:
    rows = []
    for each in tree["rows"]:
        whole, largest = (sum(each[kind].values()) for kind in ("whole", "largest"))
        sent = each["loopback_bytes"]
        rows.append(
            [
                each["strategy"],
                str(each["ranks"]),
                f"{whole / 2**20:.1f} MiB",
                f"{largest / 2**20:.1f} MiB",
                f"{largest * each['ranks'] / whole:.3f}",
                f"{each['payload_bytes'] / 2**20:.1f} MiB",
                f"{sent['off'] / 2**20:.1f} MiB",
                f"{sent['auto'] / 2**20:.1f} MiB",
                f"{each['ratio']:.2f}",
            ]
        )
    head = ["noise", "ranks", "not divided", "largest rank", "× ranks / not divided"]
    head += ["payload a rank", "sent, not divided", "sent, divided", "time of a step"]
    return Table(head, rows)


def _noise_offload(tree: Mapping[str, Any]) -> Table:
    rows = []
    for each in tree["rows"]:
        held, ratios = each["resident_bytes"], each["ratios"]
        rows.append(
            [
                each["strategy"],
                f"{each['history_bytes'] / 2**20:.0f} MiB",
                f"{held['memory'] / 2**20:.0f} MiB",
                f"{held['file'] / 2**20:.0f} MiB",
                _seconds(each["seconds"]["memory"]),
                *(f"× {ratios[side]:.2f}" for side in ("file", "cold", "not ahead")),
            ]
        )
    head = ["noise", "history", "resident, in memory", "resident, in a file", "step, in memory"]
    head += ["in a file", f"not cached, {tree['rows'][0]['pause']:g} s to read ahead"]
    return Table([*head, "not cached, not read ahead"], rows)


def _fully_sharded(tree: Mapping[str, Any]) -> Table:
    """A strategy and a mesh a row: the private step against fully_shard's own."""
    rows = []
    for each in tree["rows"]:
        shards = each["shards"]
        whole, largest = (sum(each[kind].values()) for kind in ("whole", "largest"))
        sent = each["payload_bytes"]
        rows.append(
            [
                each["strategy"],
                f"{each['ranks'] // shards} × {shards}",
                f"{largest / 2**20:.0f} MiB",
                f"{largest * shards / whole:.3f}",
                f"{sent['ordinary'] / 2**20:.1f} MiB",
                f"× {sent['private'] / sent['ordinary']:.3f}",
                f"× {each['processor_ratio']:.2f}",
                f"× {each['clock_ratio']:.2f}",
                f"× {each['first_processor_ratio']:.2f}",
            ]
        )
    head = ["noise", "mesh", "noise and optimizer of a rank", "of whole / shards"]
    head += ["payload, fully_shard's", "private", "processor time", "time"]
    return Table([*head, "first steps, processor time"], rows)


def _release(tree: Mapping[str, Any]) -> Table:
    """Noise as it was, as it is, and how they compare."""
    rows = [
        [
            name,
            f"{f['float32']:.1f}",
            f"{f['grid']:.1f}",
            f"{f['ratio']:.2f}",
            f"{f['bytes kept']:.0f}",
        ]
        for name, f in tree["noise"].items()
    ]
    head = ["noise", "added in float32 (ms)", "released on a grid (ms)", "ratio"]
    return Table([*head, "bytes kept of a parameter"], rows)


def _release_steps(tree: Mapping[str, Any]) -> Table:
    rows = [
        [name, f"{f['float32']:.0f}", f"{f['grid']:.0f}", f"{f['ratio']:.3f}"]
        for name, f in tree["steps"].items()
    ]
    return Table(["a whole private step", "float32 (ms)", "grid (ms)", "ratio"], rows)


def _sum_rounding(rows: list[dict[str, Any]]) -> Table:
    """What one example changes beyond R, and what it might at worst."""
    found = [
        [
            each["model"],
            str(each["batch"]),
            str(each["microbatch"]),
            f"{each['beyond R']:.1e}",
            f"{each['worst case']:.1e}",
        ]
        for each in rows
    ]
    head = ["model", "batch", "rows in a part", "beyond R (of R)", "at worst"]
    return Table(head, found)


def _footprint(tree: Mapping[str, Any]) -> Table:
    """A model and strategy a row, a number of ranks a column."""
    ranks = sorted({each["ranks"] for each in tree["rows"]})
    found = {(each["model"], each["strategy"], each["ranks"]): each for each in tree["rows"]}
    rows = []
    for model, strategy in dict.fromkeys((model, strategy) for model, strategy, _ in found):
        first = found[model, strategy, ranks[0]]
        kept = first["history"] * first["ranks"] / (first["parameters"] / 4)  # all are float32
        peaks = [found[model, strategy, each]["peak"] / 1e9 for each in ranks]
        rows.append([model, strategy, f"{kept:.0f}", *(f"{peak:,.1f}" for peak in peaks)])
    head = ["parameters", "noise", "bytes of noise a parameter"]
    return Table([*head, *(f"GB a rank, {each:,} ranks" for each in ranks)], rows)


def _footprint_sent(tree: Mapping[str, Any]) -> Table:
    ranks = sorted({each["ranks"] for each in tree["rows"]})
    found = {(each["model"], each["ranks"]): each["sent"] for each in tree["rows"]}
    rows = [
        [model, *(f"{found[model, each] / 1e9:,.1f}" for each in ranks)]
        for model in dict.fromkeys(model for model, _ in found)
    ]
    return Table(["parameters", *(f"GB sent, {each:,} ranks" for each in ranks)], rows)


def _footprint_measured(tree: Mapping[str, Any]) -> Table:
    rows = []
    for each in tree["measured"]:
        formula, ranks = each["formula"], each["measured"]
        most = {part: max(one[part] for one in ranks) for part in ranks[0]}
        kept = sum(most[part] for part in ("parameters", "history", "optimizer"))
        rows.append(
            [
                each["strategy"],
                f"`{each['shard']}`",
                str(each["ranks"]),
                f"{kept:,}",
                f"{formula['kept']:,}",
                f"{most['peak']:,}",
                f"{formula['peak']:,}",
                f"{most['sent']:,}",
                f"{formula['sent']:,}",
                str(most["messages"]),
            ]
        )
    head = ["noise", "`shard`", "ranks", "kept", "formula", "peak", "formula", "sent", "formula"]
    return Table([*head, "messages"], rows)


_MODEL_GROUPS = {
    "encoders": "encoders",
    "decoders": "decoders",
    "both": "encoder–decoders",
    "state_space": "state space",
    "experts": "mixtures of experts",
    "vision": "vision",
    "audio": "audio",
    "several": "several kinds of data",
    "adapters": "adapters",
    "own": "written by oneself",
    "timm": "timm",
    "torchvision": "torchvision",
}


def _model_coverage(tree: Mapping[str, Any]) -> Table:
    rows = []
    for group in _MODEL_GROUPS.values():
        found = [_apart(each) for each in tree["models"] if each["group"] == group]
        rows.append([group, str(len(found)), *(str(found.count(each)) for each in _APART)])
    return Table(["group", "models", *_APART], rows)


_APART = ("shown", "tested", "refused")


def _apart(model: Mapping[str, Any]) -> str:
    """How far it was followed that a model keeps the examples apart."""
    if not model["works"]:
        return "refused"
    return "shown" if model["unfollowed"] is None else "tested"


def _models(group: str, tree: Mapping[str, Any]) -> Table:
    """A model a row: kinds of layers by the way to their gradients, or why it is refused."""
    models = [each for each in tree["models"] if each["group"] == group]
    ways = ["rule", "operations", "replayed", "frozen"]
    ways = ["rule", *(w for w in ways[1:] if any(w in each["modes"] for each in models))]
    rows = []
    for each in models:
        cells = [", ".join(f"`{kind}`" for kind in each["modes"].get(way, ())) for way in ways]
        apart = _apart(each)
        if not each["works"]:
            why = each["refusal"].removeprefix("Gradients(mode='bookkeeping'): ")
            why = re.split(r"[;.] |: it mixes", why)[0].replace("|", "\\|")
            cells, apart = [f"**refused**: {why}", *cells[1:]], ""
        rows.append([each["name"], *cells, apart])
    return Table(["model", *ways, "apart"], rows)


def _following(tree: Mapping[str, Any]) -> Table:
    """What steps cost that are followed operator by operator."""
    rows = [
        [
            each["title"],
            f"{each['private']:.2f}",
            f"{each['followed']:.2f}",
            f"{each['first']:.1f}",
            f"{100 * each['run']:.2f} %",
        ]
        for each in tree["models"]
    ]
    head = ["model", "private / ordinary", "followed / private", "first step, ordinary steps more"]
    return Table([*head, f"{tree['steps']} steps more"], rows)


def _layer_databases(tree: Mapping[str, Any]) -> Table:
    kinds = ("right", "refused", "refused, rows meet", "wrong", "crashed", "left out")
    names = {
        "modules": "torch's modules",
        "operators": "torch's operators",
        "layers": "Opacus's kinds of layers",
    }
    rows = [
        [names[database], *(str(counts[kind]) for kind in kinds)]
        for database, counts in tree["counts"].items()
    ]
    head = ["database", "right", "refused", "of which rows meet", *kinds[3:]]
    return Table(head, rows)


def _choice(tree: Any) -> Table:
    """What choosing costs: all runs together, or the best of a random number, by each law."""
    laws = ("logarithmic", "geometric", "poisson")
    rows = [
        [
            f"{run['epsilon']:g}",
            f"{row['runs']}",
            f"{row['composed']:.2f}",
            *(f"{row['random'][law]['epsilon']:.2f}" for law in laws),
            f"{row['random']['geometric']['renyi']:.2f}",
        ]
        for run in tree["runs"]
        for row in run["rows"]
    ]
    head = ["ε of one run", "runs", "all together", *laws, "geometric, by Rényi"]
    return Table(head, rows)


def _audit(tree: Mapping[str, Any]) -> Table:
    """A calibrated pair a row: what is stated, what was found over it, what counting shows."""
    rows = []
    for each in tree["rows"]:
        stated = max(each["stated"].values())
        lower, estimate = each["epsilon_lower"], each["epsilon_estimate"]
        rows.append(
            [
                f"{each['scheme']}, {each['strategy']}",
                f"{each['epsilon']:g}",
                f"{each['delta']:g}",
                each["accountant"],
                f"{stated:.3g}",
                f"{each['ratio']:.3f} ± {each['ratio_standard_error']:.3f}",
                "–" if estimate is None else f"{estimate:.3f}",
                f"{lower:.3f}",
                f"{each['counting']['epsilon_lower']:.2f}",
                f"{each['counting']['most']:.2f}",
            ]
        )
    head = ["pair", "ε", "target δ", "accountant", "stated δ", "found / stated", "ε found"]
    return Table([*head, "ε at least", "by counting", "at best"], rows)


def _broken_engines(tree: Mapping[str, Any]) -> Table:
    """A fault a row: what finds it, the chance that it does, and how often it did."""
    rows = [
        [
            each["fault"],
            each["found_by"],
            "< 1e-12" if each["missed"] < 1e-12 else f"{each['missed']:.0e}",
            f"{each['broken']} of {tree['runs']}",
            f"{each['whole']} of {tree['runs']}",
        ]
        for each in tree["rows"]
    ]
    head = ["engine", "found by", "chance that it is missed", "broken engines that failed"]
    return Table([*head, "whole ones that failed"], rows)


_LEAK_SIDES = {
    "reference": "float32 noise, as it was",
    "opacus": "Opacus",
    "dptrain": "dptrain",
}
_LEAK_SEEN = {
    "rows": {
        "default": "noisy sums",
        "secure": "noisy sums, secure",
        "BandMF(4)": "noisy sums, `BandMF(4)`",
        "BandMF(4), secure": "noisy sums, `BandMF(4)`, secure",
    },
    "weights": {
        "SGD": "weights, SGD",
        "LoRA, SGD": "weights of a LoRA adapter, SGD",
        "Adam, ε = 1": "weights, Adam with `eps=1`",
        "SGD, bfloat16": "weights in bfloat16, SGD",
    },
}
_LEAK_EVIDENCE = ("floats", "last bits", "grid")


def _float_leak(tree: Mapping[str, Any]) -> Table:
    """What is seen a row, by the evidence that ranks words of the batch farthest from coins."""

    def cell(found: Mapping[str, Any] | None) -> str:
        if found is None:
            return "–"
        kinds = [found[kind] for kind in _LEAK_EVIDENCE if kind in found]
        best = max(kinds, key=lambda each: abs(each["ranked"] - 0.5))
        named = f"{best['right']} of {found['in']}, {best['wrong']} of {found['out']}"
        return f"{named}; {best['ranked']:.2f}"

    rows = [
        [title, *(cell(tree["sides"][side].get(part, {}).get(name)) for side in _LEAK_SIDES)]
        for part, titles in _LEAK_SEEN.items()
        for name, title in titles.items()
    ]
    return Table(["what is seen", *_LEAK_SIDES.values()], rows)


def _float_leak_sums(tree: Mapping[str, Any]) -> Table:
    """A dtype and σ a row: how often the right sum is named and the wrong one, where any is."""

    def cell(found: Mapping[str, Any]) -> str:
        kinds = [found["floats"], found["last bit"]]
        best = max(kinds, key=lambda each: abs(each["right"] - each["wrong"]))
        return f"{best['right']} right, {best['wrong']} wrong"

    sides = tree["sides"]
    rows = [
        [name, *(cell(sides[side]["sums"][name]) for side in _LEAK_SIDES)]
        for name in sides["dptrain"]["sums"]
    ]
    return Table(["parameters", *_LEAK_SIDES.values()], rows)


def _audit_digits(tree: Mapping[str, Any]) -> Table:
    """A method and a kind of canaries a row: bounds and accuracies over seeds."""
    named = {"identity": "`Identity` + `Poisson`", "bandmf": "`BandMF(10)` + `MinSep(10)`"}
    rows = []
    for each in tree["rows"]:
        runs = each["runs"]
        accuracies = [100 * run["accuracy"] for run in runs]
        cells = ["–"] * 4
        if each["canaries"]:
            bounds = [run["epsilon_lower"] for run in runs]
            found = sum(bool(run["violations"]) for run in runs)
            middle = sorted(runs, key=lambda run: run["epsilon_lower"])[len(runs) // 2]
            cells = [
                f"{middle['epsilon_lower']:.2f} ({min(bounds):.2f} to {max(bounds):.2f})",
                f"{statistics.median(each['expected']):.2f}" if "expected" in each else "–",
                f"{middle['correct']} of {middle['guesses']}",
                f"{found} of {len(runs)}",
            ]
        rows.append(
            [
                named[each["method"]],
                f"{each['canaries']} {each['variant']}" if each["canaries"] else "none",
                f"{each['epsilon']:g}",
                *cells,
                f"{statistics.mean(accuracies):.1f} "
                f"({min(accuracies):.1f} to {max(accuracies):.1f})",
            ]
        )
    head = ["mechanism", "canaries", "stated ε", "ε at least", "by the game alone"]
    return Table([*head, "guesses right", "contradicted", "accuracy"], rows)


_BENCHMARKS: dict[str, Callable[[Any], Table]] = {
    function.__name__[1:]: function
    for function in (
        _utility_digits,
        _utility_digits_sigma,
        _utility_mnist,
        _step_time,
        _step_time_gpu,
        _autocast,
        _step_costs,
        _following,
        _noise,
        _noise_peer,
        _strategies,
        _strategy_table,
        _samplers,
        _graph,
        _user_samplers,
        _user_accounting,
        _user_level,
        _user_errors,
        _user_bounds,
        _accounting,
        _accounting_peers,
        _accounting_scale,
        _amplified_strategies,
        _masked_head,
        _cifar10_scattering,
        _cifar10_scattering_errors,
        _clipping_norm,
        _trainer_time,
        _individual,
        _individual_step,
        _sharded_noise,
        _noise_offload,
        _fully_sharded,
        _release,
        _release_steps,
        _sum_rounding,
        _footprint,
        _footprint_sent,
        _footprint_measured,
        _model_coverage,
        _layer_databases,
        _choice,
        _audit,
        _broken_engines,
        _float_leak,
        _float_leak_sums,
        _audit_digits,
    )
}
_BENCHMARKS["noise_gpu"] = functools.partial(_noise, digits=1)
_BENCHMARKS |= {
    f"model_coverage_{name}": functools.partial(_models, group)
    for name, group in _MODEL_GROUPS.items()
}

# Tables that take another part of a file.
_FILES = {"utility_digits_sigma": "utility_digits", "user_bounds": "user_errors"}
_FILES["float_leak_sums"] = "float_leak"
_FILES["cifar10_scattering_errors"] = "cifar10_scattering"
_FILES |= dict.fromkeys(("footprint_sent", "footprint_measured"), "footprint")
_FILES["release_steps"] = "release"
_FILES |= {f"model_coverage_{name}": "model_coverage" for name in _MODEL_GROUPS}


def _as_it_is(columns: Mapping[str, str], rows: list[dict[str, str]]) -> Table:
    """Columns of a CSV under other names, to four digits."""

    def cell(text: str) -> str:
        try:
            value = float(text)
            return _figures(value, 4) if math.isfinite(value) else text.replace("inf", "∞")
        except ValueError:
            return text

    return Table(list(columns.values()), [[cell(row[name]) for name in columns] for row in rows])


# Of the papers' figures, those that are short enough to be read as a table.
_PAPERS: dict[str, Callable[[list[dict[str, str]]], Table]] = {
    name: functools.partial(_as_it_is, columns)
    for name, columns in {
        "matrix_fig4": {
            "sigma": "σ",
            "epsilon_mmcc": "ε, MMCC",
            "epsilon_cyclic": "ε, cyclic Poisson",
        },
        "matrix_fig8": {
            "c": "c",
            "n": "n",
            "sigma": "σ",
            "unamplified": "ε, unamplified",
            "epsilon": "ε",
            "ratio": "ratio",
            "ratio_papers_tails": "ratio, the paper's tails",
        },
        "min_sep_fig2_fig3": {
            "epoch_length": "steps an epoch",
            "epsilon": "ε",
            "ratio_to_cyclic": "error over that of cyclic Poisson",
            "ratio_to_balls_in_bins": "error over that of balls-in-bins",
        },
        "linear_last_iterate_groups": {
            "group": "group size",
            "epsilon_mixture": "ε by mixture",
            "epsilon_converted": "ε converted",
        },
        "truncated_poisson": {
            "max_batch_size": "cap",
            "used_rows": "used rows",
            "older_bound": "older bound",
            "theorem_3_1": "Theorem 3.1",
            "theorem_3_3": "Theorem 3.3",
            "zero_out": "ours, zero-out",
            "theorem_3_4": "Theorem 3.4",
            "replace_one": "ours, replace-one",
        },
    }.items()
}
