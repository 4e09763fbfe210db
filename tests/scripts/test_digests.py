"""The net under refactoring: digests are those of the values, and no difference is missed."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dptrain.reporting.support_table import representative_strategies, support_table
from scripts import digests


def test_every_difference_is_named() -> None:
    before = {
        "a": {"same": "1", "other": "2", "gone": "3", "moved": "4", "broken": "failed: E: x"},
        "b": {"only": "7"},
    }
    after = {
        "a": {"same": "1", "other": "5", "fresh": "6", "renamed": "4", "broken": "failed: E: x"}
    }
    assert digests.differences(before, after) == [
        "fails    a: broken: failed: E: x",
        "new      a: fresh",
        "missing  a: gone",
        "missing  a: moved (its digest is that of the new 'renamed')",
        "differs  a: other: 2 is now 5",
        "new      a: renamed",
        "missing  b: only",
    ]
    assert digests.differences(after | before, after | before) == [
        "fails    a: broken: failed: E: x"
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.reshape(3, 2),
        lambda x: torch.nextafter(x, torch.tensor(9.0)),
        lambda x: x.numpy(),
        lambda x: x.tolist(),
    ],
)
def test_a_digest_sees_type_shape_and_every_bit(change: Callable[[torch.Tensor], object]) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert digests.digest({"x": x}) == digests.digest({"x": x.clone().t().contiguous().t()})
    assert digests.digest({"x": x}) != digests.digest({"x": change(x)})


def test_zeros_of_both_signs_and_orders_of_sequences_differ() -> None:
    values = [[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0, 1], {"0": 1.0}, {0: 1.0}, np.float64(0.0)]
    assert len({digests.digest(value) for value in values}) == len(values)
    assert digests.digest({"a": 1, "b": 2}) == digests.digest({"b": 2, "a": 1})
    with pytest.raises(TypeError, match="has no digest"):
        digests.digest(object())


def test_a_format_is_its_names_and_types() -> None:
    state = {"steps": 3, "rows": [1.0, 2.0], "private": {"seed": 5}}
    same = {"steps": 4, "rows": [3.0], "private": {"seed": 6}}
    assert digests.fields(state) == digests.fields(same)
    for other in ({**state, "steps": 3.0}, {**state, "rows": (1.0,)}, {**state, "private": {}}):
        assert digests.fields(state) != digests.fields(other)
    assert digests.without(state, "seed", "rows") == {"steps": 3, "private": {}}


def test_a_section_equals_itself_and_a_changed_one_is_reported(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "digests.json"
    assert digests.main(["--only", "batches", "--write", str(file)]) == 0
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert not any(value.startswith(digests.FAILED) for value in kept["batches"].values())
    assert digests.main(["--only", "batches", "--compare", str(file)]) == 0
    capsys.readouterr()

    cases = digests.batch_cases()
    name = "Poisson, seed 1"
    changed = {**cases, name: cases["Poisson, seed 2"]}
    monkeypatch.setitem(digests.SECTIONS, "batches", lambda: changed)
    assert digests.main(["--only", "batches", "--compare", str(file)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"differs  batches: {name}: ")
    assert said[-1].endswith("1 differ, are missing, new or fail")


def test_a_failing_case_is_kept_by_its_error_and_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = functools.partial(int, "seven")
    monkeypatch.setitem(digests.SECTIONS, "batches", lambda: {"bad": bad})
    assert digests.collect(["batches"], progress=False)["batches"]["bad"].startswith(
        f"{digests.FAILED}ValueError: invalid literal"
    )
    assert digests.main(["--only", "batches"]) == 1
    assert "fails    batches: bad" in capsys.readouterr().out


def test_every_answer_of_the_support_table_has_a_case() -> None:
    assert len(representative_strategies()) == 5
    # Cases keep the names that they had before truncation became a field.
    kept = {
        "Poisson, max_batch_size": "TruncatedPoisson",
        "MinSep, max_batch_size": "TruncatedMinSep",
    }
    asked = {
        f"{scheme}, {row.strategy}, {row.adjacency.value}: "
        + digests.case_name(answer.accountant, row.adjacency, scheme)
        for row in support_table()
        for scheme in [kept.get(row.scheme, row.scheme)]
        for answer in row.answers
    }
    assert asked <= digests.epsilon_cases().keys()


def test_what_cannot_be_compared_with_is_said(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert digests.main(["--only", "batches", "--compare", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert digests.main(["--only", "batches", "--against", "no such revision"]) == 2
    assert "--against no such revision: " in capsys.readouterr().err
