"""For all tests."""

import collections
import os
import pathlib
import random
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

# Inductor keeps what it compiled, and takes it up again for other vector instructions too, where it
# computes nonsense. So every setting of those has a cache of its own (docs/contributing/index.md).
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
_SETTING = "-".join(os.environ.get(name, "any").lower() for name in _INSTRUCTIONS)
_CACHE = pathlib.Path(tempfile.gettempdir()) / f"dptrain-inductor-{os.getuid()}-{_SETTING}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE))  # which torch sets where it is not

from dptrain import testing  # noqa: E402
from dptrain.clipping.owners import OwnerWatch, watch  # noqa: E402
from dptrain.engine import unfinished  # noqa: E402
from dptrain.reporting import report  # noqa: E402
from tests.helpers.engine import MODES  # noqa: E402
from tests.helpers.json_schema import errors  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--shuffle SEED``: tests in a random order, which must not matter; ``--share K/N``."""
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run tests in a random order")
    parser.addoption("--share", metavar="K/N", help="of the slow tests, run the K-th of N shares")


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Samples and shares are taken; shuffled, the same way in every worker."""
    _sample(items)
    _sample_members(items)
    share = config.getoption("--share")
    if share is not None:
        _share(config, items, share)
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def _sample(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``sample``, all cases but the first, and every so many, are slow."""
    seen: collections.Counter[tuple[object, ...]] = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and isinstance(item, pytest.Function):
            test = (item.parent, item.originalname)
            if seen[test] % mark.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


_DEAR = (  # of what every accountant and every stream of noise is held to
    "test_calibration_meets_its_target_tightly",
    "test_profile_falls_and_stays_in_range",
    "test_covers_its_mechanism",
    "test_more_noise_is_more_private",
    "test_warns_of_a_useless_delta",
    "test_smaller_delta_costs_epsilon",
    "test_as_many_other_shards_go_on",
    "test_shards_add_up",
)


def _sample_members(items: list[pytest.Item]) -> None:
    """Every member of a family keeps one or two of its dear tests, by its name; others are slow."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.originalname not in _DEAR:
            continue
        if item.function.__module__.startswith(f"{testing.__name__}."):
            number = zlib.crc32(item.nodeid.split("::")[-2].encode())
            if (number + _DEAR.index(item.originalname)) % 6:
                item.add_marker(pytest.mark.slow)


def _share(config: pytest.Config, items: list[pytest.Item], share: str) -> None:
    """Slow tests of other shares are left out; by name, so that a new test moves no other one."""
    part, shares = (int(number) for number in share.split("/"))
    if not 0 <= part < shares:
        raise pytest.UsageError(f"--share {share}: K/N needs 0 <= K < N")
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        kept[not slow or zlib.crc32(item.nodeid.encode()) % shares == part].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


def pytest_sessionfinish() -> None:
    """Tests leave many runs unfinished on purpose."""
    unfinished.forget()


@pytest.fixture(autouse=True, scope="session")
def every_statement_fulfils_its_schema() -> Iterator[None]:
    """Whichever test writes one."""
    written, schema = report.statement, report.schema()

    def checked(*args: Any, **kwargs: Any) -> dict[str, Any]:
        value = written(*args, **kwargs)
        assert list(errors(value, schema)) == []
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "statement", checked)
        yield


@pytest.fixture(autouse=True)
def _left_by_none() -> Iterator[None]:
    """A run that a test leaves half-way is not followed through the next test."""
    yield
    left = watch._running.watch and watch._running.watch()
    if left is not None:
        left.drop()


@pytest.fixture
def _unfollowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is followed: code runs as it was compiled, and numbers alone show what mixes."""
    monkeypatch.setattr(OwnerWatch, "_chosen", lambda *_: False)
    monkeypatch.setattr(OwnerWatch, "_look", lambda *_: None)


@pytest.fixture(autouse=True)
def _seldom_followed(request: pytest.FixtureRequest) -> None:
    """Steps are followed in a quarter of the tests, by their names, and where these ask for it.

    A first step that is followed takes longer than all others of a test's short run.
    """
    chosen = zlib.crc32(request.node.nodeid.encode()) % 4 == 0
    if not (chosen or request.node.get_closest_marker("followed")):
        request.getfixturevalue("_unfollowed")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Every way to per-example gradients."""
    value: str = request.param
    return value
