"""What was found of every model when the matrix was last made, which a page of the site shows."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch

from scripts import results
from tests.coverage.case import Case
from tests.coverage.harness import Outcome

FILE = pathlib.Path(__file__).parents[2] / "scripts/bench/results/model_coverage.json"


def dtypes(case: Case) -> list[torch.dtype]:
    """What a model is run in: float64 comes first, where it can."""
    return [torch.float64, torch.float32] if case.precise else [torch.float32]


@functools.cache
def recorded() -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by group and name; none without a file."""
    _, *groups = results.read(FILE)["tables"].values()
    return {(each["group"], each["name"]): dict(each) for table in groups for each in table.rows}


def assert_as_recorded(case: Case, outcome: Outcome) -> None:
    """That the matrix is not out of date."""
    was = recorded()[case.group, case.name]
    again = "made anew by scripts/bench/model_coverage.py, the matrix would say otherwise"
    assert (outcome.refusal is None) == was["works"], f"{again}: {outcome.refusal or 'it works'}"
    assert outcome.modes == was["modes"], again
    assert (outcome.unfollowed is None) == (was["unfollowed"] is None), again
