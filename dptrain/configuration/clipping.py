"""Any clipping style of dptrain from the ``clipping`` group of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from dptrain.clipping.base import ClippingStyle
from dptrain.configuration.typed import members_of, named_type, stated_fields


def build_clipping(settings: Mapping[str, Any]) -> ClippingStyle:
    """The style of class ``settings["type"]`` with the other entries as its arguments.

    Entries that are null are left out, so that they take the class's own default.

    Raises:
        ValueError: naming the field of the configuration, the value, and what is known instead.
    """
    member = named_type("clipping", settings, members_of(ClippingStyle))
    arguments = inspect.signature(member).parameters
    given = stated_fields(
        "clipping",
        settings,
        allowed=list(arguments),
        required=[n for n, a in arguments.items() if a.default is inspect.Parameter.empty],
    )
    try:
        return ClippingStyle.from_dict({"type": member.__name__, **given})
    except (TypeError, ValueError) as error:
        raise ValueError(f"clipping: {error}") from error
