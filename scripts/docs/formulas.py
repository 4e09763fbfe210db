"""LaTeX to MathML when the site is built: no script and no other server when it is read."""

from __future__ import annotations

import functools
import html
import importlib.util
import io
import pathlib
import re
from collections.abc import Callable

from fontTools import subset, ttLib
from math_core import LatexError, LatexToMathML

# What pymdownx.arithmatex leaves of a formula with ``generic: true``.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
_IN_TITLE = re.compile(r"\\\((.*?)\\\)", re.DOTALL)


def render(page: str, complain: Callable[[str], None]) -> str:
    """The HTML of a page with its formulas as MathML; ``complain`` hears of those with errors."""
    converter = LatexToMathML(fancy_error=False)

    def convert(latex: str, *, display: bool) -> str:
        text = html.unescape(latex).strip()
        if display and r"\tag" in text and r"\begin{align" not in text:
            text = rf"\begin{{equation}}{text}\end{{equation}}"
        try:
            return converter.convert_with_local_state(text, displaystyle=display)
        except LatexError as error:
            complain(f"formula {text!r}: {str(error).strip()}")
            return f"<code>{html.escape(text)}</code>"

    page = _BLOCK.sub(
        lambda m: f'<div class="formula" tabindex="0">{convert(m[1], display=True)}</div>', page
    )
    return _INLINE.sub(lambda m: convert(m[1], display=False), page)


def plain(title: str) -> str:
    """A title without the marks of a formula, for places where no MathML can be."""
    return _IN_TITLE.sub(lambda m: html.escape(html.unescape(m[1])), title)


@functools.cache
def font() -> bytes:
    """A font for formulas, as WOFF: STIX Two Math (SIL Open Font License), as ziamath brings it.

    Browsers draw roots and tall brackets only with a font that has a MATH table, and not every
    system has one. Characters that no formula uses are left out, which makes a fifth of it.
    """
    package = importlib.util.find_spec("ziamath")  # its fonts, and none of its code
    assert package is not None
    assert package.origin is not None
    source = pathlib.Path(package.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    whole = ttLib.TTFont(source)
    options = subset.Options()
    options.hinting = False
    options.layout_features = ["ssty", "dtls", "flac", "kern"]
    options.drop_tables += ["DSIG"]
    part = subset.Subsetter(options)
    part.populate(unicodes=[number for first, end in _CHARACTERS for number in range(first, end)])
    part.subset(whole)
    whole.flavor = "woff"
    written = io.BytesIO()
    whole.save(written)
    return written.getvalue()


# Latin, Greek, punctuation, letter-like, arrows and operators; italic, bold, script and blackboard.
_CHARACTERS = (
    (0x20, 0x180),
    (0x370, 0x400),
    (0x2000, 0x2400),
    (0x27C0, 0x2B00),
    (0x1D400, 0x1D504),
    (0x1D538, 0x1D56C),
    (0x1D6A4, 0x1D7D0),
)
