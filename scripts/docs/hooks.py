"""The hooks of mkdocs while it builds the site: generated pages, tables, formulas."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

from scripts.docs import (
    api,
    commands,
    configuration,
    formulas,
    house,
    pages,
    statement,
    tables,
    theorems,
)

_log = logging.getLogger("mkdocs.dptrain")
_PLOTS = "assets/plots"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and the font of the formulas."""
    made = {
        **api.pages(),
        commands.PAGE: commands.page(),
        configuration.PAGE: configuration.page(),
        statement.PAGE: statement.page(),
        statement.SCHEMA: statement.text(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "assets/math.woff", content=formulas.font()))
    for plot in tables.figures().values():
        files.append(File.generated(config, f"{_PLOTS}/{plot.name}", abs_src_path=str(plot)))
    return files


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Call the packages of the API by their names, in their order."""

    def place(item: Any) -> tuple[bool, bool, str]:
        """Of a section its own page, which comes first; and ``dptrain`` before all others."""
        page = item
        while isinstance(page, Section):
            page = page.children[0]
        path = page.file.src_uri.removesuffix("/index.md").removesuffix(".md")
        alone = isinstance(item, Page) and page.file.src_uri.endswith("/index.md")
        return not alone, not path.endswith("/dptrain"), path

    def settle(section: Section) -> None:
        for child in section.children:
            if isinstance(child, Section):
                settle(child)
                child.title = place(child)[2].rpartition("/")[2]
        section.children.sort(key=place)

    for item in _with_children(nav.items):
        if isinstance(item, Section) and item.title == "API":
            settle(item)
    return nav


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Take out what is for the tests, and put in what was measured."""
    up = "../" * page.file.src_uri.count("/")
    try:
        markdown = theorems.insert(house.insert(markdown))
        return tables.insert(pages.without_comments(markdown), f"{up}{_PLOTS}")
    except ValueError as error:
        _log.warning("%s: %s", page.file.src_uri, error)
        return markdown


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Turn formulas into MathML."""

    def complain(message: str) -> None:
        _log.warning("%s: %s", page.file.src_uri, message)

    for item in _with_children(page.toc):
        item.title = formulas.plain(item.title)
    return formulas.render(html, complain)


def on_post_build(config: MkDocsConfig) -> None:
    """Hold the site to what it promises: everything it shows comes with it."""
    for path in sorted(pathlib.Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and pages.loads_from_elsewhere(path.read_text("utf-8")):
            _log.warning("%s loads something from another server", path)


def _with_children(items: Any) -> list[Any]:
    return [each for item in items or () for each in (item, *_with_children(item.children))]
