"""The server's log on standard error: as text or as JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import queue
import threading
from typing import Final

_MOST_QUEUED: Final = 4096
_CLOSE_TIMEOUT_S: Final = 1.0


def set_up_server_log(*, debug: bool, form: str) -> None:
    """Warnings of all modules and what happens in the server, with the time. form: "text" or "json"."""
    handler = QueuedHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, handlers=[handler])
    logging.getLogger("twofold.server").setLevel(logging.DEBUG if debug else logging.INFO)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and the fields that the caller gave as
    `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False, default=str)


class QueuedHandler(logging.Handler):
    """Writes lines to standard error on a thread of its own.

    The server logs on its event loop, which a terminal or a pipe that nothing reads would otherwise stop. Lines beyond
    the queue are dropped and counted.
    """

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | threading.Event] = queue.Queue(_MOST_QUEUED)
        self._num_lost = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_lost += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Write the queued lines, for a second at most. Called at the interpreter's exit, and by libraries that
        configure logging; the handler stays usable."""
        written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(written)
            written.wait(_CLOSE_TIMEOUT_S)
        super().close()

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            if lost := self._num_lost:
                self._num_lost -= lost
                problem = f"{lost} lines of the log were lost, because nothing read the lines before them"
                warning = {"name": "twofold.server", "levelname": "WARNING", "msg": problem}
                self._write(self.format(logging.makeLogRecord(warning)))
            self._write(line)

    def _write(self, line: str) -> None:
        data = (line + "\n").encode(errors="replace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
