"""The argument parser of a command, asked from the command itself."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import runpy
import sys
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock


class _Found(BaseException):
    """Ends a command as soon as it has made its parser; no ``except Exception`` keeps it."""

    def __init__(self, parser: argparse.ArgumentParser, intermixed: bool) -> None:
        self.parser = parser
        self.intermixed = intermixed


@dataclasses.dataclass(frozen=True)
class Command:
    """A parser, and whether options may stand between its positional arguments."""

    parser: argparse.ArgumentParser
    intermixed: bool

    def read(self, words: Sequence[str]) -> argparse.Namespace | None:
        """The result of parsing ``words``; ``None`` if they ask for help or the version.

        Raises:
            ValueError: with its own message, if it refuses them.
        """
        read: Any = self.parser.parse_args
        if self.intermixed:
            read = self.parser.parse_intermixed_args
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                return read(list(words))
        except SystemExit as ended:
            if ended.code:
                raise ValueError(said.getvalue().strip().splitlines()[-1]) from None
            return None


def of_module(name: str) -> Command:
    """The parser of ``python -m name``."""
    return _of(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), name)


def of_script(path: str) -> Command:
    """The parser of ``python path``."""
    return _of(lambda: runpy.run_path(path, run_name="__main__"), path)


def _of(start: Any, name: str) -> Command:
    def found(intermixed: bool) -> Any:
        def instead(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
            raise _Found(self, intermixed)

        return instead

    with contextlib.ExitStack() as stack:
        for method, intermixed in (
            ("parse_known_args", False),
            ("parse_known_intermixed_args", True),
        ):
            patch = mock.patch.object(argparse.ArgumentParser, method, found(intermixed))
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(sys, "argv", [name]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy: it has been imported already
        try:
            start()
        except _Found as ended:
            return Command(ended.parser, ended.intermixed)
    raise ValueError(f"{name} reads its arguments with no argparse.ArgumentParser")
