"""The reference of the command line: every command, every option, and what it is for."""

import argparse

import pytest

from scripts.docs import commands, parsers


def _parsers() -> dict[str, argparse.ArgumentParser]:
    found = {}
    for module in commands.modules():
        parser = parsers.of_module(module).parser
        found |= {f"{module} {name}": below for name, below in commands.subcommands(parser).items()}
        found[module] = parser
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return commands.page()


def test_commands_of_the_package_and_the_recipes_are_found() -> None:
    assert {"dptrain account", "dptrain calibrate", "recipes.vision", "recipes.sweep"} <= set(
        _parsers()
    )


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("name", _parsers())
def test_every_command_says_what_it_and_its_options_are_for(name: str, page: str) -> None:
    parser = _parsers()[name]
    assert parser.description
    for action in commands.options(parser):
        assert action.help, f"{name} {action.option_strings or action.dest}: no help"
        for option in action.option_strings:
            assert option in page


def test_options_are_parsed_by_the_commands_own_parsers() -> None:
    dptrain = parsers.of_module("dptrain")
    read = dptrain.read(["account", "--delta", "1e-5", "--sigma", "2"])
    assert read is not None
    assert read.delta == 1e-5
    assert dptrain.read(["--help"]) is None
    with pytest.raises(ValueError, match="no-such-option"):
        dptrain.read(["account", "--no-such-option"])
    recipe = parsers.of_module("recipes.vision").read(["a=1", "--config", "x.yaml", "b=2"])
    assert recipe is not None
    assert recipe.overrides == ["a=1", "b=2"]
    with pytest.raises(ValueError, match="argparse"):
        parsers.of_module("recipes.schedule")
