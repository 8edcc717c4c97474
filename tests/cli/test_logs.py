"""The server's log: JSON lines, and a standard error that nothing reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time

import pytest
from twofold.tools.cli import bar, logs
from twofold.tools.cli.bar import Bar
from twofold.tools.cli.logs import JsonFormatter, QueuedHandler


@pytest.fixture
def logger():
    made = logging.getLogger("twofold.server.test_logs")
    made.setLevel(logging.INFO)
    made.propagate = False
    yield made
    made.handlers.clear()


def test_a_json_line_has_the_message_and_its_fields(logger):
    reading, writing = os.pipe()
    handler = QueuedHandler(writing)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.warning("a %s\nline", "long", extra={"fields": {"status": 400}})
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    handler.close()
    os.close(writing)
    with os.fdopen(reading) as lines:
        first, second = map(json.loads, lines)
    assert first.pop("time").endswith("Z")
    name = "twofold.server.test_logs"
    assert first == {"level": "warning", "logger": name, "message": "a long\nline", "status": 400}
    assert "ValueError: wrong" in second["traceback"]


def test_a_pipe_that_nothing_reads_stops_no_caller_and_lost_lines_are_counted(logger, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_QUEUED", 8)
    monkeypatch.setattr(logs, "_CLOSE_TIMEOUT_S", 0.05)
    reading, writing = os.pipe()
    handler = QueuedHandler(writing)
    logger.addHandler(handler)
    for number in range(2000):
        logger.info("%d %s", number, "x" * 1000)  # far more than a pipe and the queue hold
    handler.close()
    os.set_blocking(reading, False)
    received = ""
    deadline = time.monotonic() + 60
    while not ("lines of the log were lost" in received and "after that" in received):
        assert time.monotonic() < deadline
        logger.info("after that")  # again, for it may be lost as well
        with contextlib.suppress(BlockingIOError):
            received += os.read(reading, 65_536).decode()
        time.sleep(0.001)
    os.close(reading)


def test_closing_keeps_the_handler_usable(logger):
    """As when a library calls `logging.config.dictConfig`, which shuts down the handlers that there are."""
    reading, writing = os.pipe()
    handler = QueuedHandler(writing)
    logger.addHandler(handler)
    handler.close()
    logger.info("after it")
    assert os.read(reading, 100) == b"after it\n"
    os.close(reading)


def test_a_slow_start_is_logged_where_there_is_no_terminal(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with caplog.at_level(logging.INFO, logger="twofold.server"), Bar("loading", "GB", 1e-9) as shown:
        for now[0], done in ((1.0, 5), (9.9, 30), (10.1, 42), (15.0, 50), (20.5, 60), (30.0, 90)):
            shown.show(done, 100, "experts")
    assert [record.getMessage() for record in caplog.records] == [
        "still loading experts after 10 s: 42 %",
        "still loading experts after 20 s: 60 %",
    ]
