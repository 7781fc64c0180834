"""How does the page become one file? The scripts are joined, and with the styles and the facts put into index.html.

1. Scripts are modules that import each other by relative paths. Each becomes a function that returns what it exports,
   in an order in which a module comes after those it imports.
2. The facts are JSON in which no character ends a script; names in them reach the page as text only.
3. The policy lets the page run this script and these styles alone, by their hashes, and load nothing from anywhere.
   With a server behind it, the page may ask that server.

Who may see the page? Whoever knows its address: it is served on the loopback interface, under a random token.

Two paths exist: `/TOKEN/` is the page, `/TOKEN/ask` takes a question as JSON and returns new facts. Nothing in a
request names a file: targets are opened from the command line, before the server starts. The Host header must be that
of the loopback interface, so that a foreign site whose name is made to point here gets nothing.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import posixpath
import re
import secrets
import sys
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

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


LOOPBACK = "127.0.0.1"
LONGEST_QUESTION = 1 << 20
_MOST_DIGITS = 20
Answer: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


class PageServer(ThreadingHTTPServer):
    """Serves one page and the answers to its questions; `address` is what a person opens."""

    daemon_threads = True

    def __init__(self, facts: dict[str, Any], answer: Answer, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _PageHandler)
        self.token = secrets.token_urlsafe(24)
        self.answer = answer
        self.document = render_document(facts, served=True).encode(errors="replace")
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away, or is slow, is not an error of this program."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"


@contextmanager
def write_link(address: str) -> Iterator[str]:
    """The URL of a file that leads to an address, inside a `with` block.

    Only this user can read the file. What a browser is started with, every user can: there the address has no place.
    """
    handle, name = tempfile.mkstemp(prefix="shardwise-", suffix=".html")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(read_front_file("open.html").format(address=html.escape(address)))
        yield Path(name).as_uri()
    finally:
        Path(name).unlink(missing_ok=True)


class _PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "shardwise"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        if self._may_ask("/"):
            self._send(HTTPStatus.OK, self.server.document, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        if not self._may_ask("/ask"):
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > _MOST_DIGITS or int(length) > LONGEST_QUESTION:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        elif self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        else:
            self._answer(self.rfile.read(int(length)))

    def _may_ask(self, path: str) -> bool:
        """Whether the request is for this page at this path, from the page itself or a person's address bar."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        if not {host, origin.removeprefix("http://")} <= self.server.hosts:
            self._refuse(HTTPStatus.FORBIDDEN)
        elif not secrets.compare_digest(self.path.encode(), f"/{self.server.token}{path}".encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            return True
        return False

    def _answer(self, body: bytes) -> None:
        try:
            question = json.loads(body)
            if not isinstance(question, dict):
                raise ValueError("a question is a JSON object")
            answer = self.server.answer(question)
        except Exception as error:  # of any kind: a person typed it, and the page must say what is wrong
            answer = {"error": str(error) or type(error).__name__}
        self._send(HTTPStatus.OK, facts_to_json(answer).encode(), "application/json")

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True
        self._send(status, status.phrase.encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{content_policy(served=True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the address has the token in it."""
