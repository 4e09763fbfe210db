"""Changes to docstrings for the API reference while mkdocstrings reads them."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

from scripts.docs import docstrings, references, theorems


class Roles(griffe.Extension):
    """References become links, arguments get an entry each, and an example is code.

    A method that ``takes`` the fields of a value as keywords is shown with these.
    """

    def on_function_instance(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Give a method with ``takes`` the parameters and the docstring that it has at run time."""
        if not any(str(each.value).startswith("takes(") for each in func.decorators):
            return
        _, _, name = func.path.rpartition(f"{func.module.path}.")
        found: Any = importlib.import_module(func.module.path)
        for part in name.split("."):
            found = getattr(found, part)
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    each.name,
                    annotation=None if each.name == "self" else each.annotation,
                    kind=griffe.ParameterKind(each.kind.description),
                    default=None if each.default is each.empty else repr(each.default),
                )
                for each in inspect.signature(found).parameters.values()
            )
        )
        func.docstring = griffe.Docstring(inspect.getdoc(found) or "", parent=func)

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of whatever has been read."""
        if obj.docstring is not None:
            text = docstrings.one_by_one(obj.docstring.value)
            text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = theorems.linked(references.rewritten(text, obj.path))
