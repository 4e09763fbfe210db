"""YAML files with the numbers that people write, and errors of one line; needs PyYAML."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import yaml


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty for an empty file.

    Raises:
        ValueError: if it is not YAML, or no mapping.
        FileNotFoundError: if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no configuration file {path}")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected 'field: value' lines, got {type(tree).__name__}")
    return tree


def one_line(error: yaml.YAMLError) -> str:
    """The fault and its place; PyYAML would draw it over several lines."""
    mark = getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{getattr(error, 'problem', None) or ' '.join(str(error).split())}{where}"


class Loader(yaml.SafeLoader):
    """YAML whose numbers include ``1e-5`` (YAML 1.1 insists on ``1.0e-5``), and no name twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As PyYAML, which would let the last of two equal names win."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is set twice", key.start_mark
                )
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
