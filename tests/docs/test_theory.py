"""The index of the theory, its pages, the tests they name and docstrings that cite them agree."""

import ast
import collections
import functools
import re
from pathlib import Path

import pytest

from scripts.docs import theorems
from scripts.docs.pages import ROOT

PAGES = sorted(theorems.FOLDER.glob("*.md"))
INDEX = (theorems.FOLDER / "index.md").read_text(encoding="utf-8")

_ROW = re.compile(
    r"^\| (?P<number>\d+\.\d+) \| \[(?P<name>[^]]+)\]\((?P<page>[\w-]+\.md)#(?P<id>[\w-]+)\) \| "
    r"(?P<users>[^|]+) \|$",
    re.MULTILINE,
)
_TEST = re.compile(r"`(?P<path>(?:tests|dptrain/testing)/[\w/]+\.py)::(?P<name>test_\w+)`")

# What a stranger does not have, and why nothing in the repository may refer to it.
DANGLING = {
    r"(?<![\w.,])00[0-4](?=,| (?:section|Fig|Alg|App|Remark)|'s|\)|:)(?!,\d{3})|\bof 00[0-4]\b": (
        "papers are cited by author, year and theorem, not by our numbers for them"
    ),
    r"\(``(?:notation|mechanisms|samplers|accounting|individual|users|scale)``": (
        "the notes of that name are not in the repository"
    ),
    r"\b[Tt]he spec(?:'s)?\b|\bspec/\w+\.md": "there is no specification to read",
    r"(?<!GitHub )\bissue \d+": "issues of the project's own tracker are not public",
    r"\bdesign\.md\b|\bshared/\w+": "files beside the repository",
    r"Kalinin, McMahan": "the authors of arXiv 2505.12128 are Kalinin, McKenna, Upadhyay & Lampert",
}
PLACES = ("dptrain", "recipes", "scripts", "tests", "docs", "configs", ".github", ".ci")
KINDS = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".cff"}


@functools.cache
def functions(path: Path) -> frozenset[str]:
    """Names of the test functions and methods in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


@functools.cache
def homes() -> dict[str, list[str]]:
    """Where test functions are, by their names."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("dptrain/testing/*.py")]:
        for name in functions(path):
            found[name].append(path.relative_to(ROOT).as_posix())
    return found


@functools.cache
def texts() -> dict[Path, str]:
    """All text that is written by hand."""
    found = [path for path in ROOT.iterdir() if path.suffix in KINDS]
    for place in PLACES:
        found += [
            path for path in (ROOT / place).rglob("*") if path.suffix in KINDS or not path.suffix
        ]
    kept = sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return {path: path.read_text(encoding="utf-8", errors="ignore") for path in kept}


def test_the_index_lists_every_theorem_and_no_other() -> None:
    rows = [row.groups() for row in _ROW.finditer(theorems.insert(INDEX))]
    found = [(t.number, t.name, t.page, t.id, t.users) for t in theorems.theorems()]
    assert sorted(rows) == sorted(found)
    numbers = [tuple(map(int, row[0].split("."))) for row in rows]
    assert numbers == sorted(numbers)


def test_a_list_without_theorems_is_refused() -> None:
    with pytest.raises(ValueError, match="no theorem on a page"):
        theorems.insert("<!-- theorems: nowhere.md -->")


def test_addresses_and_numbers_are_unique() -> None:
    found = theorems.theorems()
    assert all(theorem.id.startswith("thm-") for theorem in found)
    assert len({theorem.id for theorem in found}) == len({t.number for t in found}) == len(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_have_their_numbers(page: Path) -> None:
    by_id = {theorem.id: theorem for theorem in theorems.theorems()}
    text = page.read_text(encoding="utf-8")
    for shown, target, address in re.findall(r"\[([^][]+)\]\(([\w-]+\.md)?#(thm-[\w-]+)\)", text):
        theorem = by_id[address]
        assert theorem.page == (target or page.name), (shown, address)
        number = re.match(r"(?:Theorem\s+)?(\d+\.\d+)$", shown)
        assert number is None or number[1] == theorem.number, (shown, theorem)


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_is_named_exists(page: Path) -> None:
    named = list(_TEST.finditer(page.read_text(encoding="utf-8")))
    for match in named:
        path = ROOT / match["path"]
        there = path.is_file() and match["name"] in functions(path)
        assert there, f"{match[0]} is in {homes().get(match['name'], 'no file')}"
    if page.name != "index.md":
        assert len(named) >= page.read_text(encoding="utf-8").count("{ #thm-")


def test_every_theorem_names_its_tests_its_source_and_its_users_once() -> None:
    for page in PAGES:
        parts = re.split(r"\{ #(thm-[\w-]+) \}", page.read_text(encoding="utf-8"))
        for address, body in zip(parts[1::2], parts[2::2], strict=True):
            body = re.split(r"^#+ ", body, maxsplit=1, flags=re.MULTILINE)[0]
            assert _TEST.search(body), address
            assert body.count("\nSource: ") == body.count("\nUsed by: ") == 1, address


def test_every_proof_is_there_and_comes_to_an_end() -> None:
    for page in PAGES:
        parts = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for part in parts:
            if "{ #thm-" in part and "*Not a theorem.*" not in part:
                assert "*Proof.*" in part or "*What is known" in part, part[:80]
                assert "∎" in part, part[:80]
                assert "\nSource: " in part, part[:80]


def test_references_in_code_and_pages_lead_somewhere() -> None:
    known = {(theorem.page, theorem.id) for theorem in theorems.theorems()}
    known |= {("PAGE.md", "thm-ID")}  # the form itself, where it is explained
    for path, text in texts().items():
        for match in theorems.REFERENCE.finditer(text):
            place = path.relative_to(ROOT)
            assert (match["page"], match["id"]) in known, f"{place}: {match[0]}"


@pytest.mark.slow
def test_every_test_that_a_docstring_names_exists() -> None:
    for path, text in texts().items():
        if path.is_relative_to(ROOT / "dptrain"):
            for name in re.findall(r"``(test_\w+)``", text):
                assert name in homes(), f"{path.relative_to(ROOT)}: {name}"


def test_docstrings_become_links_on_the_site() -> None:
    first = theorems.theorems()[0]
    text = f"Claim (docs/theory/{first.page}#{first.id}; ``test_it``)."
    assert theorems.linked(text) == f"Claim ([Theorem {first.number}][{first.id}]; ``test_it``)."


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("pattern", DANGLING)
def test_nothing_refers_to_what_a_reader_does_not_have(pattern: str) -> None:
    offending = {}
    for path, text in texts().items():
        if path == Path(__file__):
            continue
        place = path.relative_to(ROOT).as_posix()
        if match := re.search(pattern, text):
            line = text[: match.start()].count("\n") + 1
            offending[place] = f"line {line}: {match[0]!r}"
    assert not offending, f"{DANGLING[pattern]}: {offending}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the paper's loss (003, Fig. 2)", True),
        ("003 Fig. 6", True),
        ("(``notation``)", True),
        ("(``accounting``, section 3)", True),
        ("issue 16", True),
        ("the spec's brackets", True),
        ("1,000, 10,003, and .003, or", False),
        ("n = 100,000, b = 1", False),
        ("spec = torch.fx", False),
        ("the special case", False),
        ("(``untouched``)", False),
    ],
)
def test_the_patterns_find_what_they_should(text: str, found: bool) -> None:
    assert any(re.search(pattern, text) for pattern in DANGLING) == found
