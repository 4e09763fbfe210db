"""What the probe finds by itself: steps are followed only where a test asks for it."""

import pytest


@pytest.fixture(autouse=True)
def _seldom_followed(request: pytest.FixtureRequest) -> None:
    """Takes the place of what has steps followed in some of the tests."""
    if not request.node.get_closest_marker("followed"):
        request.getfixturevalue("_unfollowed")
