"""What tests of commands share."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def written(tmp_path):
    """From a name and a value to the path of a JSON file, or of a text as it is."""

    def write(name, value):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write
