"""The coverage matrix: which models bookkeeping takes, and how it finds each layer's gradients.

Tiny models of the libraries' own classes (``tests/coverage``) are run with and without clipping,
and compared with one example at a time by plain autograd, as the slow tests do:

    PYTHONPATH=. python scripts/bench/model_coverage.py \\
        --json scripts/bench/results/model_coverage.json

Models of timm and torchvision need both installed; without them the file keeps what it had.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import logging
import pathlib
import platform
import re
import time
import traceback
import warnings
from typing import Any

import torch
from tqdm import tqdm

from tests.helpers.torchvision_schemas import declare_schemas

SCHEMAS = declare_schemas()  # before transformers asks for torchvision

import transformers  # noqa: E402

from scripts import results  # noqa: E402
from tests.coverage.case import Case  # noqa: E402
from tests.coverage.harness import examine  # noqa: E402
from tests.coverage.record import FILE, dtypes, recorded  # noqa: E402
from tests.coverage.zoo import HERE, WITH_TORCHVISION  # noqa: E402

GROUPS = {
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
WAYS, APART = ("operations", "replayed", "frozen"), ("shown", "tested", "refused")
LIBRARIES = ("torch", "transformers", "peft", "timm", "torchvision")


def found(case: Case) -> dict[str, Any]:
    """The row of the matrix for a model.

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
        **shown(first.refusal, first.unfollowed),
    }


def shown(refusal: str | None, unfollowed: str | None) -> dict[str, str | None]:
    """The short reason of a refusal, or how far the examples' separation was followed."""
    if refusal is None:
        return {"why": None, "apart": "shown" if unfollowed is None else "tested"}
    why = refusal.removeprefix("Gradients(mode='bookkeeping'): ")
    return {"why": re.split(r"[;.] |: it mixes", why)[0].replace("|", "\\|"), "apart": ""}


def tables(models: list[dict[str, Any]]) -> dict[str, results.Table]:
    """Counts by group; and of every group a model a row, with its layers' ways to gradients."""
    found, counts = {}, []
    for name, group in GROUPS.items():
        rows = [each for each in models if each["group"] == group]
        ways = [way for way in WAYS if any(way in each["modes"] for each in rows)]
        columns = [
            ("model", "{name}"),
            ("rule", "**refused**: {why}", "{modes.rule}", ""),
            *((way, f"{{modes.{way}}}", "") for way in ways),
            ("apart", "{apart}"),
        ]
        found[f"model_coverage_{name}"] = results.Table(columns, rows)
        by = collections.Counter(each["apart"] or "refused" for each in rows)
        counts.append({"group": group, "models": len(rows), **{kind: by[kind] for kind in APART}})
    head = (("group", "{group}"), ("models", "{models}"))
    columns = [*head, *((kind, f"{{{kind}}}") for kind in APART)]
    return {"model_coverage": results.Table(columns, counts), **found}


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

    before, machine = recorded(), results.read(FILE).get("machine", {})
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
        results.publish(
            options.json,
            tables(models),
            script=__file__,
            machine={"python": platform.python_version(), **machine, **versions()},
            quiet=True,
        )
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
