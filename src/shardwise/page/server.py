"""Who may see the page? Whoever knows its address: it is served on the loopback interface, under a random token.

Two paths exist: `/TOKEN/` is the page, `/TOKEN/ask` takes a question as JSON and returns new facts. Nothing in a
request names a file: targets are opened from the command line, before the server starts. The Host header must be that
of the loopback interface, so that a foreign site whose name is made to point here gets nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from shardwise.page.document import content_policy, facts_to_json, render_document

LOOPBACK = "127.0.0.1"
LONGEST_QUESTION = 1 << 20
Answer: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


class PageServer(ThreadingHTTPServer):
    """Serves one page and the answers to its questions; `address` is what a person opens."""

    daemon_threads = True

    def __init__(self, facts: dict[str, Any], answer: Answer, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _PageHandler)
        self.token = secrets.token_urlsafe(24)
        self.answer = answer
        self.document = render_document(facts, served=True).encode()
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"


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
        if not length.isdecimal() or int(length) > LONGEST_QUESTION:
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
