"""A trainer that torchrun starts on two processes is one private run, and goes on as one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("accelerate")

PROGRAM = """
import json, sys, torch.distributed as dist
from tests.integrations.tiny import Texts, bert, flat, privacy, trainer

folder = sys.argv[1]

def made():
    return trainer(
        folder, bert(0.1), private=privacy(noise_seed=3), more={"eval_dataset": Texts(9, 5)},
        gradient_accumulation_steps=1, save_strategy="steps", save_steps=3,
        eval_strategy="steps", eval_steps=3,
    )

whole = made()
whole.train()
ends = flat(whole.model)
first = ends.clone()
dist.broadcast(first, 0)
goes_on = made()
goes_on.train(resume_from_checkpoint=folder + "/checkpoint-3")
found = {
    "steps": whole.private.steps_executed,
    "expected": whole.plan.scheme.expected_batch_size,
    "alike": bool((ends == first).all()),
    "resumed": bool((flat(goes_on.model) == ends).all()),
}
with open(f"{folder}/rank{dist.get_rank()}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    root = pathlib.Path(__file__).parents[3]
    subprocess.run(
        [*words, str(script), str(tmp_path)],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
    )
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found == {"steps": 6, "expected": 8.0, "alike": True, "resumed": True}
