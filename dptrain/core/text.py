"""Figures and tables as a terminal shows them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Three digits, in seconds or milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def size(count: float) -> str:
    """Three digits, in bytes, kB, MB, GB or TB of 1000 each."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def aligned(markdown: str, left: int = 1) -> str:
    """A Markdown table as plain columns, the first ``left`` of them aligned to the left."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()
    ]
    del cells[1]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
