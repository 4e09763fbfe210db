"""One line of the arXiv snapshot or archive: a paper, or the reason why it is none."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from recipes.data.arxiv_categories import class_of

ROW_FIELDS = ("arxiv_id", "author_text", "categories", "abstract")
"""Columns that a table of the archive must have."""


class BadRecord(ValueError):
    """A line that holds no usable paper; the text is the reason."""


class Paper(NamedTuple):
    """The fields of a paper that the recipe keeps.

    ``authors`` are distinct identities (``author_identity``), ``label`` is a number in
    ``recipes.data.arxiv_categories.CLASSES``.
    """

    id: str
    authors: list[str]
    abstract: str
    label: int


def parse_line(line: bytes) -> Paper:
    """The paper of one line.

    Raises:
        BadRecord: if it is no JSON object, lacks a field, or has one of the wrong form.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"it is not JSON ({error})") from error
    if not isinstance(record, dict):
        raise BadRecord(f"it is a JSON {type(record).__name__}, not an object")
    categories = _text(record, "categories")
    if not categories.split():
        raise BadRecord("its field 'categories' is empty")
    paper = Paper(
        id=_text(record, "id"),
        authors=_authors(_field(record, "authors_parsed")),
        abstract=_text(record, "abstract"),
        label=class_of(categories),
    )
    try:  # JSON can spell halves of surrogate pairs, which no file can hold
        "".join([paper.id, *paper.authors, paper.abstract]).encode()
    except UnicodeEncodeError as error:
        raise BadRecord("it holds half a surrogate pair, which is no text") from error
    return paper


def parse_row(row: Mapping[str, str]) -> Paper:
    """The paper of one row of a table of the archive (``recipes.data.arxiv_archive``).

    Its names are forenames and family name in one text, and suffixes are not given: "A. Smith" and
    "A. Smith Jr" are one author there, which is safe (see ``author_identity``).

    Args:
        row: the fields by the name of their column, ``ROW_FIELDS`` among them.

    Raises:
        BadRecord: if a field is empty, or the authors are not as many as ``num_authors`` says.
    """
    for field in ROW_FIELDS:
        if not row[field].strip():
            raise BadRecord(f"its field {field!r} is empty")
    entries = row["author_text"].split(", ")
    if (stated := row.get("num_authors", "").strip()) and stated != str(len(entries)):
        raise BadRecord(f"its 'author_text' has {len(entries)} names and 'num_authors' is {stated}")
    return Paper(
        id=row["arxiv_id"].strip(),
        authors=_distinct(([entry] for entry in entries), "author_text"),
        abstract=row["abstract"],
        label=class_of(row["categories"].replace(",", " ")),
    )


def author_identity(parts: list[str]) -> str:
    """The user that an entry of ``authors_parsed`` stands for: last name, first name, suffix.

    Compatible Unicode forms, letter case and runs of white space are made alike, and what follows
    the suffix (affiliations) is left out. The guarantee protects identities: two people of one name
    share one protection, which is safe; one person under two names has two, each bounded on its
    own. Hence names are merged where in doubt. "J. Smith" and "John Smith" stay apart, as nothing
    in the snapshot says that they are one.
    """
    cleaned = (unicodedata.normalize("NFKC", part).casefold().split() for part in parts[:3])
    return ", ".join(" ".join(words) for words in cleaned if words)


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise BadRecord(f"it lacks the field {name!r}")
    return record[name]


def _text(record: dict[str, Any], name: str) -> str:
    value = _field(record, name)
    if not isinstance(value, str):
        raise BadRecord(f"its field {name!r} is no text but of type {type(value).__name__}")
    return value


def _authors(entries: Any) -> list[str]:
    if not isinstance(entries, list):
        raise BadRecord(f"its field 'authors_parsed' is no list but {type(entries).__name__}")
    if not entries:
        raise BadRecord("it has no authors: the field 'authors_parsed' is empty")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, list) or not all(isinstance(part, str) for part in entry):
            raise BadRecord(f"author {number} in 'authors_parsed' is no list of texts")
    return _distinct(entries, "authors_parsed")


def _distinct(entries: Iterable[list[str]], field: str) -> list[str]:
    names: dict[str, None] = {}
    for number, entry in enumerate(entries, 1):
        name = author_identity(entry)
        if not name:
            raise BadRecord(f"author {number} in {field!r} has no name")
        names[name] = None
    return list(names)
