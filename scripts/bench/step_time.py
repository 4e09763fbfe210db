"""Time and peak memory of one training step: ordinary, Opacus and dptrain, a clipping mode each.

Same model, same batch, same loss; clipping, noise and update included, data loading left out. All
sides of a model take turns within one process (``step_measure.py``); the ratio printed is the
median over rounds of the ratio to the ordinary step of the same round. "others" is how many cores
other processes kept busy meanwhile: a row with more than ``--max-load`` of them has a "!". Peak
memory is of each side in a process of its own (``step_memory.py``): all of it, and, in brackets,
what was added to libraries, model and data.

``--allocator`` is how glibc's malloc is set, in the environment of the processes that this script
starts: "default" leaves it alone, so that every tensor of some MB comes in fresh pages, which the
system clears each time; "tuned" sets MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and
MALLOC_TOP_PAD_ so that freed memory is kept and used again.

``--json`` adds to the results that are there, model by model, so that a table can be made on a
machine that is quiet for a while only; those of another machine or other versions go.

    PYTHONPATH=. python scripts/bench/step_time.py [--models vgg bert mlp] [--sides ...]
        [--allocator default tuned] [--rounds 15] [--threads 2] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from scripts import results
from scripts.bench.step_models import CASES, default_models
from scripts.bench.step_plot import plot
from scripts.bench.step_sides import DEFAULT_SIDES, ORDINARY, SIDES

HERE = pathlib.Path(__file__).resolve().parent
GIB = 1 << 30
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * GIB),
    "MALLOC_TRIM_THRESHOLD_": str(16 * GIB),
    "MALLOC_TOP_PAD_": str(GIB // 16),
}
ALLOCATORS: dict[str, dict[str, str]] = {"default": {}, "tuned": MALLOC}
"""What each sets in the environment; a setting of the caller's own never gets there."""

TITLES = {
    "opacus-hooks": "Opacus hooks",
    "opacus-functorch": "Opacus functorch",
    "opacus-ghost": "Opacus ghost",
    "opake": "opake",
    "bookkeeping": "dptrain bookkeeping",
}
PACKAGES = ("torch", "opacus", "transformers", "numpy")
Row = dict[str, Any]


def child(script: str, arguments: Sequence[str], allocator: str) -> Row:
    """The JSON output of a script of this folder, in a process with an allocator's settings.

    Raises:
        SystemExit: if it fails; it has said why by then.
    """
    kept = {k: v for k, v in os.environ.items() if k not in MALLOC and k != "GLIBC_TUNABLES"}
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [kept.get("PYTHONPATH")])])
    environment = {**kept, **ALLOCATORS[allocator], "PYTHONPATH": path}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(
            f"{script} {' '.join(arguments)} ended with status {done.returncode}"
            + (": out of memory? try fewer --sides" if done.returncode == -9 else "")
        )
    row: Row = json.loads(done.stdout)
    return {**row, "allocator": allocator}


def show(time: Row | None, memory: Sequence[Row], max_load: float) -> None:
    """The table of one model and allocator."""
    some = time or memory[0]
    case = CASES[some["model"]]
    title = f"\n{case.title}, batch {case.batch}, {some['allocator']} allocator"
    if time and "seconds" in time:
        busy = "!" if time["other_load"] > max_load else ""
        title += f", {time['clock']} time, {time['rounds']} rounds"
        title += f", others {time['other_load']:.2f} cores{busy}"
    print(title)
    print(f"{'':20}{'step':>12}{'ratio (quartiles)':>22}{'peak memory':>24}{'ratio':>14}")
    peaks = {row["side"]: row for row in memory if "peak_bytes" in row}
    failures = {row["side"]: row["failure"] for row in memory if "failure" in row}
    failures.update(time["failures"] if time else {})
    timed = time.get("seconds", {}) if time else {}
    for side in SIDES:
        line = f"{side:20}"
        if side in timed and time is not None:
            line += f"{1e3 * timed[side]:9.1f} ms"
            if found := time["ratio"].get(side):
                line += f"{found['median']:9.3f} ({found['q1']:.2f}–{found['q3']:.2f})"
        if side in peaks:
            line = f"{line:54}{_memory(peaks[side], peaks.get(ORDINARY))}"
        if side in timed or side in peaks:
            print(line)
        elif side in failures:
            print(f"{side:20}  {failures[side]}")
    sys.stdout.flush()


def _memory(row: Row, ordinary: Row | None) -> str:
    whole, added = row["peak_bytes"], row["peak_bytes"] - row["start_bytes"]
    text = f"{whole / 2**20:10.0f} MiB ({added / 2**20:.0f})"
    if ordinary is not None:
        above = ordinary["peak_bytes"] - ordinary["start_bytes"]
        text = f"{text:26}{whole / ordinary['peak_bytes']:8.2f} ({added / max(above, 1):.2f})"
    return text


def run(options: argparse.Namespace) -> Row:
    """All tables, printed as they come, and kept after each model where a file is named."""
    common = ["--device", options.device]
    if options.threads is not None:
        common += ["--threads", str(options.threads)]
    machine = results.machine(*PACKAGES, device=options.device)
    result: Row = {"machine": machine, "time": [], "memory": []}
    per_model = (not options.no_time) + (not options.no_memory) * len(options.sides)
    total = per_model * len(options.models) * len(options.allocator)
    with tqdm(total=total, unit="process", file=sys.stderr) as bar:
        for model in options.models:
            for allocator in options.allocator:
                bar.set_description(f"{model}, {allocator}")
                time, memory = None, []
                if not options.no_time:
                    arguments = [*common, "--model", model, "--rounds", str(options.rounds)]
                    arguments += ["--processor"] * options.processor
                    arguments += ["--max-load", str(options.max_load), "--sides", *options.sides]
                    time = child("step_measure.py", arguments, allocator)
                    result["time"].append(time)
                    bar.update()
                for side in [] if options.no_memory else options.sides:
                    arguments = [*common, "--model", model, "--side", side]
                    memory.append(child("step_memory.py", arguments, allocator))
                    bar.update()
                result["memory"] += memory
                bar.clear()
                show(time, memory, options.max_load)
            if options.json:
                keep(result, options.json)
    return result


