"""Formulas of the site; needs the extra [docs], with which .ci/run starts it again."""

import io

import pytest

pytest.importorskip("math_core")
ttLib = pytest.importorskip("fontTools.ttLib")
pytest.importorskip("ziamath")

from scripts.docs import formulas  # noqa: E402


def _rendered(page: str) -> tuple[str, list[str]]:
    said: list[str] = []
    return formulas.render(page, said.append), said


def test_a_formula_becomes_mathml() -> None:
    page = r'<p>with <span class="arithmatex">\(\sqrt{a &lt; b}\)</span>.</p>'
    found, said = _rendered(page)
    assert said == []
    assert found.startswith("<p>with <math>")
    assert "<msqrt>" in found
    assert "&lt;" in found
    assert "arithmatex" not in found


def test_a_displayed_formula_scrolls_and_may_have_a_number() -> None:
    page = '<div class="arithmatex">\\[\nx = y \\tag{7}\n\\]</div>'
    found, said = _rendered(page)
    assert said == []
    assert found.startswith('<div class="formula" tabindex="0"><math display="block"')
    assert "(7)" in found


@pytest.mark.parametrize("latex", [r"\nosuchcommand{x}", r"\frac{a}", "{a", r"\left( a"])
def test_what_does_not_parse_is_told_with_its_text(latex: str) -> None:
    found, (said,) = _rendered(rf'<span class="arithmatex">\({latex}\)</span>')
    assert repr(latex) in said
    assert "<math" not in found


def test_titles_keep_the_text_of_a_formula_only() -> None:
    assert formulas.plain(r"Bands \(b &lt; k\)") == "Bands b &lt; k"


def test_the_font_draws_roots_and_greek() -> None:
    font = ttLib.TTFont(io.BytesIO(formulas.font()))
    assert "MATH" in font
    known = font.getBestCmap()
    for character in "√∑∫εσδΦ𝜀𝔼𝒩≤∥⟩":
        assert ord(character) in known, character
    assert len(formulas.font()) < 400_000
