"""Memory and traffic of a step a rank: what the formulas say, and what ranks of this machine have.

Runs of 2 and 4 ranks are measured (over gloo, on this machine) and compared with
``dptrain.planning.footprint``. What is kept between steps is counted from the tensors' storages.
The highest moment of a step is found from torch's profiler, which sees every allocation,
activations included; it misses a tensor that another thread frees, and so the least of several
steps counts. Bytes sent follow from the sizes of the collectives that the profiler saw: in a ring a
rank sends (ranks - 1) / ranks of what it scatters, (ranks - 1) times what it adds to a gathering.

And the formulas are asked for models and numbers of ranks that no machine at hand has.

    PYTHONPATH=. python scripts/bench/footprint.py [--ranks 2 4] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from dptrain import BLT, BandMF, Identity, NoiseOptions, Poisson, PrivacyEngine
from dptrain.planning import Footprint, footprint
from dptrain.strategies import Strategy
from scripts import results
from scripts.bench.ranks import bytes_of, found_by, hand_over, meeting, state_of

MODELS = {"1B": 10**9, "8B": 8 * 10**9, "70B": 70 * 10**9}
RANKS = (8, 64, 512, 4096)
STEPS = 2000
STRATEGIES: dict[str, Strategy] = {
    "independent": Identity(),
    "BLT, 4 buffers": BLT(buffers=4, max_participations=4, min_sep=500),
    "16 bands": BandMF(bands=16),
    "64 bands": BandMF(bands=64),
}
CARD = 80e9  # bytes of a large accelerator

WIDTH, LAYERS, EXAMPLES, MEASURED_STEPS, WARM_UP = 256, 12, 64, 20, 2
MEASURED: dict[str, Strategy] = {
    "independent": Identity(),
    "16 bands": BandMF(bands=16),
    "BLT, 4 buffers": BLT(buffers=4, max_participations=2, min_sep=10),
}
COLUMNS = (
    ("noise", "{strategy}"),
    ("`shard`", "`{shard}`"),
    ("ranks", "{ranks}"),
    *(
        column
        for part in ("kept", "peak", "sent")
        for column in ((part, f"{{most.{part}:,}}"), ("formula", f"{{formula.{part}:,}}"))
    ),
    ("messages", "{most.messages}"),
)
SHARDS = {"auto": "all", "noise": "noise", "off": "off"}  # and what the first is with AdamW
_STEP = "footprint: step"
_ITEM = {"float": 4, "double": 8, "long int": 8, "unsigned char": 1}


class Side:
    """A run of this rank, whose steps can be profiled."""

    def __init__(self, strategy: Strategy, shard: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.module = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        self.state = torch.optim.AdamW(self.module.parameters(), lr=1e-4)
        data = TensorDataset(torch.randn(EXAMPLES, WIDTH), torch.randint(0, 10, (EXAMPLES,)))
        self.private = PrivacyEngine(distributed=True).make_private(
            module=self.module,
            optimizer=self.state,
            data=data,
            scheme=Poisson(probability=0.1, dataset_size=EXAMPLES, steps=MEASURED_STEPS),
            strategy=strategy,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            seed=0,
            noise=NoiseOptions(shard=shard),
        )
        self.private.end_early()
        self.batches = iter(self.private.loader)

    def step(self) -> None:
        """One step, by name in a profile."""
        with torch.profiler.record_function(_STEP):
            x, y = next(self.batches)
            self.private.optimizer.zero_grad()
            nn.functional.cross_entropy(self.module(x), y).backward()
            self.private.optimizer.step()

    def held(self) -> dict[str, int]:
        """Bytes of the storages that are there between two steps, by the names of the formulas."""
        parameters = list(self.module.parameters())
        noise = self.private.optimizer.noise
        return {
            "parameters": bytes_of(parameters),
            "history": noise.buffer_bytes,
            "optimizer": state_of(self.state),
            "gradients": bytes_of(p.grad for p in parameters if p.grad is not None),
        }


def measured(rank: int, world: int, folder: str, names: list[str]) -> None:
    """One process; rank 0 hands the rows of all cases over."""
    with meeting(rank, world, folder):
        rows = of_rank(rank, world, folder, names)
        if rank == 0:
            hand_over(rows, folder)


def of_rank(rank: int, world: int, folder: str, names: list[str]) -> list[dict[str, Any]]:
    """Formula and measurement of each case; no rows on other ranks than 0."""
    rows = []
    cases = [(name, shard) for name in names for shard in SHARDS]
    for name, shard in tqdm(cases, desc=f"{world} ranks", delay=2, disable=rank > 0):
        side = Side(MEASURED[name], shard)
        for _ in range(WARM_UP):
            side.step()
        options = {"profile_memory": True, "record_shapes": True}
        with torch.profiler.profile(**options) as profile:
            for _ in range(4):
                side.step()
        path = pathlib.Path(folder, f"trace_{rank}.json")
        profile.export_chrome_trace(str(path))
        found = side.held()
        kept = sum(found.values())
        highest, sent, messages = _of_trace(json.loads(path.read_text(encoding="utf-8")), world)
        ours = found | {"peak": kept + highest, "sent": sent, "messages": messages}
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, ours)
        if rank == 0:
            formula = footprint(
                MEASURED[name],
                steps=MEASURED_STEPS,
                parameters=sum(p.numel() for p in side.module.parameters()),
                ranks=world,
                shard=SHARDS[shard],
                backend="gloo",
            )
            most = {part: max(one[part] for one in everybody) for part in ours}
            most["kept"] = sum(most[part] for part in ("parameters", "history", "optimizer"))
            rows.append(
                {
                    "strategy": name,
                    "shard": shard,
                    "ranks": world,
                    "formula": formula.to_dict(),
                    "most": most,
                    "measured": everybody,
                }
            )
    return rows


def _of_trace(trace: dict[str, Any], world: int) -> tuple[int, int, int]:
    """The last steps' least highest moment above their start, bytes sent, and those of messages.

    The first step in a profile frees what was made before it, which the profile does not tell.
    """
    events = sorted((e for e in trace["traceEvents"] if "ts" in e), key=lambda e: e["ts"])
    steps = [e for e in events if e.get("name") == _STEP and e.get("cat") == "user_annotation"]
    found = []
    for step in steps[1:]:
        within = [e for e in events if step["ts"] <= e["ts"] <= step["ts"] + step["dur"]]
        held = highest = sent = messages = 0
        for event in within:
            name, given = event.get("name", ""), event.get("args", {})
            if name == "[memory]":
                held += given["Bytes"]
                highest = max(highest, held)
            elif name == "c10d::alltoall_base_":
                sent += _given(given, 1) * (world - 1) // world
            elif name == "c10d::_allgather_base_":
                sent += _given(given, 1) * (world - 1)
            elif name == "c10d::allreduce_":
                (dims,) = given["Input Dims"][0]
                sent += 2 * 4 * dims[0] * (world - 1) // world
            elif name == "c10d::allgather_":
                (dims,) = given["Input Dims"][1]
                messages += 8 * dims[0] * (world - 1)
        found.append((highest, sent, messages))
    return (
        min(each[0] for each in found),
        max(each[1] for each in found),
        max(each[2] for each in found),
    )


def _given(given: dict[str, Any], index: int) -> int:
    """Bytes of one of a collective's vectors."""
    return _ITEM[given["Input type"][index]] * given["Input Dims"][index][0]


