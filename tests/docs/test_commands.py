"""Every command of a Bash block in the README and in docs/ exists, with its options and files."""

import functools
import re
import shlex
import tomllib
from collections.abc import Sequence

import pytest

from dptrain.configuration import read_yaml
from recipes.config import load_config
from recipes.sweep import SCHEMAS
from scripts.docs import parsers
from scripts.docs.pages import ROOT, blocks, sources

# Commands that are not ours, and whose arguments are not looked at.
OTHERS = {"cd", "export", "git", "python3", "pre-commit", "tensorboard", "uv"}


def commands(code: str) -> list[list[str]]:
    """The words of every command, without comments and settings of the environment."""
    lines = re.sub(r"\\\n", " ", code).splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def check(words: Sequence[str]) -> None:
    """Raise an AssertionError or a ValueError for a command that cannot be run as it stands."""
    program, *rest = words
    program = program.removeprefix(".venv/bin/")
    if program in OTHERS:
        return
    if program == "bash":
        _check_shell_script(*rest)
    elif program == "dptrain" and rest[0] == "train":
        config = rest[rest.index("--config") + 1]
        _check_module(f"recipes.{read_yaml(ROOT / config)['recipe']}", rest[1:])
    elif program == "dptrain":
        _module("dptrain").read(rest)
    elif program == "pip":
        _check_pip(rest)
    elif program == "source":
        assert rest == [".venv/bin/activate"] or (ROOT / rest[0]).is_file(), rest
    elif program == "python" and rest[0] == "-m":
        _check_module(rest[1], rest[2:])
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), f"{rest[0]} is no file"
        parsers.of_script(str(ROOT / rest[0])).read(rest[1:])
    elif program == "torchrun" and "-m" in rest:
        _check_module(rest[rest.index("-m") + 1], rest[rest.index("-m") + 2 :])
    elif program != "torchrun":  # without -m it runs a file of the reader's
        raise AssertionError(f"{program} is no command of ours")


@functools.cache
def _module(name: str) -> parsers.Command:
    return parsers.of_module(name)


def _check_module(name: str, words: Sequence[str]) -> None:
    if name in ("pip", "pytest", "venv"):
        return
    options = _module(name).read(words)
    recipe = name.removeprefix("recipes.")
    if options is not None and recipe in SCHEMAS and name != recipe:
        load_config(SCHEMAS[recipe], ROOT / options.config, list(options.overrides))
    elif options is not None and name == "recipes.sweep":
        assert (ROOT / options.grid).is_file(), f"{options.grid} is no file"


def _check_shell_script(path: str, *rest: str) -> None:
    text = (ROOT / path).read_text()
    started = re.search(r'^exec "\$PYTHON" -m (recipes\.\w+) (.*) "\$@"$', text, re.MULTILINE)
    if started is not None:
        _check_module(started[1], [*shlex.split(started[2]), *rest])
        return
    for before, word in zip(("", *rest), rest, strict=False):
        if before.startswith("-"):  # an option of pytest's, or its value
            continue
        if "/" in word:
            assert (ROOT / word.partition("::")[0]).exists(), f"{word} is no file"
        elif re.fullmatch(r"[a-z]+", word):
            known = rf"= {word} \]|^\s*{word}\)|[|]{word}\)"
            assert re.search(known, text, re.MULTILINE), f"{path} knows no {word}"


def _check_pip(words: Sequence[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for named in re.findall(r"(?:\.|dptrain)\[([\w,-]+)\]", " ".join(words)):
        for extra in named.split(","):
            assert extra in extras["optional-dependencies"], f"no extra {extra}"


def _parameters() -> list:
    return [
        pytest.param(words, id=f"{path.relative_to(ROOT)}: {shlex.join(words)}"[:120])
        for path in sources()
        for block in blocks(path.read_text())
        if block.language == "bash"
        for words in commands(block.code)
    ]


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("words", _parameters())
def test_commands_of_the_pages_exist(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "dptrain acount",
        "dptrain account --sigma 1 --detla 1e-5",
        "python -m recipes.vision --config configs/no_such.yaml",
        "python -m recipes.vision --config configs/digits_vgg_minsep.yaml stesp=3",
        "dptrain train --config configs/no_such.yaml",
        "dptrain train --config configs/digits_vgg_minsep.yaml stesp=3",
        "python -m recipes.no_such",
        "python scripts/no_such.py",
        "python scripts/check_wheel.py --no-such-option",
        "bash scripts/no_such.sh",
        "bash scripts/demo.sh scheme.min_spe=8 privacy.epsilom=2",
        "bash scripts/test.sh tests/no_such",
        "bash scripts/test.sh everything",
        "pip install -e '.[no-such]'",
        "frobnicate",
    ],
)
def test_what_does_not_exist_is_found(line: str) -> None:
    (words,) = commands(line)
    with pytest.raises((AssertionError, ValueError, OSError, ImportError)):
        check(words)


def test_comments_settings_and_continued_lines_are_no_words() -> None:
    code = "# nothing\nOMP_NUM_THREADS=1 bash x.sh a \\\n  b  # said\n\nls 'c d'"
    assert commands(code) == [["bash", "x.sh", "a", "b"], ["ls", "c d"]]
