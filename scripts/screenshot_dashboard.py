#!/usr/bin/env python3
"""Photographs a dashboard page that is being served, in a real headless Chromium, once its content is there.

    scripts/screenshot_dashboard.py http://127.0.0.1:8501/placement docs/images/placement.png
    scripts/screenshot_dashboard.py --dark --width 390 http://127.0.0.1:8501/placement /tmp/phone.png

Reports faults of the page as a browser sees it: requests to other hosts, and content cut off at the right (wider than
the window, without a way to scroll to it); either makes the exit code 1.

Starts no server. Waits until the page's script has ended, its charts are drawn and (with --wait-for) a given text is
on it, then captures the whole page. Speaks the DevTools protocol over Chromium's debugging pipe, so that only Chromium
must be installed (Debian: apt-get install chromium). Exit code: 0, 1 when the content did not appear or is wrong, 2 for
bad arguments.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

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


class DevTools:
    """Sends commands over the pipe one at a time; of events, keeps only the addresses of requests."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._buffer = b""
        self._next_id = 0
        self.session_id: str | None = None
        self.requested: list[str] = []

    def call(self, method: str, *, timeout_s: float = 30.0, **parameters: Any) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": parameters}
        if self.session_id is not None:
            message["sessionId"] = self.session_id
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout_s
        while True:
            answer = json.loads(self._receive(deadline))
            if answer.get("method") == "Network.requestWillBeSent":
                self.requested.append(answer["params"]["request"]["url"])
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


def photograph(
    tools: DevTools, url: str, *, width: int, dark: bool, wait_for: str, timeout_s: float
) -> bytes:
    """A PNG of the whole page; TimeoutError, with what is still missing, if it does not get ready."""
    target = tools.call("Target.createTarget", url="about:blank")["targetId"]
    tools.session_id = tools.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    tools.call("Page.enable")
    tools.call("Network.enable")
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    tools.call("Emulation.setEmulatedMedia", features=[scheme])
    _resize(tools, width, 900)
    tools.call("Page.navigate", url=url)
    deadline = time.monotonic() + timeout_s
    _wait_until_ready(tools, url, wait_for, deadline)
    _resize(tools, width, max(600, int(tools.evaluate(HEIGHT))))
    time.sleep(1.0)  # charts take an animation frame or two to resize
    _wait_until_ready(tools, url, wait_for, deadline)
    return base64.b64decode(tools.call("Page.captureScreenshot", format="png")["data"])


def faults(tools: DevTools, url: str, width: int) -> list[str]:
    """Content cut off at this width, and requests to other hosts."""
    own = urlsplit(url).netloc
    asked = {address for address in tools.requested if address.startswith(("http:", "https:"))}
    found = [
        f"request to another host: {address}" for address in sorted(asked) if urlsplit(address).netloc != own
    ]
    return found + [f"cut off at {width} px: {what}" for what in tools.evaluate(CUT_OFF)]


def _resize(tools: DevTools, width: int, height: int) -> None:
    tools.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )


def _wait_until_ready(tools: DevTools, url: str, wait_for: str, deadline: float) -> None:
    expression = READY.replace("WANTED", json.dumps(wait_for))
    while missing := tools.evaluate(expression):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}: {missing}")
        time.sleep(0.2)


def shrink(png: bytes, max_bytes: int) -> bytes:
    """The same picture with 256 colours if it is too large; charts lose nothing visible."""
    if len(png) <= max_bytes:
        return png
    packed = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        packed, "PNG", optimize=True
    )
    return packed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the page, e.g. http://127.0.0.1:8501/placement")
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("--wait-for", default="", metavar="TEXT", help="text that must stand on the page")
    parser.add_argument("--width", type=int, default=1360, help="of the window in pixels (default: 1360)")
    parser.add_argument("--dark", action="store_true", help="as a browser that prefers dark colours")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait (default: 60)")
    parser.add_argument(
        "--max-kb", type=int, default=300, help="fewer colours above this size (default: 300)"
    )
    parser.add_argument("--chromium", default="", help="program to use (default: the one that is installed)")
    args = parser.parse_args()
    program = args.chromium or shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        print(
            "no Chromium found; install it (apt-get install chromium) or name it with --chromium",
            file=sys.stderr,
        )
        return 2
    if not args.output.parent.is_dir():
        print(f"directory {args.output.parent} does not exist; create it first", file=sys.stderr)
        return 2
    try:
        with browser(program) as tools:
            png = photograph(
                tools,
                args.url,
                width=args.width,
                dark=args.dark,
                wait_for=args.wait_for,
                timeout_s=args.timeout,
            )
            wrong = faults(tools, args.url, args.width)
    except (TimeoutError, RuntimeError) as error:
        print(f"no picture taken: {error}", file=sys.stderr)
        return 1
    png = shrink(png, args.max_kb * 1000)
    args.output.write_bytes(png)
    print(f"{args.output}: {len(png) / 1000:.0f} kB")
    for fault in wrong:
        print(fault, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
