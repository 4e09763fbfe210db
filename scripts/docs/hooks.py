"""What happens while mkdocs builds the site: generated pages, tables, formulas."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.docs import api, commands, configuration, formulas, pages, tables

_log = logging.getLogger("mkdocs.dptrain")
_PLOTS = "assets/plots"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, and the font of the formulas."""
    made = {
        **api.pages(),
        commands.PAGE: commands.page(),
        configuration.PAGE: configuration.page(),
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    files.append(File.generated(config, "assets/math.woff", content=formulas.font()))
    for plot in tables.figures().values():
        files.append(File.generated(config, f"{_PLOTS}/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Take out what is for the tests, and put in what was measured."""
    up = "../" * page.file.src_uri.count("/")
    try:
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
    return [each for item in items for each in (item, *_with_children(item.children))]
