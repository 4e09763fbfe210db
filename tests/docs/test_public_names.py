"""Every public name has a docstring of its own, and its place in the reference."""

import importlib
import inspect

import pytest

from scripts.docs import api, faces, references

NAMES = [each for names in faces.rooms().values() for each in names]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("each", NAMES, ids=lambda each: each.path)
def test_a_public_name_says_what_it_is(each: faces.Public) -> None:
    assert faces.first_sentence(each), f"{each.path} (defined as {each.defined}) has no docstring"


@pytest.mark.parametrize("room", faces.rooms())
def test_a_face_says_what_its_room_is_for_and_lists_what_it_has(room: str) -> None:
    module = importlib.import_module(room)
    assert module.__doc__
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize(
    "each",
    [each for each in NAMES if isinstance(each.value, type)],
    ids=lambda each: each.path,
)
def test_public_methods_say_what_they_do(each: faces.Public) -> None:
    """A method that overrides another may leave it to that one, a test to its name."""
    for name, member in vars(each.value).items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith(("_", "test_")):
            inherited = any(name in vars(base) for base in each.value.__mro__[1:])
            assert function.__doc__ or inherited, f"{each.path}.{name}"


def test_every_name_is_described_on_exactly_one_page() -> None:
    text = "\n".join(api.pages().values())
    for each in NAMES:
        home = faces.homes()[each.path]
        assert home.value is each.value
        assert text.count(f"\n::: {home.path}\n") == 1
        assert f"[`{each.name}`][{home.path}]" in text


def test_the_front_door_is_described_in_its_rooms() -> None:
    assert faces.homes()["dptrain.MinSep"].room == "dptrain.sampling"


@pytest.mark.parametrize(
    ("role", "link"),
    [
        (":class:`~dptrain.sampling.MinSep`", "[`MinSep`][dptrain.sampling.MinSep]"),
        (":class:`MinSep`", "[`MinSep`][dptrain.sampling.MinSep]"),
        (
            ":meth:`~dptrain.sampling.MinSep.for_batch_size`",
            "[`for_batch_size`][dptrain.sampling.MinSep.for_batch_size]",
        ),
        (":class:`the scheme <dptrain.MinSep>`", "[`the scheme`][dptrain.sampling.MinSep]"),
        (":func:`~dptrain.nowhere.nothing`", "`nothing`"),
        (":meth:`MinSep._hidden`", "`MinSep._hidden`"),
        ("``MinSep``, ``steps``", "[`MinSep`][dptrain.sampling.MinSep], ``steps``"),
        ("``dptrain.nowhere.nothing``", "`dptrain.nowhere.nothing`"),
    ],
)
def test_references_become_links_to_what_is_public(role: str, link: str) -> None:
    assert references.rewritten(role) == link
