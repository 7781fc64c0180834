"""How does a text of the project become one of the site? What `docs/conf.py` adds to pages and docstrings, as text.

A page says `[the demo](../examples/demo.py)`, which is right on GitHub and in an editor; the site has no such file.
A docstring quotes code as `x`, which is right in Markdown; the site's docstrings are reStructuredText.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = "https://github.com/shardwise/shardwise/blob/main/"
_LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def link_outside(text: str, page: Path, docs: Path) -> str:
    """The text of a page with links to files outside of `docs` as links to the repository.

    >>> root = Path(__file__).parents[1]
    >>> link_outside("[a](../README.md#top) [b](design.md)", root / "docs" / "index.md", root / "docs")
    '[a](https://github.com/shardwise/shardwise/blob/main/README.md#top) [b](design.md)'
    """

    def replace(match: re.Match[str]) -> str:
        target, root = (page.parent / match["path"]).resolve(), docs.resolve()
        if target.is_relative_to(root) or not target.exists():
            return match[0]
        return f"]({REPOSITORY}{target.relative_to(root.parent).as_posix()}{match['anchor'] or ''})"

    return _LINK.sub(replace, text)


def toctrees(sections: Mapping[str, Sequence[str]]) -> str:
    """The navigation as Sphinx wants it on the first page.

    >>> print(toctrees({"Start": ["tutorial"]}).replace("`", "'"))
    <BLANKLINE>
    '''{toctree}
    :hidden:
    :caption: Start
    tutorial
    '''
    <BLANKLINE>
    """
    blocks = ["\n".join(["```{toctree}", ":hidden:", f":caption: {s}", *pages, "```"]) for s, pages in sections.items()]
    return "\n" + "\n\n".join(blocks) + "\n"


def shorten_signature(text: str) -> str:
    """A signature without the modules of its types, torch's excepted; a default made for each call is three dots.

    >>> shorten_signature("(x: ~shardwise.geometry.mesh.Mesh, y: ~torch.layout, z: ~typing.Any = <factory>)")
    '(x: Mesh, y: torch.layout, z: Any = ...)'
    """
    return re.sub(r"~(?!torch)(?:\w+\.)*(\w+)", r"\1", text).replace("~", "").replace("<factory>", "...")


def quote_code(docstring: str) -> str:
    """A docstring in which what stands in single backticks is code.

    >>> print(quote_code("Pass `x`.").replace("`", "'"))
    Pass ''x''.
    """
    return _QUOTED.sub(r"``\1``", docstring)
