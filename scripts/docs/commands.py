"""Every command and its options, asked from their own parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from scripts.docs import parsers
from scripts.docs.pages import ROOT

PAGE = "reference/command-line.md"


def modules() -> list[str]:
    """The commands that ``python -m`` starts: ``dptrain`` first, then modules and the recipes."""
    found = []
    for package in ("dptrain", "recipes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if path.name != "__main__.py" and re.search(r"^if __name__ == ", text, re.MULTILINE):
                found.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return ["dptrain", *found]


def page() -> str:
    """The page of the reference."""
    lines = [
        "# Command line",
        "",
        "Every command has `--help`. The exit status is 0 for success, 1 if a statement is refuted "
        "or not reproduced or a ledger refuses a release, 2 for a mistake in the arguments, and "
        "130 if it was interrupted.",
    ]
    for module in modules():
        name = module if module == "dptrain" else f"python -m {module}"
        lines += _command(parsers.of_module(module).parser, name, level=2)
    return "\n".join(lines) + "\n"


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Parsers of the commands below, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Arguments that may be given, without those for help and for commands below."""
    return [
        action
        for action in parser._actions
        if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        and action.help is not argparse.SUPPRESS
    ]


def _command(parser: argparse.ArgumentParser, name: str, *, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} `{name}` {{ #{re.sub(r'[^a-z]+', '-', name)} }}", "")
    for text in (parser.description, parser.epilog):
        if text and parser.formatter_class in _RAW:
            yield from ("```text", (text % {"prog": name}).strip(), "```", "")
        elif text:
            yield from (_prose(text % {"prog": name}), "")
    below = subcommands(parser)
    if not below:
        yield from ("```text", _usage(parser, name), "```", "")
    if example := getattr(parser, "example", "").strip():
        yield from ("```bash", example, "```", "")
    for title, actions in _groups(parser):
        if title:
            yield from (_prose(title), "")
        yield from ("| argument | default | meaning |", "|---|---|---|")
        yield from (_row(action) for action in actions)
        yield ""
    for each in below:
        yield from _command(below[each], f"{name} {each}", level=level + 1)


_RAW = (argparse.RawDescriptionHelpFormatter, argparse.RawTextHelpFormatter)


def _groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Arguments by group, with what is said of the group; those of no group of ours first."""
    shown = options(parser)
    ours = parser._action_groups[2:]  # the first two are argparse's: by position, and options
    grouped = [action for group in ours for action in group._group_actions]
    found = [("", [action for action in shown if action not in grouped])]
    for group in ours:
        members = [action for action in shown if action in group._group_actions]
        found.append((group.description or group.title or "", members))
    return ((title, actions) for title, actions in found if actions)


def _usage(parser: argparse.ArgumentParser, name: str) -> str:
    formatter = argparse.HelpFormatter(name, width=76)
    groups = parser._mutually_exclusive_groups
    formatter.add_usage(parser.usage, parser._actions, groups, prefix="")
    return formatter.format_help().strip()


def _row(action: argparse.Action) -> str:
    metavar = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs == 0:
        value = ""
    names = ", ".join(action.option_strings)
    shown = f"{names} {value}".strip()
    default = "required" if action.required and action.option_strings else ""
    if action.default not in (None, False, argparse.SUPPRESS, []) and action.nargs != 0:
        default = f"`{action.default}`"
    meaning = _prose((action.help or "") % _words(action))
    return f"| `{shown}` | {default} | {meaning} |"


def _words(action: argparse.Action) -> dict[str, object]:
    return {**vars(action), "prog": ""}


def _prose(text: str) -> str:
    """Text of a help as one line of a page."""
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|").replace("*", "\\*")
