"""How the site is built from these pages: `make docs`. Nothing is fetched from the network; a warning is an error.

The pages are plain Markdown that reads well on GitHub and in an editor; what Sphinx needs beyond that is added here:
the navigation (`nav.toml`), links out of `docs/`, and examples in docstrings.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "src")]

from shardwise._version import __version__  # noqa: E402
from tools.docs_text import link_outside, quote_code, shorten_signature, toctrees  # noqa: E402

project = "Shardwise"
author = "The Shardwise authors"
copyright = author
version = release = __version__
html_title = f"Shardwise {version}"
html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
copybutton_exclude = ".linenos, .gp, .go"  # what is copied can be pasted: no prompts, no output
exclude_patterns = ["_*"]
pygments_style, pygments_dark_style = "friendly", "monokai"
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # console blocks show output that is in no language
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_use_legacy_class_based = False
autodoc_mock_imports = ["transformers", "accelerate"]  # their classes are only inherited from
add_module_names = False
python_maximum_signature_line_length = 88


def complete_page(app: Any, name: str, source: list[str]) -> None:
    """Add the navigation to the first page, and let links to files outside of `docs/` lead to the repository."""
    path = Path(app.env.doc2path(name))
    if path.suffix == ".md":
        source[0] = link_outside(source[0], path, DOCS)
    if name == "index":
        source[0] += toctrees(tomllib.loads((DOCS / "nav.toml").read_text()))


def complete_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show what docstrings quote as code."""
    lines[:] = quote_code("\n".join(lines)).split("\n")


def complete_signature(app: Any, what: str, name: str, obj: Any, options: Any, text: str, result: str) -> Any:
    """Write the types of a dataclass's fields without their modules."""
    return (shorten_signature(text), result) if text else None


def setup(app: Any) -> None:
    """Connect them."""
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", complete_docstring)
    app.connect("autodoc-process-signature", complete_signature)
