"""The packages of the ``text`` extra, and what to do where they are missing or broken."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType


def text_package(name: str) -> ModuleType:
    """The module ``name`` (``"transformers"``, ``"datasets"``, ``"pyarrow.ipc"``).

    Raises:
        ValueError: if it is not installed or does not load, saying what to do.
    """
    with readable_import_errors():
        return importlib.import_module(name)


@contextlib.contextmanager
def readable_import_errors() -> Iterator[None]:
    """Say what to install where a package is missing, or what broke it.

    transformers loads its parts when they are first used, and with them torchvision where that is
    installed. A torchvision that was built for another torch then fails in the middle of an
    unrelated call, under a message that names neither.

    Raises:
        ValueError: in place of the import's own error.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        reasons = [f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}" for e in _chain(error)]
        if any("torchvision" in reason for reason in reasons):
            raise ValueError(
                "transformers does not load because the installed torchvision does not fit this "
                f"torch ({reasons[-1]}): uninstall torchvision, which the text recipe does not "
                "need, or install the release and build made for this torch"
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise ValueError(
            f"the text recipe needs transformers, datasets and tokenizers ({reasons[-1]}): install "
            'them with pip install -e ".[text]"'
        ) from error


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain
