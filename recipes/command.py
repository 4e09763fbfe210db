"""The command line of a recipe: its arguments, its errors in one line, its exit status."""

from __future__ import annotations

import argparse
import contextlib
import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dptrain.commands import CommandParser, train
from dptrain.core import in_words
from recipes.config import leaves, load_config
from recipes.report import document, summary
from recipes.run import Run, finish, prepare
from recipes.runfolder import SUMMARY
from recipes.settings import RunSettings
from recipes.task import Task

INTERRUPTED = 130  # what a shell reports after Ctrl-C

S = TypeVar("S", bound=RunSettings)


def run_recipe(
    name: str,
    description: str,
    schema: type[S],
    build_task: Callable[[S], Task],
    example: str,
    argv: Sequence[str] | None = None,
) -> int:
    """The command line of a recipe; returns the exit status."""
    parser = CommandParser(
        prog=f"python -m recipes.{name}",
        description=description,
        example=example,
        fields=leaves(schema),
    )
    train.add_train_arguments(parser)
    arguments = parser.parse_intermixed_args(argv)
    with words_to_stderr(arguments.json):
        status, outcome = _run(schema, build_task, arguments)
    if outcome is not None:
        print(outcome)
    return status


def words_to_stderr(wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Keeps standard output free for one document, where that is wanted."""
    return contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext()


def _run(
    schema: type[S], build_task: Callable[[S], Task], arguments: argparse.Namespace
) -> tuple[int, str | None]:
    """Status of the command, and what it prints if it came to its end."""
    try:
        settings = load_config(schema, arguments.config, list(arguments.overrides))
        if arguments.output is not None:
            settings.output = arguments.output
        if arguments.simulate is not None:
            settings.simulate = arguments.simulate
        current = prepare(
            settings,
            build_task,
            resume=arguments.resume,
            accept_lost_ledger=arguments.accept_lost_ledger,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 2, None
    except KeyboardInterrupt:
        print("stopped before the first step", file=sys.stderr)
        return INTERRUPTED, None
    except Exception as error:
        return _refused(error), None
    try:
        finish(current)
        if current.private.steps_executed < current.private.mechanism.steps:
            return _stopped(current), None
        text = document(current) if arguments.json else summary(current)
        kept = summary(current, published=True)
        (current.folder.path / SUMMARY).write_text(kept + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        return _stopped(current), None
    except OSError as error:  # a full disk, say
        print(
            f"error: {in_words(error)}; when that is mended, continue with the same command and "
            "--resume",
            file=sys.stderr,
        )
        return 2, None
    except Exception as error:
        return _refused(error), None
    return 0, text


def _refused(error: Exception) -> int:
    """The exit status of a refusal, which is told in its own line; anything else is raised."""
    if isinstance(error, torch.OutOfMemoryError):
        print(
            f"error: {str(error).splitlines()[0]} Go on with --resume where there is more memory, "
            "or start anew with a smaller max_physical_batch_size= and overwrite=true",
            file=sys.stderr,
        )
    elif isinstance(error, RuntimeError | ValueError | TypeError) and _raised_on_purpose(error):
        print(f"error: {error}", file=sys.stderr)
    else:
        raise error
    return 2


def _raised_on_purpose(error: Exception) -> bool:
    """True if a ``raise`` of the library or of a recipe made it, rather than a bug or a driver."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals.get("__package__") or ""
    ours = package.partition(".")[0] in ("dptrain", "recipes")
    return ours and linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")


def _stopped(current: Run) -> int:
    print(
        f"stopped after {current.private.steps_executed} of {current.private.mechanism.steps} "
        "steps; continue with the same command and --resume",
        file=sys.stderr,
    )
    return INTERRUPTED
