"""The individual recipe from its command line, with nothing but its defaults in the file."""

import pytest

from recipes.individual import main


@pytest.fixture(scope="module", name="config")
def empty_config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "empty.yaml"
    path.write_text("")
    return path


def run_individual(config, output, *arguments):
    """Exit status of the recipe in the folder ``output``."""
    return main(["--config", str(config), "--output", str(output), *arguments])
