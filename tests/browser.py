"""A headless Chromium for tests, driven over W3C WebDriver with the standard library alone.

`find_browser` says what is missing where Chromium and its driver are not installed (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
START_SECONDS = 120  # of a browser on a busy machine
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "ArrowDown": "\ue015", "ArrowUp": "\ue013", "Tab": "\ue004"}
KEYS |= {"Enter": "\ue007", "End": "\ue010", "Home": "\ue011", "Escape": "\ue00c"}


def find_browser() -> tuple[str, str] | None:
    """The programs chromium and chromedriver, or None."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """A browser with one window and an empty profile."""

    def __init__(self, width: int = 1240, height: int = 900) -> None:
        found = find_browser()
        assert found is not None
        browser, driver = found
        self._profile = tempfile.TemporaryDirectory(prefix="shardwise-browser-", ignore_cleanup_errors=True)
        environment = {**os.environ, "HOME": self._profile.name}
        said = Path(self._profile.name) / "driver.log"
        with said.open("w") as out:
            self._driver = subprocess.Popen(
                [driver, "--port=0"], stdout=out, stderr=subprocess.DEVNULL, env=environment
            )
        self._base = f"http://127.0.0.1:{self._find_port(said)}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._session = ""
        self._start(browser)
        self.call("POST", "/window/rect", {"width": width, "height": height})

    def _find_port(self, said: Path) -> int:
        """The free port that the driver has chosen, which it prints."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self._driver.poll() is None:
            found = re.search(r"successfully on port (\d+)", said.read_text())
            if found:
                return int(found[1])
            time.sleep(0.05)
        raise RuntimeError(f"chromedriver does not start: {said.read_text()}")

    def _start(self, browser: str) -> None:
        flags = [*FLAGS, f"--user-data-dir={self._profile.name}/profile"]
        wanted = {
            "goog:chromeOptions": {"binary": browser, "args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "timeouts": {"script": 60000, "pageLoad": 60000},
        }
        answer = self._request("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{answer['sessionId']}"

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._request("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=60)
            self._profile.cleanup()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One command of the session."""
        return self._request(method, self._session + path, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._open(request, timeout=START_SECONDS) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, address: str) -> None:
        """Load a page; what it logs from now on is in `logged`."""
        self.logged()
        self.call("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's `return`."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait_for(self, condition: str, seconds: float = 60) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(f"return {condition}")
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"this did not become true: {condition}")

    def text(self, selector: str) -> str:
        """The text of the first element, as it is in the document."""
        found = self.run("const e = document.querySelector(arguments[0]); return e && e.textContent", selector)
        assert isinstance(found, str), f"nothing matches {selector}"
        return found

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
        )
        return found

    def hover(self, selector: str, x: float, y: float) -> None:
        """Move the pointer to a place of an element, in shares of its width and height."""
        self._point(selector, x, y, [])

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Click at a place of an element."""
        self._point(selector, x, y, [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}])

    def _point(self, selector: str, x: float, y: float, more: Sequence[dict[str, Any]]) -> None:
        script = """const e = document.querySelector(arguments[0]); e.scrollIntoView({block: "center"});
        const b = e.getBoundingClientRect();
        return [b.left + b.width * arguments[1], b.top + b.height * arguments[2]]"""
        left, top = map(round, self.run(script, selector, x, y))
        move = {"type": "pointerMove", "duration": 0, "x": left, "y": top, "origin": "viewport"}
        pointer = {"type": "pointer", "id": "mouse", "actions": [move, *more]}
        self.call("POST", "/actions", {"actions": [pointer]})

    def press(self, *keys: str) -> None:
        """Press keys, one after the other: a character, or a name such as ArrowRight."""
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def fill(self, selector: str, text: str) -> None:
        """Replace the text of a field, as a person who types."""
        self.run("const e = document.querySelector(arguments[0]); e.focus(); e.value = ''", selector)
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def emulate(self, **features: str) -> None:
        """Set media features such as prefers_color_scheme="dark", or media="print"."""
        media = features.pop("media", "")
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.command("Emulation.setEmulatedMedia", media=media, features=listed)

    def command(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": method, "params": parameters})

    def resize(self, width: int, height: int) -> None:
        self.call("POST", "/window/rect", {"width": width, "height": height})

    def logged(self) -> list[str]:
        """Messages on the console since the last call, errors of the policy among them."""
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses that were requested since the last call."""
        found = []
        for entry in self.call("POST", "/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def picture(self, path: Path, height: int | None = None) -> None:
        """Save a picture of the page: as tall as the page, or the first so many pixels."""
        width, tall = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(tall, height or tall), "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
