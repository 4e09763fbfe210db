"""For all tests."""

import random

import pytest

from dptrain import unfinished


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--shuffle SEED``: tests in a random order, which must not matter."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run tests in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffled, the same way in every worker."""
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def pytest_sessionfinish() -> None:
    """Tests leave many runs unfinished on purpose."""
    unfinished.forget()
