"""The layer databases are counted right, and what is wrong is found."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest
import torch

from dptrain.clipping.bookkeeping import BookkeepingClipper
from scripts.bench import layer_databases
from scripts.bench.layer_databases import Found, NoRows, case_of, examined, outcome, summary

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.followed]


def layer(make, *args: torch.Tensor, dim: int = 0) -> Found:
    return outcome("layers", case_of("a layer", make, args, {}, dim))


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_layers_whose_rows_are_apart_come_out_right() -> None:
    assert layer(lambda: torch.nn.Linear(3, 2), rows(5, 3)).outcome == "right"
    assert layer(lambda: torch.tanh, rows(5)).outcome == "right"
    assert layer(lambda: torch.nn.GRU(3, 2), rows(4, 5, 3), dim=1).outcome == "right"


def test_layers_whose_rows_meet_are_refused() -> None:
    for make in (lambda: torch.nn.BatchNorm1d(3), lambda: lambda x: x.softmax(0)):
        found = layer(make, rows(5, 3))
        assert (found.outcome, found.meet) == ("refused", True)
        assert found.reason


def test_what_has_no_rows_is_left_out() -> None:
    assert layer(lambda: torch.sum, rows(5, 3)).outcome == "left out"
    with pytest.raises(NoRows, match="no rows"):
        case_of("a number", lambda: torch.tanh, (torch.tensor(1.0),), {}, 0)


def test_a_gradient_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = BookkeepingClipper._unit
    monkeypatch.setattr(BookkeepingClipper, "_unit", lambda *given: 1.01 * unit(*given))
    assert layer(lambda: torch.nn.Linear(3, 2), rows(5, 3)).outcome == "wrong"


@pytest.mark.parametrize("right", [True, False])
def test_meeting_rows_that_are_trained_are_found(
    right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may meet in the result and not in the gradients."""
    monkeypatch.setattr(layer_databases, "rows_meet", lambda case: True)
    if not right:
        unit = BookkeepingClipper._unit
        monkeypatch.setattr(BookkeepingClipper, "_unit", lambda *given: 1.01 * unit(*given))
    found = layer(lambda: torch.nn.Linear(3, 2), rows(5, 3))
    assert (found.outcome, found.meet) == ("right" if right else "wrong", True)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize(
    ("database", "only"), [("modules", "norm"), ("operators", "linear"), ("layers", "convolution")]
)
def test_cases_of_every_database(database: str, only: str) -> None:
    found = list(examined(database, 1, only))
    assert any(each.outcome == "right" for each in found)
    assert not [each for each in found if each.outcome == "wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("database", layer_databases.DATABASES)
def test_nothing_of_the_databases_is_wrong(database: str) -> None:
    found = list(examined(database, 1))
    assert not [each for each in found if each.outcome == "wrong"]
    assert sum(each.outcome == "right" for each in found) >= 10


def test_counts_and_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = [
        Found("layers", "one", "right"),
        Found("layers", "two", "refused", "why", meet=True),
        Found("layers", "three", "wrong", "off"),
    ]
    monkeypatch.setattr(layer_databases, "examined", lambda *given: iter(several))
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        sys, "argv", ["layer_databases.py", "--databases", "layers", "--json", str(file)]
    )
    assert layer_databases.main() == 1
    tree = json.loads(file.read_text())
    assert [each["outcome"] for each in tree["cases"]] == ["refused", "wrong"]
    assert tree["tables"]["layer_databases"]["rows"] == [
        {
            "database": "Opacus's kinds of layers",
            **dict.fromkeys(("right", "refused", "wrong", "meet"), 1),
            **dict.fromkeys(("crashed", "left out"), 0),
        }
    ]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "layers: 3 cases"
    assert printed[1:] == summary(several)
    assert "  1 refused, rows meet" in printed
