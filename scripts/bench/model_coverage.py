"""The coverage matrix: which models bookkeeping takes, and how it finds each layer's gradients.

Tiny models of the libraries' own classes (``tests/coverage``) are run with and without clipping,
and compared with one example at a time by plain autograd, as the slow tests do:

    PYTHONPATH=. python scripts/bench/model_coverage.py \\
        --json scripts/bench/results/model_coverage.json

Models of timm and torchvision need both installed; without them the file keeps what it had.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import pathlib
import platform
import time
import traceback
import warnings
from typing import Any

import torch
from tqdm import tqdm

from tests.helpers.torchvision_schemas import declare_schemas

SCHEMAS = declare_schemas()  # before transformers asks for torchvision

import transformers  # noqa: E402

from tests.coverage.case import Case  # noqa: E402
from tests.coverage.harness import examine  # noqa: E402
from tests.coverage.record import FILE, dtypes  # noqa: E402
from tests.coverage.zoo import HERE, WITH_TORCHVISION  # noqa: E402

LIBRARIES = ("torch", "transformers", "peft", "timm", "torchvision")


def found(case: Case) -> dict[str, Any]:
    """What the matrix says of a model.

    Raises:
        AssertionError: if a sum or norm is wrong, or two precisions are not alike.
        Exception: that is no refusal.
    """
    outcomes = [examine(case, dtype) for dtype in dtypes(case)]
    first = outcomes[0]
    assert all((each.refusal is None) == (first.refusal is None) for each in outcomes)
    return {
        "group": case.group,
        "name": case.name,
        "works": first.refusal is None,
        "refusal": first.refusal,
        "modes": first.modes,
        "unfollowed": first.unfollowed,
    }


def versions() -> dict[str, str]:
    """Of what models come from, where it is installed."""
    known = [name for name in LIBRARIES if importlib.util.find_spec(name) is not None]
    return {name: importlib.metadata.version(name) for name in known}


def main() -> int:
    """Print a line for every model, write the file; how many were wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models with this in their name or group")
    parser.add_argument("--json", type=pathlib.Path, help="write the file of all models here")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")

    before: dict[tuple[str, str], Any] = {}
    machine: dict[str, str] = {}
    if FILE.exists():
        tree = json.loads(FILE.read_text(encoding="utf-8"))
        before = {(each["group"], each["name"]): each for each in tree["models"]}
        machine = tree["versions"]
    models, wrong = [], 0
    present = set(versions())
    for case in tqdm([*HERE, *WITH_TORCHVISION], disable=None):
        label = f"{case.group}: {case.name}"
        foreign = case in WITH_TORCHVISION and not {"timm", "torchvision"} <= present
        if foreign or options.only.lower() not in label.lower():
            models += [before[case.group, case.name]] if (case.group, case.name) in before else []
            continue
        start = time.perf_counter()
        try:
            models.append(found(case))
            last = models[-1]
            apart = "shown" if last["unfollowed"] is None else f"tested: {last['unfollowed']}"
            said = f"works, {apart}" if last["works"] else f"refused: {last['refusal']}"
        except Exception:
            wrong += 1
            said = f"WRONG\n{traceback.format_exc()}"
        tqdm.write(f"{label} ({time.perf_counter() - start:.1f} s): {said}")
    if options.json is not None:
        tree = {
            "versions": {"python": platform.python_version(), **machine, **versions()},
            "models": models,
        }
        text = json.dumps(tree, indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
