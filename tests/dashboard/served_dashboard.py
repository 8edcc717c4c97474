"""The dashboard as a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.dashboard.app_pages import DASHBOARD
from tests.e2e.waiting import wait_until


@contextmanager
def served(database: Path, folder: Path) -> Iterator[str]:
    """The dashboard, started from another folder than the repository; its address."""
    with served_process(database, folder) as (url, _):
        yield url


@contextmanager
def served_process(database: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """As `served`, with the number of its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "streamlit", "run", str(DASHBOARD / "app.py"), "--server.port", str(port)],
        cwd=folder,
        env=dict(os.environ, TWOFOLD_TELEMETRY_URL=f"sqlite:///{database}"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(url), limit_s=60)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
