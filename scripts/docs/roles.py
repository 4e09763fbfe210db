"""What the API reference makes of docstrings while mkdocstrings reads them."""

from __future__ import annotations

import re
from typing import Any

import griffe

from scripts.docs import docstrings, references, theorems


class Roles(griffe.Extension):
    """References become links, arguments get an entry each, and an example is code."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever has been read."""
        if obj.docstring is not None:
            text = docstrings.one_by_one(obj.docstring.value)
            text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = theorems.linked(references.rewritten(text, obj.path))
