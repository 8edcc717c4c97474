"""Renews docs/images: serves the bundled model twice under load, then photographs the chat page and the dashboard's.

    make screenshots                                  # SECONDS_OF_LOAD=60
    python -m scripts.renew_screenshots --seconds 20 --output /tmp/images
    python -m scripts.renew_screenshots --only-chat

The GPU is emulated, which each picture says. Everything runs on this machine, on free ports, and ends with the script.
Exit code: 0, 1 when a page has faults (see screenshot_dashboard.py), 2 without Chromium.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dashboard.pages import PAGES
from scripts.headless_chromium import browser, capture, chromium, faults, open_page, photograph
from scripts.screenshot_dashboard import shrink

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("lru", "payback")
START_TIMEOUT_S = 120.0
CHAT_HEIGHT = 500
CHAT_ASKS = """
(() => {
  const button = document.querySelector('.welcome button');
  if (!button) return false;
  const sampling = Object.entries({ temperature: 0, max_tokens: 120 });
  sampling.forEach(([id, value]) => document.getElementById(id).value = value);
  document.getElementById('colours').checked = true;
  button.click();
  return true;
})()
"""
CHAT_IS_COLOURED = "document.querySelectorAll('.token').length > 0"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60, help="of load on each server (default: 60)")
    parser.add_argument("--users", type=int, default=6, help="of the load (default: 6)")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures"
    )
    parser.add_argument("--database", type=Path, help="photograph this database instead of making one")
    parser.add_argument(
        "--max-kb", type=int, default=200, help="fewer colours above this size (default: 200)"
    )
    parser.add_argument("--only-chat", action="store_true", help="photograph the chat page alone")
    args = parser.parse_args()
    program = chromium()
    if program is None:
        print("no Chromium found; install it (apt-get install chromium)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        photograph_chat(program, Path(folder) / "chat.db", args.output / "chat.png", max_kb=args.max_kb)
        if args.only_chat:
            return 0
        database = args.database or Path(folder) / "screenshots.db"
        if args.database is None:
            for policy in POLICIES:
                record(database, policy, seconds=args.seconds, users=args.users)
        return photograph_pages(program, database.resolve(), args.output, max_kb=args.max_kb)


def photograph_chat(program: str, database: Path, output: Path, *, max_kb: int) -> None:
    """A coloured answer on the chat page. TimeoutError if it does not come."""
    with emulated_server(database, POLICIES[-1]) as url, browser(program) as tools:
        open_page(tools, url, width=900)
        deadline = time.monotonic() + START_TIMEOUT_S
        for expression in (CHAT_ASKS, CHAT_IS_COLOURED):
            while not tools.evaluate(expression):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{url}: no coloured answer")
                time.sleep(0.2)
        picture = shrink(capture(tools, 900, CHAT_HEIGHT), max_kb * 1000)
    output.write_bytes(picture)
    print(f"{output}: {len(picture) / 1000:.0f} kB", flush=True)


@contextmanager
def emulated_server(database: Path, policy: str) -> Iterator[str]:
    """The URL of the bundled model on an emulated GPU."""
    port = free_port()
    command = [sys.executable, "-m", "twofold.tools.cli.main", "serve", "--port", str(port)]
    command += ["--accelerator", "emulated:rtx4090-pcie4", "--gpu-experts-ratio", "0.25", "--policy", policy]
    command += ["--telemetry-url", f"sqlite:///{database}", "--telemetry-text", "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    with serving(command, f"{url}/health"):
        yield url


def record(database: Path, policy: str, *, seconds: int, users: int) -> None:
    """One run of the bundled model on an emulated GPU, with users that chat."""
    with emulated_server(database, policy) as url:
        subprocess.run(load_command(url, seconds=seconds, users=users), check=True, cwd=ROOT)


def load_command(url: str, *, seconds: int, users: int) -> list[str]:
    """The load test that fills the pages."""
    program = [sys.executable, "-m", "twofold.tools.cli.main", "loadtest", "--host", url]
    return [*program, "--users", str(users), "--seconds", str(seconds)]


def photograph_pages(program: str, database: Path, output: Path, *, max_kb: int) -> int:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        str(ROOT / "dashboard" / "app.py"),
        "--server.port",
        str(port),
    ]
    wrong = []
    environment = {"TWOFOLD_TELEMETRY_URL": f"sqlite:///{database}"}
    with serving(command, f"{url}/_stcore/health", environment), browser(program) as tools:
        for page in PAGES:
            address = f"{url}/{'' if page is PAGES[0] else page.name}?window=all"
            open_page(tools, address)
            picture = shrink(photograph(tools, address, 1360), max_kb * 1000)
            path = output / f"dashboard-{page.name}.png"
            path.write_bytes(picture)
            print(f"{path}: {len(picture) / 1000:.0f} kB", flush=True)
            wrong += [f"{page.name}: {fault}" for fault in faults(tools, address, 1360)]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


@contextmanager
def serving(command: list[str], health: str, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server until the block ends; the block begins when `health` answers."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(os.environ, **(environment or {})), stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(health):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{' '.join(command)} did not answer {health}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  http on 127.0.0.1
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
