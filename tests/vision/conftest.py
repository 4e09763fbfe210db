"""torchvision loads here, also beside a torch for which its operators were not compiled."""

from __future__ import annotations

import pytest

from tests.helpers.torchvision_schemas import declare_schemas

_SCHEMAS = declare_schemas()


@pytest.fixture
def only_beside_a_broken_torchvision() -> None:
    """Skips where torchvision was compiled for this torch."""
    if _SCHEMAS is None:
        pytest.skip("torchvision loads here")
