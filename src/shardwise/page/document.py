"""How does the page become one file? The scripts are joined, and with the styles and the facts put into index.html.

1. Scripts are modules that import each other by relative paths. Each becomes a function that returns what it exports,
   in an order in which a module comes after those it imports.
2. The facts are JSON in which no character ends a script; names in them reach the page as text only.
3. The policy lets the page run this script and these styles alone, by their hashes, and load nothing from anywhere.
   With a server behind it, the page may ask that server.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import posixpath
import re
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

FRONT = "front"
ENTRANCE = "main.js"
STYLES = ("theme", "page", "pictures", "tables", "media")  # a later one may override an earlier one
_IMPORT = re.compile(r'^import \{\s*([^}]+?),?\s*\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


def read_front_file(path: str) -> str:
    """A file of the front end that is part of the package."""
    return files(__package__).joinpath(FRONT, *path.split("/")).read_text(encoding="utf-8")


def bundle(entrance: str = ENTRANCE, read: Callable[[str], str] = read_front_file) -> str:
    """The script of the page: a module and all that it imports, as one text.

    >>> sources = {"main.js": 'import { f } from "./a.js";\\nf();\\n', "a.js": "export function f() {}\\n"}
    >>> print(bundle("main.js", sources.__getitem__), end="")
    "use strict";
    const module_a = (() => {
    function f() {}
    return { f };
    })();
    const module_main = (() => {
    const { f } = module_a;
    f();
    return {  };
    })();
    """
    seen: set[str] = set()
    parts = ['"use strict";\n']

    def add(path: str) -> None:
        if path in seen:
            return
        seen.add(path)
        source = read(path)
        for match in _IMPORT.finditer(source):
            add(_resolve(path, match[2]))
        parts.append(_wrap(path, source))

    add(entrance)
    return "".join(parts)


def _resolve(path: str, relative: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), relative))


def _variable(path: str) -> str:
    return "module_" + re.sub(r"\W", "_", path.removesuffix(".js"))


def _wrap(path: str, source: str) -> str:
    exported = ", ".join(match[2] for match in _EXPORT.finditer(source))
    body = _IMPORT.sub(lambda m: f"const {{ {m[1]} }} = {_variable(_resolve(path, m[2]))};\n", source)
    body = _EXPORT.sub(lambda m: f"{m[1]} {m[2]}", body)
    return f"const {_variable(path)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


@cache
def _assets() -> tuple[str, str, str]:
    """Template, styles and script, read once."""
    styles = "".join(read_front_file(f"styles/{name}.css") for name in STYLES)
    return read_front_file("index.html"), styles, bundle()


def content_policy(served: bool) -> str:
    """What the page may load and run: its own script and styles, nothing else."""
    _, style, script = _assets()
    style_hash, script_hash = (b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (style, script))
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def render_document(facts: dict[str, Any], *, served: bool = False) -> str:
    """The page with these facts, as one HTML text; `served`: a server answers questions of the page."""
    template, style, script = _assets()
    parts = {
        "title": html.escape(f"{facts['title']} · shardwise"),
        "policy": html.escape(content_policy(served)),
        "style": style,
        "facts": facts_to_json({**facts, "served": served}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def facts_to_json(facts: Any) -> str:
    """Facts as JSON that is safe inside a script element.

    >>> facts_to_json({"name": "</script>\\u2028", "x": float("nan")})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u2028","x":null}'
    """
    text = json.dumps(_drop_nonfinite(facts), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _drop_nonfinite(data: Any) -> Any:
    """The same with null for floats that JSON does not have."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {str(key): _drop_nonfinite(value) for key, value in data.items()}
    return [_drop_nonfinite(value) for value in data] if isinstance(data, list | tuple) else data
