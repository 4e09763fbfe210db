"""Any strategy of dptrain from the ``strategy`` group of a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dptrain.configuration.typed import named_type, stated_fields
from dptrain.strategies import Strategy, strategy_types


def build_strategy(settings: Mapping[str, Any]) -> Strategy:
    """The strategy of class ``settings["type"]`` with the other entries as its fields.

    Entries that are null are left out, so that they take the class's own default.

    Raises:
        ValueError: naming the field of the configuration, the value, and what is known instead.
    """
    member: Any = named_type("strategy", settings, strategy_types())
    fields = [field for field in dataclasses.fields(member) if field.init]
    given = stated_fields(
        "strategy",
        settings,
        allowed=[field.name for field in fields],
        required=[
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ],
    )
    try:
        return Strategy.from_dict({"type": member.__name__, **given})
    except (TypeError, ValueError) as error:
        raise ValueError(f"strategy: {error}") from error
