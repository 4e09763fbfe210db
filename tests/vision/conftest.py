"""torchvision loads here, also beside a torch for which its operators were not compiled."""

from __future__ import annotations

from tests.helpers.torchvision_schemas import declare_schemas

_SCHEMAS = declare_schemas()
