"""Packages that only some recipes need, and what to do where they are missing or broken."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch

VISION, TEXT = "vision", "text"  # the extras that bring them


def package(module: str, *, purpose: str = "the text recipe", extra: str = TEXT) -> ModuleType:
    """A module such as ``"datasets"`` or ``"PIL.Image"``.

    Args:
        module: its name.
        purpose: what it is needed for, as the subject of the error's sentence.
        extra: what to install it by, ``VISION`` or ``TEXT``.

    Raises:
        ValueError: if it is not installed or does not load, saying what to do.
    """
    with readable_import_errors(purpose=purpose, extra=extra):
        return importlib.import_module(module)


@contextlib.contextmanager
def readable_import_errors(
    *, purpose: str = "the text recipe", extra: str = TEXT
) -> Iterator[None]:
    """Say what to install where a package is missing, or what broke it.

    transformers loads its parts when they are first used, and with them torchvision where that is
    installed. A torchvision that was built for another torch then fails in the middle of an
    unrelated call, under a message that names neither.

    Args:
        purpose, extra: as in ``package``.

    Raises:
        ValueError: in place of the import's own error.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:
        reasons = [f"{type(e).__name__}: {_first_line(e)}" for e in _chain(error)]
        if any("torchvision" in reason for reason in reasons):
            raise ValueError(
                f"{purpose} needs a package that does not load because the installed torchvision "
                f"does not fit torch {torch.__version__} ({reasons[-1]}): uninstall torchvision, "
                "which is not needed here, or install the release and build made for this torch"
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise ValueError(
            f"{purpose} needs a package that is not installed ({reasons[-1]}): install it with pip "
            f'install -e ".[{extra}]"'
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain
