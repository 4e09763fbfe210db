"""The page on the architecture: a drawing of the code as it is, and files that are there."""

from __future__ import annotations

import pathlib
import re
import xml.etree.ElementTree as ET

from scripts.docs import house

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing" / "architecture.md"


def test_every_room_is_on_a_floor_and_drawn() -> None:
    folder = ROOT / "dptrain"
    rooms = {path.parent.name for path in folder.glob("*/__init__.py")}
    rooms |= {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert {room for floor in house.floors() for room in floor} == rooms
    texts = {
        node.text for node in ET.fromstring(house.drawing()).iter() if node.tag.endswith("text")
    }
    assert rooms <= texts


def test_arrows_go_down_and_the_core_has_none_to_what_joins_it() -> None:
    place = {room: row for row, floor in enumerate(house.floors()) for room in floor}
    assert len(house.arrows()) > len(place)
    for above, below in house.arrows():
        assert place[above] < place[below]
        assert above not in house.core() or below in house.core()


def test_lines_of_rooms_add_up() -> None:
    counted = sum(house.lines(house.sources(room)) for floor in house.floors() for room in floor)
    outside = [ROOT / "dptrain" / name for name in ("__init__.py", "__main__.py", "_on_demand.py")]
    whole = house.lines(list((ROOT / "dptrain").rglob("*.py")))
    assert counted + house.lines(outside) == whole


def test_the_page_names_what_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`(dptrain/[\w/.]+)`", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert house.TABLE in text
    assert house.DRAWING in text
