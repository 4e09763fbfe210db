"""The additional cost of a private step over an ordinary one, by its parts.

Both steps are made of the same parts (``step_profile.py``), timed within whole steps that take
turns in one process. Their difference is split without a rest:

- *norms*: what the taps report to, in the backward pass: gradients that are formed, ghost norms;
- *clipped sums*: those, less the weight gradients that the backward pass leaves out for them, of
  which it is told how much shorter it is without the norms;
- *forward pass*, *noise*, *checksum* (of the release), *update*: what each takes longer;
- *other*: the rest of the step, such as the comparison of the module's state before and after.

Medians over rounds. On a machine that others use, ``--least`` takes the least of each part instead,
and ``--processor`` the seconds that this process had a core, with ``--threads 1``.

    PYTHONPATH=. python scripts/bench/step_costs.py [--models vgg bert mlp] [--rounds 15]
        [--threads 2] [--allocator tuned] [--least] [--processor] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from scripts import results
from scripts.bench.step_models import CASES
from scripts.bench.step_profile import TOTAL, profile
from scripts.bench.step_sides import ORDINARY, quiet
from scripts.bench.step_time import ALLOCATORS, PACKAGES, child

SIDE = "bookkeeping"
MODELS = (
    "vgg",
    "bert",
    "mlp",
    "mnist",
    "resnet10",
    "gpt2",
    "llama",
    "vit",
    "convnext",
    "unet",
    "lstm",
)
PLACES = ("first", "second", "third")
COLUMNS = (
    ("model; batch", "{title}; {batch:,}"),
    ("ordinary", "{seconds.ordinary:ms figures3} ms"),
    ("bookkeeping", "{seconds.bookkeeping:ms figures3} ms"),
    *(
        (place, f"{{largest.{place}.part}} {{largest.{place}.seconds:ms figures3}} ms")
        for place in PLACES
    ),
)
Row = dict[str, Any]


def extra(ordinary: dict[str, float], private: dict[str, float]) -> dict[str, float]:
    """Seconds that the private step takes longer, by what they are spent on.

    Args:
        ordinary: seconds by part of ``step_profile``.
        private: likewise.
    """

    def more(*parts: str) -> float:
        return sum(private.get(part, 0.0) - ordinary.get(part, 0.0) for part in parts)

    norms = private.get("norms", 0.0)
    found = {
        "norms": norms,
        "clipped sums": private.get("clipped sums", 0.0) + more("backward") - norms,
        "forward pass": more("forward", "loss"),
        "noise": private.get("noise", 0.0),
        "checksum": private.get("checksum", 0.0),
        "update": more("update"),
    }
    return {**found, "other": more(TOTAL) - sum(found.values())}


def measure(
    model: str, rounds: int, choose: Callable[[list[float]], float], *, processor: bool = False
) -> Row:
    """One row of the results."""
    found = profile(model, [SIDE], rounds, "cpu", choose, processor=processor)
    ordinary, private = found[ORDINARY], found[SIDE]
    more = extra(ordinary, private)
    largest = sorted(more.items(), key=lambda item: -item[1])
    return {
        "model": model,
        "title": CASES[model].title,
        "batch": CASES[model].batch,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "least": choose is min,
        "clock": "processor" if processor else "wall",
        "seconds": {ORDINARY: ordinary[TOTAL], SIDE: private[TOTAL]},
        "extra": more,
        "largest": {
            place: {"part": part, "seconds": seconds}
            for place, (part, seconds) in zip(PLACES, largest, strict=False)
        },
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's; as torch chooses if left out")
    parser.add_argument("--allocator", choices=list(ALLOCATORS), default="tuned")
    parser.add_argument("--least", action="store_true", help="of the rounds, not the median")
    parser.add_argument("--processor", action="store_true", help="processor time")
    parser.add_argument("--json", type=pathlib.Path, help="results, e.g. results/step_costs.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads {options.threads}: at least 1")
    if options.processor and options.threads != 1:
        parser.error("--processor counts threads that wait as well: add --threads 1")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"{options.json}: there is no folder {options.json.parent}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parse(argv)
    if options.one:  # within a process that has the allocator's settings
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        quiet()
        choose = min if options.least else statistics.median
        row = measure(options.models[0], options.rounds, choose, processor=options.processor)
        print(json.dumps(row))
        return
    common = ["--one", "--rounds", str(options.rounds), *["--least"] * options.least]
    common += ["--processor"] * options.processor
    if options.threads is not None:
        common += ["--threads", str(options.threads)]
    rows = []
    for model in tqdm(options.models, unit="model", file=sys.stderr):
        rows.append(child("step_costs.py", [*common, "--models", model], options.allocator))
    rows.sort(key=lambda row: list(CASES).index(row["model"]))
    results.publish(
        options.json,
        {"step_costs": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=results.machine(*PACKAGES),
    )


if __name__ == "__main__":
    main()