def run_ranks(world: int, names: list[str]) -> list[dict[str, Any]]:
    """Formula and measurement of each case, of so many ranks of this machine."""
    rows: list[dict[str, Any]] = found_by(measured, world, names)
    return rows


def planned(parameters: int, ranks: int, strategy: str) -> Footprint:
    """The formulas for one of the models."""
    return footprint(STRATEGIES[strategy], steps=STEPS, parameters=parameters, ranks=ranks)


def planned_tables(rows: list[dict[str, Any]]) -> dict[str, results.Table]:
    """A model and strategy a row, a number of ranks a column: memory, and what is sent."""
    by: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        kept = row["history"] * row["ranks"] / (row["parameters"] / 4)  # all are float32
        start = {"model": row["model"], "strategy": row["strategy"], "kept": kept, "ranks": {}}
        by.setdefault((row["model"], row["strategy"]), start)["ranks"][str(row["ranks"])] = row

    def columns(what: str, key: str) -> results.Columns:
        ranks = dict.fromkeys(row["ranks"] for row in rows)
        return [(f"{what}, {n:,} ranks", f"{{ranks.{n}.{key}:GB ,.1f}}") for n in ranks]

    sent = {model: row for (model, _), row in by.items()}  # whatever the noise is
    head = (("noise", "{strategy}"), ("bytes of noise a parameter", "{kept:.0f}"))
    model = ("parameters", "{model}")
    return {
        "footprint": results.Table(
            [model, *head, *columns("GB a rank", "peak")], list(by.values())
        ),
        "footprint_sent": results.Table([model, *columns("GB sent", "sent")], list(sent.values())),
    }


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """A panel a model: bytes a rank over the number of ranks, and a card of 80 GB.

    Raises:
        SystemExit: if there is no matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(MODELS), figsize=(11, 3.8), sharey=True)
    for ax, (model, size) in zip(axes, MODELS.items(), strict=True):
        for name, marker in zip(STRATEGIES, "os^D", strict=True):
            mine = [row for row in rows if row["model"] == model and row["strategy"] == name]
            ax.plot(
                [row["ranks"] for row in mine],
                [row["peak"] / 1e9 for row in mine],
                marker=marker,
                label=name,
            )
        ax.axhline(CARD / 1e9, color="black", linestyle="--", linewidth=1)
        floor = 8 * size / 1e9  # parameters and clipped sums, which every rank has
        ax.axhline(floor, color="grey", linestyle=":", linewidth=1)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
        ax.set_title(f"{model} parameters")
        ax.set_xlabel("ranks")
    axes[0].set_ylabel("GB a rank, activations left out")
    axes[0].legend(frameon=False)
    axes[0].text(RANKS[0], CARD / 1e9 * 1.08, "80 GB", va="bottom")
    axes[-1].text(
        RANKS[-1], floor / 1.1, "parameters and clipped sums", ha="right", va="top", color="grey"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    rows = [
        {"model": model, "strategy": name, "ranks": ranks, **planned(size, ranks, name).to_dict()}
        for model, size in MODELS.items()
        for name in STRATEGIES
        for ranks in RANKS
    ]
    checked = [row for world in args.ranks for row in run_ranks(world, list(MEASURED))]
    tables = {**planned_tables(rows), "footprint_measured": results.Table(COLUMNS, checked)}
    results.publish(
        args.json, tables, script=__file__, machine=results.machine("torch"), steps=STEPS
    )
    if args.plot is not None:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
