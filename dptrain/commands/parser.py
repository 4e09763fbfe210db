"""Arguments of a command: help ends with an example, and a misspelt word is told the nearest."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

from dptrain.core import did_you_mean

_EXPECTED: dict[Any, str] = {
    int: "whole number, such as 1000",
    float: "number, such as 0.5 or 1e-5",
}
_NUMBER = re.compile(r"-\.?\d")


class CommandParser(argparse.ArgumentParser):
    """An :class:`argparse.ArgumentParser` that looks at the words before it looks for what lacks.

    argparse would answer a misspelt option by another complaint, of an option that is missing now,
    or by one that names neither the nearest option nor the command.

    Args:
        example: command lines that work as they stand, shown at the end of the help. A long one is
            continued as a shell has it.
        fields: what is written ``field=value``, without dashes, beside the options.
        verbatim: keep all words in ``words``, for another parser that knows them better; only help
            is given here.
    """

    def __init__(
        self,
        *args: Any,
        example: str = "",
        fields: Collection[str] = (),
        verbatim: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.example, self.fields, self.verbatim = example, fields, verbatim

    def format_help(self) -> str:
        """The help, and the example as it can be copied."""
        lines = [f"  {line}\n" for line in self.example.strip().splitlines()]
        return super().format_help() + ("\nexample:\n" if lines else "") + "".join(lines)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse does, once every word that looks like an option or a command is one."""
        words = sys.argv[1:] if args is None else list(args)
        if not self.verbatim:
            self._check_words(words)
            return super().parse_known_args(words, namespace)
        if {"-h", "--help"} & set(words):
            self.print_help()
            self.exit()
        return argparse.Namespace(**self._defaults, words=words), []

    def _check_words(self, words: Iterable[str]) -> None:
        options = list(self._option_string_actions)
        (commands,) = [each.choices for each in self._actions if each.nargs == "A..."] or [None]
        takes_value = False  # of the option before
        for word in words:
            if word == "--":
                return
            if takes_value and commands is not None:
                takes_value = False
                continue
            if not word.startswith("-") or word == "-" or _NUMBER.match(word):
                if commands is None:
                    continue
                if word not in commands:
                    hint = did_you_mean(word, commands)
                    self.error(f"unknown command {word!r}: {hint}commands are {_listed(commands)}")
                return  # what follows is the command's
            name = word.partition("=")[0]
            short = not word.startswith("--") and word[:2] in options
            if not short and not any(option.startswith(name) for option in options):
                field = name.lstrip("-").replace("-", "_")
                if field in self.fields:
                    self.error(f"unknown option {name}: write the field as {field}=VALUE")
                self.error(f"unknown option {name}: {did_you_mean(name, options)}see --help")
            action = self._option_string_actions.get(word)
            takes_value = action is not None and action.nargs is None

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if (expected := _EXPECTED.get(action.type)) is None:
                raise
            message = f"{arg_string!r} is no {expected}"
            raise argparse.ArgumentError(action, message) from None

    def error(self, message: str) -> NoReturn:
        """Exit with one line, as for other mistakes: the usage is long, and ``--help`` has it."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(each) for each in action.choices]
            hint = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"{value!r}: {hint}choose one of {_listed(known)}")


def declare(
    commands: Any, name: str, run: Callable[..., Any], *, example: str, **options: Any
) -> CommandParser:
    """Declare a command that a function runs, whose docstring is its help."""
    told = {"help": run.__doc__, "description": run.__doc__}
    parser: CommandParser = commands.add_parser(name, **told, example=example, **options)
    parser.set_defaults(run=run)
    return parser


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
