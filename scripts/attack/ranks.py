"""Killed ranks: torchrun starts them again, they go on from the last checkpoint, bit for bit.

A case is one ``torchrun --max-restarts`` of two ranks. In each of its lives but the last, one rank
kills itself at a random moment: before one of its Python calls, of any step, exchange, line of the
ledger or checkpoint. Model, optimizer, noise and ledger have to end as those of a run that nobody
kills. The ranks of half of the cases divide the model by ``fully_shard``, and save it in folders.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
from typing import Any

import torch

from scripts.attack.harness import Finding, Part
from tests.helpers import restarted_run as worker
from tests.recipes.test_resume import _same

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = 2
_LIFE = 300  # seconds that a life may take, on a machine that is busy too
# A life ends within so many calls, of some 16,000 a step; a checkpoint is due every three steps.
_REACH = 80_000
_REACH_DIVIDED = 150_000  # two thirds of the first rank's calls are of its checkpoints


def outcome(kills: list[tuple[int, int]], *, divided: bool = False) -> dict[str, Any]:
    """The results of a run that must not depend on kills, and the number of kills.

    Args:
        kills: for every life but the last, the rank and before which of its calls it dies.
        divided: whether the ranks divide the model.

    Raises:
        Finding: if the run does not end well.
    """
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        folder = pathlib.Path(name)
        (folder / worker.KILLS).write_text(json.dumps(kills))
        launch(folder, restarts=len(kills), divided=divided)
        saved = [
            torch.load(folder / worker.OUTCOME.format(rank=rank), weights_only=True)
            for rank in range(RANKS)
        ]
        first, *others = (one["state"] for one in saved)
        # Each rank has generators of its own, and the checksum is over them too.
        generators = []
        for state in (first, *others):
            generators.append(state["private"].pop("rng"))
            del state["private"]["checksum"]
        if not all(_same(first, other) for other in others):
            raise Finding("the ranks end in different states")
        parts = {part: first[part] for part in ("module", "optimizer", "steps_executed", "private")}
        parts["generators"] = generators
        parts["releases"] = (folder / worker.LEDGER).read_text().splitlines()[1:]
        parts["kills"] = saved[0]["life"]
        return parts


def launch(folder: pathlib.Path, restarts: int, *, divided: bool) -> None:
    """Run ``torchrun`` in a process group of its own, until it ends.

    Raises:
        Finding: if it does not end well.
    """
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    again = ["--max-restarts", str(restarts), "-m", worker.__name__, str(folder)]
    again += ["divided"] if divided else []
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, *again],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Else ranks that are started again look for those of the last life (pytorch#135712).
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    seconds = _LIFE * (restarts + 1)
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Finding(f"still running after {seconds} s: {process.args}") from None
    if process.returncode:
        raise Finding(f"ended with {process.returncode}: {said[-1500:]}")


@functools.cache
def uninterrupted(*, divided: bool = False) -> dict[str, Any]:
    """The outcome of a run that nobody kills."""
    return outcome([], divided=divided)


def case(seed: int) -> int:
    """A run of which ranks are killed up to three times; how many kills there were."""
    rng = random.Random(seed)
    divided = rng.random() < 0.5
    reach = _REACH_DIVIDED if divided else _REACH
    kills = [(rng.randrange(RANKS), rng.randint(1, reach)) for _ in range(rng.randint(1, 3))]
    return killed(kills, divided=divided)


def killed(kills: list[tuple[int, int]], *, divided: bool = False) -> int:
    """The number of kills, if the run ends like one without them.

    Raises:
        Finding: if it does not.
    """
    found, expected = outcome(kills, divided=divided), uninterrupted(divided=divided)
    count = found["kills"]
    different = [
        part for part in found if part != "kills" and not _same(found[part], expected[part])
    ]
    if different:
        raise Finding(f"after {count} kills the run has another {', '.join(different)}")
    return int(count)


PART = Part("ranks", "kills", case, share=2.0)
