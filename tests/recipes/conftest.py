"""Fixtures of several recipe tests."""

import pytest


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A configuration file without a field: all comes from the command line."""
    path = tmp_path_factory.mktemp("config") / "empty.yaml"
    path.write_text("")
    return path
