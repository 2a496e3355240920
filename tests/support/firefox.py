"""Firefox, driven over WebDriver BiDi (w3.org/TR/webdriver-bidi), because Playwright cannot drive Debian's build."""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

websockets = pytest.importorskip("websockets.sync.client")

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
TIMEOUT = 120  # seconds, for a busy machine


class Firefox:
    """One tab of a running Firefox. Collects the errors of its pages."""

    def __init__(self, connection: websockets.ClientConnection):
        self.connection, self.sent, self.errors = connection, 0, []
        self.command("session.new", capabilities={})
        self.tab = self.command("browsingContext.getTree")["contexts"][0]["context"]
        self.command("session.subscribe", events=["log.entryAdded"])

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError with Firefox's message if it fails."""
        self.sent += 1
        self.connection.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            message = json.loads(self.connection.recv(TIMEOUT))
            if message.get("id") == self.sent:
                break
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.errors.append(message["params"]["text"])
        if message["type"] == "error":
            raise RuntimeError(f"{method}: {message['message']}")
        return message["result"]

    def goto(self, url: str) -> None:
        """Load a page, and wait until it is complete."""
        self.command("browsingContext.navigate", context=self.tab, url=url, wait="complete")

    def before_pages(self, function: str) -> None:
        """Call a function in each page loaded from now on, before its scripts. It is not called in workers."""
        self.command("script.addPreloadScript", functionDeclaration=function)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """The value of an expression or of a function for the argument, or of its promise, as in Playwright."""
        expression = f"(value => typeof value === 'function' ? value({json.dumps(argument)}) : value)({script})"
        target = {"context": self.tab}
        answer = self.command("script.evaluate", expression=expression, target=target, awaitPromise=True)
        if answer["type"] == "exception":
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return python_value(answer["result"])


def python_value(remote: dict[str, Any]) -> Any:
    """A value of the page: https://w3c.github.io/webdriver-bidi/#type-script-RemoteValue."""
    kind, value = remote["type"], remote.get("value")  # undefined and null have none
    if kind == "array":
        return [python_value(item) for item in value]
    if kind == "object":
        return {key: python_value(item) for key, item in value}
    return float(value) if value in ("NaN", "Infinity", "-Infinity", "-0") and kind == "number" else value


@contextmanager
def firefox() -> Iterator[Firefox]:
    """A Firefox with an empty profile. Skips the test if Firefox is not installed."""
    if FIREFOX is None:
        pytest.skip("Firefox is not installed")
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        process = subprocess.Popen([FIREFOX, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = listening_port(Path(profile))
            address = f"ws://127.0.0.1:{port}/session"
            with websockets.connect(address, open_timeout=TIMEOUT, max_size=None) as connection:
                yield Firefox(connection)
        finally:
            process.kill()
            process.wait()


def listening_port(profile: Path) -> int:
    """The port of the server, which Firefox writes to its profile."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):  # missing or incomplete
            return json.loads((profile / "WebDriverBiDiServer.json").read_text(encoding="utf-8"))["ws_port"]
        time.sleep(0.05)
    raise TimeoutError("Firefox does not listen")
