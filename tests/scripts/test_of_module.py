"""The test files of a module are found by its name, and by imports where none bears it."""

import pathlib
import re

import pytest

from tests.helpers.of_module import files_of

_TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_files_that_bear_the_name_come_first() -> None:
    first, *others = files_of("dptrain/losses.py")
    assert first == _TESTS / "test_losses.py"
    text = [file.read_text(encoding="utf-8") for file in others]
    assert others
    assert all("import" in each and "loss" in each for each in text)


@pytest.mark.slow
def test_private_pieces_are_tested_by_who_imports_them() -> None:
    """Owners of views are a rule that is registered, and no test names it."""
    found = files_of("dptrain/clipping/owners/rules/views.py")
    assert any(file.parent == _TESTS / "clipping/owners" for file in found)


@pytest.mark.parametrize("module", ["dptrain/nowhere.py", "dptrain/noise", "tests/conftest.py"])
def test_what_is_no_module_is_refused(module: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(module)}: there is no such module"):
        files_of(module)
