"""Every Python block of the README and of docs/ runs as it stands, and prints what it says.

docs/contributing/writing.md describes the comments that change how a block runs.
"""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import multiprocessing
import pathlib
import sys
import textwrap
import traceback
import types
from multiprocessing.connection import Connection

import pytest
import yaml

from scripts.docs.pages import ROOT, Block, blocks, sources, without_comments

LANGUAGES = {"python", "bash", "yaml", "text", "json", "markdown", "toml", "bibtex"}
MOST_NOT_RUN = 5
MOST_WITH_NEEDS = 8
SECONDS = 240  # of a page; the longest are marked slow

# Snippets register layers and schemes, seed generators and set defaults: every page has a process
# of its own, forked from one that has imported torch and dptrain and done nothing else.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "dptrain.engine", "scripts.docs.pages"])


def run_page(text: str, name: str = "page.md") -> str | None:
    """Run a page in a process and the working directory; the traceback if something fails."""
    here, there = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_run, args=(text, name, there), daemon=False)
    process.start()
    there.close()
    try:
        if not here.poll(SECONDS):
            return f"{name} took more than {SECONDS} s"
        return here.recv()
    except EOFError:
        process.join()
        return f"{name} ended its process with status {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _run(text: str, name: str, answer: Connection) -> None:
    page = types.ModuleType("__main__")
    sys.modules["__main__"] = page
    output = ""
    try:
        for block in blocks(text):
            try:
                output = _run_block(block, name, page, output)
            except BaseException as error:
                shown = "".join(traceback.format_exception(error))
                answer.send(f"{name}, block at line {block.line}:\n{shown}")
                return
        answer.send(None)
    finally:
        answer.close()


def _run_block(block: Block, name: str, page: types.ModuleType, output: str) -> str:
    """Run one block; what it printed, or for another language what was printed before."""
    if block.marked("prints") is not None:
        same = doctest.OutputChecker().check_output(
            block.code + "\n", output, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        assert same, f"the page says\n{block.code}\nand what was printed is\n{output}"
    if block.language != "python":
        return output
    source = "\n" * (block.line - 1) + block.code  # so that a traceback has the page's lines
    code = compile(source, name, "exec", dont_inherit=True)
    if block.marked("not") is not None:
        imports = [each for each in ast.walk(ast.parse(source)) if _imports_ours(each)]
        tree = ast.Module(imports, type_ignores=[])
        exec(compile(tree, name, "exec"), {})
        return ""
    need = block.marked("needs")
    if need is not None and not _here(need):
        return ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        expected = block.marked("raises")
        if expected is None:
            exec(code, vars(page))
        else:
            try:
                exec(code, vars(page))
            except Exception as error:
                if expected not in [each.__name__ for each in type(error).__mro__]:
                    raise
                print(f"{type(error).__name__}: {error}")
            else:
                raise AssertionError(f"nothing is raised, and the page says {expected}")
    return printed.getvalue()


def _imports_ours(statement: ast.AST) -> bool:
    if isinstance(statement, ast.ImportFrom):
        return str(statement.module).split(".")[0] == "dptrain"
    names = statement.names if isinstance(statement, ast.Import) else []
    return any(each.name.split(".")[0] == "dptrain" for each in names)


def _here(need: str) -> bool:
    if need == "cuda":
        return importlib.import_module("torch").cuda.is_available()
    return importlib.util.find_spec(need) is not None


def _parameters() -> list:
    """Pages with Python blocks; slow ones marked."""
    found = []
    for path in sources():
        python = [each for each in blocks(path.read_text()) if each.language == "python"]
        slow = any(each.marked("slow") is not None for each in python)
        if python:
            name = str(path.relative_to(ROOT))
            found.append(pytest.param(name, marks=[pytest.mark.slow] if slow else [], id=name))
    return found


@pytest.mark.sample(every=9)
@pytest.mark.parametrize("name", _parameters())
def test_snippets_of_a_page_run(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / name
    if failure := run_page(path.read_text(), str(path)):
        pytest.fail(failure, pytrace=False)


def test_few_snippets_are_left_out() -> None:
    everything = [each for path in sources() for each in blocks(path.read_text())]
    left_out = [each for each in everything if each.marked("not") is not None]
    conditional = [each for each in everything if each.marked("needs") is not None]
    assert len(left_out) <= MOST_NOT_RUN
    assert len(conditional) <= MOST_WITH_NEEDS


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_name_a_language_that_is_checked(path: pathlib.Path) -> None:
    for block in blocks(path.read_text()):
        assert block.language in LANGUAGES, f"line {block.line - 1}: {block.language or 'none'}"
        if block.language == "yaml":
            assert yaml.safe_load(block.code) is not None


# The runner itself: what it would miss, no page would be held to.


def _page(text: str) -> str:
    return textwrap.dedent(text).replace("''''", "````").replace("'''", "```")


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("'''python\nx = 1 / 0\n'''", "ZeroDivisionError"),
        ("'''python\nx = (\n'''", "SyntaxError"),
        ("text\n\n'''python\nmodel\n'''", "line 4"),
        ("<!-- snippet: raises KeyError -->\n'''python\n1 / 0\n'''", "ZeroDivisionError"),
        ("<!-- snippet: raises KeyError -->\n'''python\n1 / 1\n'''", "nothing is raised"),
        ("'''python\nprint(1)\n'''\n\n<!-- snippet: prints -->\n'''text\n2\n'''", "printed is"),
        ("<!-- snippet: not run: x -->\n'''python\nfrom dptrain import No\n'''", "ImportError"),
        ("'''python\nraise SystemExit(0)\n'''", "SystemExit"),
        ("'''python\nimport os; os._exit(3)\n'''", "status 3"),
        ("<!-- snippet: setup\nassert False\n-->", "AssertionError"),
        ("- a list\n\n    '''python\n    assert False\n    '''", "AssertionError"),
    ],
)
def test_what_is_wrong_is_found(page: str, reason: str) -> None:
    assert reason in (run_page(_page(page)) or "")


def test_what_is_right_runs_in_order_and_in_one_namespace() -> None:
    page = """
        <!-- snippet: setup
        import dataclasses
        x = 3
        -->

        '''python
        @dataclasses.dataclass
        class Point:
            y: "int"

        print(Point(x))
        '''

        <!-- snippet: prints -->
        '''text
        Point(...3)
        '''

        <!-- snippet: needs no_such_module -->
        '''python
        import no_such_module
        '''

        <!-- snippet: not run: it would delete something -->
        '''python
        from dptrain import PrivacyEngine
        1 / 0
        '''

        <!-- snippet: raises LookupError -->
        '''python
        {}[Point]
        '''

        ''''markdown
        '''python
        not python
        '''
        ''''
        """
    assert run_page(_page(page)) is None


@pytest.mark.parametrize(
    "page",
    [
        "<!-- snippet: slwo -->\n```python\n```",
        "<!-- snippet: not run -->\n```python\n```",
        "<!-- snippet: slow -->\nno block",
        "```python\nx = 1",
        "<!-- snippet: setup\nx = 1",
    ],
)
def test_what_cannot_be_meant_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match=r"^line [12]: "):
        blocks(page)


def test_comments_are_taken_out_but_for_those_in_a_block() -> None:
    shown = "a\n\n````markdown\n<!-- snippet: slow -->\n````\n"
    text = f"<!-- snippet: setup\nx = 1\n-->\n{shown}<!-- snippet: prints -->\n```text\n1\n```\n"
    assert without_comments(text) == f"{shown}```text\n1\n```\n"
