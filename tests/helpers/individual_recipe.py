"""The individual recipe from its command line, with nothing but its defaults in the file."""

from recipes.individual import main


def run_individual(config, output, *arguments):
    """Exit status of the recipe in the folder ``output``."""
    return main(["--config", str(config), "--output", str(output), *arguments])
