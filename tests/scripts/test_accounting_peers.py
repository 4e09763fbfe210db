"""The comparison with other libraries: who is missing is said, and what is equal agrees."""

import pytest

from scripts.bench import accounting_peers as bench
from scripts.results import cell


def test_a_missing_peer_is_named_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(bench, "PEERS", ("a_library_that_nobody_has",))
    monkeypatch.setitem(bench.PACKAGES, "a_library_that_nobody_has", "its-package")
    assert bench.loaded(None) == {}
    said = capsys.readouterr().out
    assert "a_library_that_nobody_has: not here" in said
    assert "its-package" in said


@pytest.mark.slow
def test_a_peer_that_has_the_same_theorem_agrees(monkeypatch):
    """Poisson sampling by dp_accounting: both discretize upwards, so the ratio of σ is near 1."""
    monkeypatch.setattr(bench, "ENOUGH", 0.0)
    case = next(each for each in bench.cases() if each.name.startswith("Poisson"))
    row = bench.measured(case, {"dp_accounting": bench.loaded(None)["dp_accounting"]})
    assert set(row["said"].values()) == {"not asked"}  # the others
    assert row["dp_accounting"]["epsilon"] == pytest.approx(row["dptrain"]["epsilon"], rel=1e-3)
    assert row["dp_accounting"]["sigma_ratio"] == pytest.approx(1.0, rel=1e-3)


def test_what_nobody_answered_is_an_empty_cell():
    ours = {"epsilon": 1.5, "seconds": 2.0, "kind": "exact", "accountant": "x"}
    peer = {"epsilon": 1.25, "seconds": 0.5, "sigma_ratio": 1.03}
    case = {"title": "m (r)", "said": {"opake": "no answer"}, "most": 1.03, "dptrain": ours}
    cells = [cell({**case, "dp_accounting": peer}, *each[1:]) for each in bench.COLUMNS]
    assert cells == ["m (r)", "1.5000 (2 s)", "1.2500 (500 ms)", "–", "–", "no answer", "1.0300"]
