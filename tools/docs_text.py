"""How does a text of the project become one of the site? What `docs/conf.py` adds to pages and docstrings, as text.

A page says `[the demo](../examples/demo.py)`, which is right on GitHub and in an editor; the site has no such file.
A docstring quotes code as `x`, which is right in Markdown; the site's docstrings are reStructuredText.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
_LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def link_outside(text: str, page: Path, docs: Path) -> str:
    """The text of a page with links to files outside of `docs` as links to the repository.

    >>> root = Path(__file__).parents[1]
    >>> link_outside("[a](../README.md#top) [b](design.md)", root / "docs" / "index.md", root / "docs")
    '[a](https://.../blob/main/README.md#top) [b](design.md)'
    """

    def replace(match: re.Match[str]) -> str:
        target, root = (page.parent / match["path"]).resolve(), docs.resolve()
        if target.is_relative_to(root) or not target.exists():
            return match[0]
        return f"]({HOME}/blob/main/{target.relative_to(root.parent).as_posix()}{match['anchor'] or ''})"

    return _LINK.sub(replace, text)


def link_absolute(text: str) -> str:
    """The text of the README with links and pictures that work outside of the repository.

    >>> link_absolute("[a](docs/gpus.md#b) ![c](docs/d.svg) [e](https://pytorch.org) [f](#g)").replace(HOME, "HOME")
    '[a](HOME/blob/main/docs/gpus.md#b) ![c](HOME/raw/main/docs/d.svg) [e](https://pytorch.org) [f](#g)'
    """

    def replace(match: re.Match[str]) -> str:
        picture, label, target = match.groups()
        return f"{picture}[{label}]({HOME}/{'raw' if picture else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", replace, text)


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
