"""Cells of text, as a table of Markdown."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of text."""

    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table with its numbers to the right."""
        numeric = [
            all(re.match(r"(< |−)?[\d.,]*\d|∞|$", row[i]) for row in self.rows)
            for i in range(len(self.head))
        ]
        rule = ["---:" if right else "---" for right in numeric]
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.head, rule, *self.rows])