def keep(result: Row, path: pathlib.Path) -> None:
    """Add to the results in a file, by device."""
    name = result["machine"]["device"]
    devices = {each["machine"]["device"]: each for each in results.read(path).get("devices", [])}
    devices[name] = joined(devices[name], result) if name in devices else result
    publish(list(devices.values()), path)


def publish(devices: Sequence[Row], path: pathlib.Path) -> None:
    """Write the results of devices, and their table; of one on the CPU with memory."""
    rows = [row for each in devices for row in shown(each)]
    sides = [(t, s) for s, t in TITLES.items() if any(s in row["ratio"] for row in rows)]
    model, gpu = ("model; batch", "{title}; {batch:,}"), devices[0]["machine"]["device"] != "cpu"
    if gpu:
        columns = [("device", "{device}"), model, ("ordinary", "{seconds.ordinary:time}")]
        columns += [(title, f"{{ratio.{side}.median:.2f}}") for title, side in sides]
        rows = [row for row in rows if row["kind"] == "time"]
    else:
        ordinary = ("ordinary", "{seconds.ordinary:time}", "{added.ordinary:MiB ,.0f} MiB")
        columns = [("", "{kind}"), model, ("allocator", "{allocator}"), ordinary]
        for title, side in sides:
            spread = f" ({{ratio.{side}.q1:.2f}}–{{ratio.{side}.q3:.2f}})"
            time = f"{{ratio.{side}.median:.2f}}{spread if side == 'bookkeeping' else ''}"
            columns.append((title, time, f"{{ratio.{side}:.2f}}"))
    results.publish(
        path,
        {"step_time_gpu" if gpu else "step_time": results.Table(columns, rows)},
        script=__file__,
        machine=None if gpu else devices[0]["machine"],
        quiet=True,
        devices=devices,
    )


def shown(device: Row) -> Iterator[Row]:
    """Rows of the table: times with ratios to the ordinary step, then memory that a step adds."""
    added: dict[tuple[str, str], dict[str, int]] = {}
    for row in device["memory"]:
        if "peak_bytes" in row:
            of = added.setdefault((row["model"], row["allocator"]), {})
            of[row["side"]] = row["peak_bytes"] - row["start_bytes"]
    cases = [
        {key: row[key] for key in ("model", "batch", "allocator", "seconds", "ratio")}
        | {"title": CASES[row["model"]].title}
        for row in device["time"]
        if "ratio" in row
    ]
    yield from ({"kind": "time", "device": device["machine"]["device"], **row} for row in cases)
    for row in cases:
        if found := added.get((row["model"], row["allocator"])):
            ratio = {side: each / found[ORDINARY] for side, each in found.items()}
            yield {**row, "kind": "memory", "seconds": {}, "added": found, "ratio": ratio}


def joined(before: Row, result: Row) -> Row:
    """Results with those of models and allocators that were not measured again, in their order.

    Nothing is kept of another machine, or of other versions.
    """
    if before["machine"] != result["machine"]:
        return result
    places = {name: place for place, name in enumerate(CASES)}
    whole = {"machine": result["machine"]}
    for kind in ("time", "memory"):
        again = {(row["model"], row["allocator"]) for row in result[kind]}
        kept = [row for row in before[kind] if (row["model"], row["allocator"]) not in again]
        whole[kind] = sorted(
            kept + result[kind], key=lambda row: (places[row["model"]], row["allocator"])
        )
    return whole


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=DEFAULT_SIDES)
    parser.add_argument("--allocator", nargs="+", choices=list(ALLOCATORS), default=["tuned"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's; as torch chooses if left out")
    parser.add_argument("--max-load", type=float, default=0.2, help="cores others may keep busy")
    parser.add_argument(
        "--processor",
        action="store_true",
        help="processor time instead, for a machine that others use; with --threads 1",
    )
    parser.add_argument("--no-time", action="store_true", help="memory only")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--json", type=pathlib.Path, help="results, e.g. results/step_time.json")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG of the ratios")
    options = parser.parse_args(argv)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no GPU here")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads {options.threads}: at least 1")
    if options.processor and (options.threads != 1 or options.device != "cpu"):
        parser.error("--processor counts threads that wait as well: add --threads 1, on a CPU")
    if options.no_time and options.no_memory:
        parser.error("--no-time --no-memory leaves nothing to measure")
    for file in filter(None, (options.json, options.plot)):
        if not file.absolute().parent.is_dir():
            parser.error(f"{file}: there is no folder {file.parent}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if ORDINARY not in options.sides:  # every ratio is to it
        options.sides = [ORDINARY, *options.sides]
    options.models = options.models or default_models(options.device)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parse(argv)
    result = run(options)
    if options.plot:
        kept = results.read(options.json).get("devices", [result])
        plot(next(d for d in kept if d["machine"] == result["machine"]), options.plot)


if __name__ == "__main__":
    main()
