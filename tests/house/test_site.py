"""Can people find every page of the site? `make docs` builds it and fails for a broken link; this needs no Sphinx."""

import tomllib
from pathlib import Path

from tools.readme_picture import PATH, draw_svg

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> set[str]:
    """All pages by their path below docs, without the ending; not the first one, which holds the navigation."""
    found = [path for ending in ("md", "rst") for path in DOCS.rglob(f"*.{ending}")]
    return {path.relative_to(DOCS).with_suffix("").as_posix() for path in found} - {"index"}


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for section in tomllib.loads((DOCS / "nav.toml").read_text()).values() for page in section]
    assert len(pages()) > 20
    assert sorted(listed) == sorted(pages())


def test_every_page_starts_with_its_title() -> None:
    for page in DOCS.rglob("*.md"):
        assert page.read_text().startswith("# "), page.name


def test_the_first_page_leads_to_every_other_page() -> None:
    text = (DOCS / "index.md").read_text()
    assert [page for page in sorted(pages()) if "/" not in page and f"({page}.md)" not in text] == []


def test_the_picture_of_the_readme_is_what_its_tool_draws() -> None:
    assert PATH.read_text() == draw_svg()
