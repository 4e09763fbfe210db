"""What a built page may hold."""

import pytest

from scripts.docs.pages import loads_from_elsewhere


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/katex.js"></script>',
        "<img alt='' src='http://example.org/a.png'>",
        '<link rel="stylesheet" href="//fonts.example.org/css">',
        '<link href="https://fonts.example.org" rel="preconnect" crossorigin>',
        "@font-face { src: url('https://example.org/a.woff') }",
        '@import "https://example.org/a.css";',
    ],
)
def test_what_another_server_would_see_is_found(text: str) -> None:
    assert loads_from_elsewhere(text)


@pytest.mark.parametrize(
    "text",
    [
        '<a href="https://arxiv.org/abs/2602.09338">a paper</a>',
        '<script src="../assets/bundle.js"></script><link rel="stylesheet" href="a.css">',
        '<link rel="canonical" href="https://example.org/page/">',
        "@font-face { src: url(math.woff) }",
        '<svg xmlns="http://www.w3.org/2000/svg"></svg>',
    ],
)
def test_links_and_own_files_are_no_loads(text: str) -> None:
    assert not loads_from_elsewhere(text)
