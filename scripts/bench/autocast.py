"""Time that ``torch.autocast`` to bfloat16 saves in an ordinary step and in one of dptrain.

All four sides of a model take turns in one process (``step_measure.py``), and ratios are to the
ordinary step in float32 of the same round. Where the processor multiplies bfloat16 no faster
(without AMX), nothing can be gained.

Results of models that are not named are kept, if they are of the same machine and versions.

    PYTHONPATH=. python scripts/bench/autocast.py [--models vgg bert ...] [--device cpu]
        [--rounds 7] [--processor] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import sys
import time
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from recipes.models import vgg
from scripts import results
from scripts.bench.step_measure import WARM_UP, round_of, summary
from scripts.bench.step_models import CASES, Case, Inputs, call
from scripts.bench.step_sides import ORDINARY, Side, quiet
from scripts.bench.step_time import PACKAGES

OUT = pathlib.Path(__file__).parent / "results" / "autocast.json"
OURS, HALF = "bookkeeping", "in bfloat16"
COLUMNS = (
    ("model; batch", "{title}; {batch:,}"),
    (ORDINARY, f"{{seconds.{ORDINARY}:time}}"),
    (f"{ORDINARY}, bfloat16", f"{{ratio.{ORDINARY} {HALF}.median:.2f}}"),
    (OURS, f"{{ratio.{OURS}.median:.2f}}"),
    (f"{OURS}, bfloat16", f"{{ratio.{OURS} {HALF}.median:.2f}}"),
    ("gain", "{gain:.2f}"),
)
CHANNELS = 243  # averages of wavelets' moduli over 4×4 pixels of a color image
WIDTH = 256


def _wavelets() -> nn.Module:
    return vgg(
        in_channels=CHANNELS, classes=10, image_size=8, channels=(WIDTH,), groups=8, hidden=0
    )


def _features(rows: int, generator: torch.Generator) -> Inputs:
    return {"x": torch.randn(rows, CHANNELS, 8, 8, generator=generator)}


MODELS: dict[str, Case] = {
    **{name: CASES[name] for name in ("mlp", "vgg", "resnet10", "bert", "vit", "gpt2", "llama")},
    "wavelets": Case("wavelets", f"two convolutions of {WIDTH}, 8×8", 128, _wavelets, _features),
}


class Within(Side):
    """A side whose model runs within autocast, and whose loss is of float32."""

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.partition(":")[0], dtype=torch.bfloat16):
            outputs = call(self.module, self.inputs)
        self.loss(outputs.float(), self.labels).backward()
        self.optimizer.step()


def measure(name: str, *, rounds: int, device: str, processor: bool) -> dict[str, Any]:
    """Ratios of one model, by side."""
    case = MODELS[name]
    sides: dict[str, Side] = {}
    for kind in (ORDINARY, OURS):
        for label, build in (("", Side), (f" {HALF}", Within)):
            side = build(kind, case, device)
            side.wrap()
            side.settle()
            sides[f"{kind}{label}"] = side
    order, draw = list(sides), random.Random(0)
    clock = time.process_time if processor else time.perf_counter
    done = []
    for _ in tqdm(range(rounds + WARM_UP), desc=name, unit="round", leave=False, file=sys.stderr):
        draw.shuffle(order)
        done.append(round_of(sides, order, clock))
    found = summary(done[WARM_UP:])
    with_it, without = (found["ratio"][side]["median"] for side in (f"{OURS} {HALF}", OURS))
    return {
        "model": name,
        "title": case.title,
        "batch": case.batch,
        "clock": "processor" if processor else "wall",
        "threads": torch.get_num_threads(),
        **found,
        "gain": without / with_it,
    }


def _kept(path: pathlib.Path, here: dict[str, Any]) -> dict[str, Any]:
    """Rows of the file by model; none, where they are of another machine."""
    if not path.exists():
        return {}
    before = results.read(path)
    rows = before["tables"]["autocast"].rows if before["machine"] == here else []
    return {row["model"]: dict(row) for row in rows}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    quiet()
    amx = os.path.exists("/proc/cpuinfo") and "amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text(
        encoding="utf-8"
    )
    here = {**results.machine(*PACKAGES, device=options.device), "amx_bf16": amx}
    rows = _kept(options.json, here)
    for name in options.models:
        row = measure(
            name, rounds=options.rounds, device=options.device, processor=options.processor
        )
        rows[name] = row
        ratios = ", ".join(f"{side} {value['median']:.2f}" for side, value in row["ratio"].items())
        print(f"{row['title']}, batch {row['batch']}: {ratios}", flush=True)
        table = results.Table(COLUMNS, [rows[model] for model in MODELS if model in rows])
        results.publish(
            options.json, {"autocast": table}, script=__file__, machine=here, quiet=True
        )


if __name__ == "__main__":
    main()
