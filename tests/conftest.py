"""For all tests."""

from dptrain import unfinished


def pytest_sessionfinish() -> None:
    """Tests leave many runs unfinished on purpose."""
    unfinished.forget()
