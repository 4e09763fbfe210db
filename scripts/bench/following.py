"""The cost of following steps operator by operator: a followed step, the first one, a long run.

Same model, same batch, same run; ordinary training, a private step that is not followed and one
that is take turns within one process, and the ratios printed are medians over rounds of the ratio
within a round. The first step of a run is followed and probed: it is timed once, in a run of its
own, the loader's part included. From these follows what 500 steps take more for being followed, of
which the first is and one in a hundred of the others.

    PYTHONPATH=. python scripts/bench/following.py [--models gpt2 mnist] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from dptrain.clipping.owners import SHARE, OwnerWatch
from scripts import results
from scripts.bench.step_models import CASES, ON_CPU
from scripts.bench.step_sides import ORDINARY, Side, open_side, quiet
from scripts.bench.step_time import PACKAGES

STEPS = 500
COLUMNS = (
    ("model", "{title}"),
    ("private / ordinary", "{private:.2f}"),
    ("followed / private", "{followed:.2f}"),
    ("first step, ordinary steps more", "{first:.1f}"),
    (f"{STEPS} steps more", "{run:% .2f} %"),
)


def seconds(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step(side: Side, *, followed: bool) -> float:
    """The time of one step, with what the loader does before it."""

    def both() -> None:
        side.prepare()
        side.step()

    with mock.patch.object(OwnerWatch, "_chosen", return_value=followed):
        return seconds(both)


def measured(model: str, rounds: int) -> dict[str, Any]:
    """All ratios of a model."""
    ordinary = open_side(ORDINARY, model, "cpu")
    for _ in range(3):
        ordinary.step()
    usual = statistics.median(seconds(ordinary.step) for _ in range(5))
    new = Side("bookkeeping", CASES[model], "cpu")
    new.wrap()
    first = step(new, followed=True) / usual
    private = open_side("bookkeeping", model, "cpu")
    step(private, followed=True)
    rows = []
    for _ in tqdm(range(rounds), desc=model, unit="round"):
        alone = seconds(ordinary.step)
        plain, followed = (step(private, followed=f) for f in (False, True))
        rows.append((plain / alone, followed / plain, (followed - plain) / alone))
    ratios = [statistics.median(column) for column in zip(*rows, strict=True)]
    extra = ratios[1] - 1
    return {
        "model": model,
        "title": CASES[model].title,
        "private": ratios[0],
        "followed": ratios[1],
        "first": first - ratios[0],
        "run": extra * (1 + SHARE * (STEPS - 1)) / STEPS,
    }


def main() -> None:
    """Print a line for every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=ON_CPU, default=["gpt2", "mnist"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet()
    rows = [measured(model, options.rounds) for model in options.models]
    here = results.machine(*PACKAGES) | {"threads": torch.get_num_threads()}
    table = results.Table(COLUMNS, rows)
    results.publish(options.json, {"following": table}, script=__file__, machine=here)


if __name__ == "__main__":
    main()
