"""The reference of configurations is complete: every field, with what it means."""

import dataclasses
import pathlib

import pytest
import yaml

from recipes.config import flatten, load_config
from recipes.sweep import SCHEMAS
from scripts.docs import configuration
from scripts.docs.docstrings import described, one_by_one
from scripts.docs.pages import ROOT


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_field_of_a_recipe_has_its_default_and_a_meaning(schema: type) -> None:
    """Defaults as shown are YAML, and a configuration made of them is the default one."""
    fields = list(configuration.run_fields(schema))
    assert [field.name for field in fields if not field.meaning] == []
    shown = {field.name: yaml.safe_load(field.default) for field in fields}
    for name, value in flatten(dataclasses.asdict(schema())).items():
        group = name.partition(".")[0]
        if group in configuration.FAMILIES:
            found = shown[group].get(name.partition(".")[2])
        else:
            found = float(shown[name]) if isinstance(value, float) else shown[name]
        assert found == value, name


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group in configuration.FAMILIES for name in configuration.types(group)],
)
def test_every_field_of_a_type_has_a_meaning(group: str, name: str) -> None:
    fields = configuration.type_fields(group, configuration.types(group)[name])
    assert [field.name for field in fields if not field.meaning] == []


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("group", configuration.FAMILIES)
def test_fields_of_a_type_are_those_that_a_refusal_lists(group: str) -> None:
    """A field that is shown can be stated, and one that is not is refused."""
    for name, member in configuration.types(group).items():
        with pytest.raises(ValueError, match=r"no_such_field") as refused:
            load_config(
                SCHEMAS["individual"],
                None,
                ["steps=2", f"{group}.type={name}", f"{group}.no_such_field=1"],
            ).validate()
        for field in configuration.type_fields(group, member):
            assert field.name in str(refused.value), (name, field.name)


def test_the_page_names_every_file_of_a_configuration() -> None:
    page = configuration.page()
    for path in (ROOT / "configs").rglob("*.yaml"):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{_seen(path)}`")]
        assert len(line) > len(f"| `{_seen(path)}` |  |") + 10


def _seen(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


TEXT = """What it does.

    Args:
        first: one line
            and another.
        second, third: of both,
            see :class:`X`: with a colon.

    Raises:
        ValueError: never.
    """


def test_sections_of_a_docstring() -> None:
    both = "of both, see :class:`X`: with a colon."
    assert described(TEXT) == {"first": "one line and another.", "second": both, "third": both}
    assert described(None) == {}
    assert described("A\n\nArgs:\n    only: this") == {"only": "this"}


def test_arguments_that_share_a_sentence_get_one_each() -> None:
    assert described(one_by_one(TEXT)) == described(TEXT)
    assert "second, third" not in one_by_one(TEXT)
    assert one_by_one("a: b\n\n    c: d\n") == "a: b\n\n    c: d\n"
