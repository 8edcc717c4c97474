"""Hooks for all tests: `make test` must not pass by skipping what its own set-up should have built or installed."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import pytest

NEEDED = (
    "twofold._core",
    "torch",
    "transformers",
    "fastapi",
    "sqlalchemy",
    "streamlit",
    "locust",
    "openai",
    "anthropic",
    "jsonschema",
    "tiktoken",
    "sentencepiece",
    "compressed_tensors",
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A green result says what it left out: skips by their reason, and of which kernels it knows nothing."""
    reasons = Counter(str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        told = (f"{reason.removeprefix('Skipped: ')} ({count})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {'; '.join(told)}")
    if importlib.util.find_spec("twofold._core") is None:
        return
    from twofold._testing import kernels

    from tests.kernels import kernel_levels

    terminalreporter.write_line(kernel_levels.summary(kernels.levels(), kernel_levels.runnable()))


def pytest_sessionstart() -> None:
    """Tests skip what is missing, so that parts run alone; under TWOFOLD_TESTS_NEED_ALL=1 that is an error."""
    if os.environ.get("TWOFOLD_TESTS_NEED_ALL") != "1":
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.exit(f"not installed or not built: {', '.join(missing)}; run `make build`", returncode=4)
