"""Headless Chromium over the DevTools protocol: opens a dashboard page, waits for it, and reports what a browser sees.

Speaks over Chromium's debugging pipe, so that only Chromium must be installed (Debian: apt-get install chromium).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
]

READY = """
(() => {
  const app = document.querySelector('[data-testid="stApp"]');
  if (!app || app.getAttribute('data-test-script-state') !== 'notRunning') return 'the page is still being made';
  if (document.querySelector('[data-testid="stSkeleton"]')) return 'the page still shows placeholders';
  for (const chart of document.querySelectorAll('[data-testid="stPlotlyChart"]'))
    if (!chart.querySelector('.main-svg .cartesianlayer > *')) return 'a chart is not drawn yet';
  const wanted = WANTED;
  if (wanted && !document.body.innerText.includes(wanted)) return 'the text is not there: ' + wanted;
  return '';
})()
"""
HEIGHT = """
(() => {
  const main = document.querySelector('[data-testid="stMainBlockContainer"]') || document.body;
  return Math.ceil(main.getBoundingClientRect().height) + 20;
})()
"""
CUT_OFF = """
(() => {
  const main = document.querySelector('[data-testid="stMainBlockContainer"]');
  const cut = [];
  for (const element of main ? main.querySelectorAll('*') : []) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || box.right <= window.innerWidth + 1) continue;
    if (element.type === 'range') continue;  // behind a slider that draws itself; never seen
    let around = element, reachable = false;
    while (around && around !== main) {
      around = around.parentElement;
      const overflow = around && getComputedStyle(around).overflowX;
      if (overflow === 'auto' || overflow === 'scroll')
        if (around.getBoundingClientRect().right <= window.innerWidth + 1) reachable = true;
    }
    const name = element.dataset.testid || element.tagName.toLowerCase();
    if (!reachable) cut.push(name + " to " + Math.round(box.right));
  }
  return cut.slice(0, 5);
})()
"""


@dataclass(frozen=True)
class Frame:
    """A message on the page's WebSocket."""

    at_s: float
    num_bytes: int
    is_sent: bool


@dataclass
class Seen:
    """The browser's report on a page."""

    requested: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Errors in the console, uncaught exceptions, and responses that failed."""
    frames: list[Frame] = field(default_factory=list)

    def note(self, event: dict[str, Any]) -> None:
        """Add one event of the protocol."""
        method, parameters = event.get("method", ""), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.errors.append(
                " ".join(str(each.get("value", each.get("description"))) for each in parameters["args"])
            )
        elif method in ("Network.webSocketFrameReceived", "Network.webSocketFrameSent"):
            payload = parameters["response"]["payloadData"]
            binary = parameters["response"]["opcode"] == 2
            size = len(base64.b64decode(payload)) if binary else len(payload)
            self.frames.append(Frame(parameters["timestamp"], size, method.endswith("Sent")))


class DevTools:
    """Sends commands over the pipe one at a time; events go to `seen`."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._buffer = b""
        self._next_id = 0
        self.session_id: str | None = None
        self.tab: str | None = None
        self.seen = Seen()

    def call(self, method: str, *, timeout_s: float = 30.0, **parameters: Any) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if self.session_id is not None:
            message["sessionId"] = self.session_id
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            answer = json.loads(self._receive(deadline))
            self.seen.note(answer)
            if answer.get("id") == self._next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def _receive(self, deadline: float) -> bytes:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read_fd, 1 << 20) if readable else b""
            if not chunk:
                raise TimeoutError("Chromium does not answer" if not readable else "Chromium has ended")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return message

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"].get("text")))
        return result["result"].get("value")


@contextmanager
def browser(program: str) -> Iterator[DevTools]:
    """Start Chromium with a temporary profile."""
    to_browser_read, to_browser_write = os.pipe()
    from_browser_read, from_browser_write = os.pipe()

    def place_pipes() -> None:  # Chromium reads commands from descriptor 3 and answers on 4
        read_fd, write_fd = os.dup(to_browser_read), os.dup(from_browser_write)
        os.dup2(read_fd, 3)
        os.dup2(write_fd, 4)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            close_fds=False,
        )
        os.close(to_browser_read)
        os.close(from_browser_write)
        try:
            yield DevTools(from_browser_read, to_browser_write)
        finally:
            os.close(to_browser_write)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser_read)


def chromium(named: str = "") -> str | None:
    """The program to use: the named one, else the one that is installed; None if there is none."""
    return named or shutil.which("chromium") or shutil.which("google-chrome")


def open_page(tools: DevTools, url: str, *, width: int = 1360, dark: bool = False) -> None:
    """Begin to load `url` in a new tab, which replaces the one before; `tools` speaks to it from now on."""
    tools.session_id, former = None, tools.tab
    tools.tab = tools.call("Target.createTarget", url="about:blank")["targetId"]
    if former is not None:  # its page would go on refreshing
        tools.call("Target.closeTarget", targetId=former)
    tools.session_id = tools.call("Target.attachToTarget", targetId=tools.tab, flatten=True)["sessionId"]
    tools.seen = Seen()
    for domain in ("Page", "Network", "Runtime", "Log"):
        tools.call(f"{domain}.enable")
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    tools.call("Emulation.setEmulatedMedia", features=[scheme])
    _resize(tools, width, 900)
    tools.call("Page.navigate", url=url)


def wait_until_ready(tools: DevTools, url: str, wait_for: str = "", *, timeout_s: float = 60.0) -> None:
    """Wait for the page's script and charts, and for a text; TimeoutError names what is still missing."""
    deadline = time.monotonic() + timeout_s
    expression = READY.replace("WANTED", json.dumps(wait_for))
    while missing := tools.evaluate(expression):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}: {missing}")
        time.sleep(0.1)


def photograph(
    tools: DevTools, url: str, width: int, wait_for: str = "", *, timeout_s: float = 60.0
) -> bytes:
    """A PNG of the whole page that `open_page` began to load."""
    wait_until_ready(tools, url, wait_for, timeout_s=timeout_s)
    _resize(tools, width, max(600, int(tools.evaluate(HEIGHT))))
    time.sleep(1.0)  # charts take an animation frame or two to resize
    wait_until_ready(tools, url, wait_for, timeout_s=timeout_s)
    return _png(tools)


def capture(tools: DevTools, width: int, height: int) -> bytes:
    """A PNG of the window in this size, whatever the page shows."""
    _resize(tools, width, height)
    return _png(tools)


def _png(tools: DevTools) -> bytes:
    return base64.b64decode(tools.call("Page.captureScreenshot", format="png")["data"])


def faults(tools: DevTools, url: str, width: int) -> list[str]:
    """Content cut off at this width, requests to other hosts, and errors in the console."""
    own = urlsplit(url).netloc
    hosts = {address for address in tools.seen.requested if address.startswith(("http:", "https:"))}
    found = [
        f"request to another host: {address}" for address in sorted(hosts) if urlsplit(address).netloc != own
    ]
    found += [f"console: {error}" for error in tools.seen.errors]
    return found + [f"cut off at {width} px: {what}" for what in tools.evaluate(CUT_OFF)]


def _resize(tools: DevTools, width: int, height: int) -> None:
    tools.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )
