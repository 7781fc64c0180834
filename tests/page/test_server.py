"""Does the server of the page answer its own page, and nothing and nobody else?"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from shardwise.cli import view
from shardwise.cli.view import LayoutTarget
from shardwise.page.document import LONGEST_QUESTION, PageServer

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    target = LayoutTarget("f32[8,6] on tp=2: S(0)")
    with PageServer(target.facts(), target.answer) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def request(
    server: PageServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer; names of headers have _ for -."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def ask(server: PageServer, question: Any) -> Any:
    body = question if isinstance(question, bytes) else json.dumps(question).encode()
    status, answer, _ = request(server, "POST", f"/{server.token}/ask", body, Content_Type="application/json")
    assert status == 200
    return json.loads(answer)


def test_the_page_is_at_its_address_and_may_load_nothing(server: PageServer) -> None:
    assert server.address == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 32
    status, body, headers = request(server, "GET", f"/{server.token}/")
    assert status == 200 and body.startswith(b"<!doctype html>")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/TOKEN",
        "/TOKEN/ask",
        "/TOKEN/etc/passwd",
        "/TOKEN/../../etc/passwd",
        "/TOKEN/?file=/etc/passwd",
        "/wrong/",
    ],
)
def test_no_other_path_exists(server: PageServer, path: str) -> None:
    status, body, _ = request(server, "GET", path.replace("TOKEN", server.token))
    assert (status, body) == (404, b"Not Found")


def test_another_host_or_origin_is_refused(server: PageServer) -> None:
    path = f"/{server.token}/"
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
        assert request(server, "GET", path, Host=host)[0] == 403
    assert request(server, "GET", path, Host=f"localhost:{server.server_port}")[0] == 200
    assert request(server, "GET", path, Origin="http://evil.example")[0] == 403
    assert request(server, "GET", path, Origin="null")[0] == 403
    assert request(server, "GET", path, Origin=f"http://127.0.0.1:{server.server_port}")[0] == 200


def test_questions_are_answered_by_the_target(server: PageServer) -> None:
    assert ask(server, {"notation": "f32[8] on tp=4: S(0)"})["ranks"]["count"] == 4
    assert "a dim from -2 to 1" in ask(server, {"notation": "f32[8,6] on tp=2: S(2)"})["error"]
    assert ask(server, {"notation": "f32[8]", "ranks_per_host": "many"})["error"]


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff", b"null"])
def test_questions_that_are_not_objects_are_errors(server: PageServer, body: bytes) -> None:
    assert ask(server, body)["error"]


def test_forms_of_other_sites_and_long_questions_are_refused(server: PageServer) -> None:
    path = f"/{server.token}/ask"
    assert request(server, "POST", path, b"{}", Content_Type="text/plain")[0] == 415
    assert request(server, "POST", path, Content_Length=str(LONGEST_QUESTION + 1), **_json())[0] == 413
    assert request(server, "POST", path, Content_Length="-1", **_json())[0] == 413
    assert request(server, "PUT", path, b"{}", **_json())[0] == 501


def _json() -> dict[str, str]:
    return {"Content_Type": "application/json"}


def test_a_question_cannot_name_a_file(server: PageServer) -> None:
    for text in ("/etc/passwd", "file:///etc/passwd", "../../etc/passwd"):
        assert "error" in ask(server, {"notation": text})


def test_the_command_serves_until_ctrl_c() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # it may be ignored here
    code += "from shardwise.cli.main import app; app()"
    command = [sys.executable, "-c", code, "view", "f32[8] on tp=2: S(0)", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("serving http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_the_address_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments of processes can be read by every user: a browser gets a file that only this one can read."""
    found: list[tuple[str, int, str, str]] = []

    def open_browser(url: str) -> None:
        file = Path(unquote(urlsplit(url).path))
        found.append((url, file.stat().st_mode & 0o777, file.read_text(), str(file)))

    monkeypatch.setattr(webbrowser, "open", open_browser)
    monkeypatch.setattr(PageServer, "serve_forever", lambda self: found.append((self.token, 0, self.address, "")))
    target = LayoutTarget("f32[8] on tp=2: S(0)")
    view.serve(target.facts(), target, 0, open_browser=True)
    (url, mode, text, file), (token, _, address, _) = found
    assert url.startswith("file:///") and token not in url and mode == 0o600
    assert f'content="0; url={address}"' in text and not Path(file).exists()


def test_absurd_lengths_and_browsers_that_go_away_are_no_tracebacks(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for length in ("9" * 5000, "-1", "1e3", "\u0663", ""):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
            host = f"127.0.0.1:{server.server_port}"
            head = f"POST /{server.token}/ask HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
            connection.sendall(head.encode())
            assert connection.makefile("rb").readline().split()[1] == b"413", length[:20]
    for error in (BrokenPipeError(), ConnectionResetError(), TimeoutError()):
        try:
            raise error
        except OSError:
            server.handle_error(None, ("127.0.0.1", 1))
    assert "Traceback" not in capfd.readouterr().err
    try:
        raise ValueError("a mistake of ours")
    except ValueError:
        server.handle_error(None, ("127.0.0.1", 1))
    assert "a mistake of ours" in capfd.readouterr().err
