"""All runs of these tests are followed as a user's are."""

import pytest


@pytest.fixture(autouse=True)
def _seldom_followed() -> None:
    """Takes the place of what leaves most tests' runs unfollowed."""
