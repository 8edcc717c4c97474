"""The separate process that tries grammars before this process compiles them (`grammar_source.trial`)."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import CapacityError

TIMEOUT_S: Final = 10.0
"""Timeout per grammar. A large schema takes a tenth of a second."""
_START_S: Final = 60.0
"""Timeout of the first grammar, which includes reading the vocabulary: half a second for 150,000 tokens."""
_QUEUE_S: Final = 30.0
_NICENESS: Final = 10


class GrammarTrial:
    """Trial process, started on first use and again after a grammar killed it. Thread-safe; one grammar at a time."""

    def __init__(self, vocabulary: dict[str, Any]) -> None:
        """vocabulary: tokens in base64, ids of special tokens and of tokens that end an answer."""
        self._vocabulary = json.dumps(vocabulary)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def error_of(self, grammar: str) -> str:
        """Why the grammar cannot be used; "" if it can. CapacityError if the process stays busy with other grammars."""
        if not self._lock.acquire(timeout=_QUEUE_S):
            raise CapacityError(
                "the grammar compiler is busy with other requests; try later", retry_after_s=_QUEUE_S
            )
        try:
            timeout_s = TIMEOUT_S
            if self._process is None or self._process.poll() is not None:
                self._start()
                timeout_s = _START_S
            return self._ask(json.dumps(grammar), timeout_s)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        source = Path(__file__).with_name("grammar_source.py")
        self._process = subprocess.Popen(  # noqa: S603  this interpreter and our own file
            [sys.executable, "-P", str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Ctrl-C in a terminal goes to the server, which drains first.
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        self._write(self._vocabulary)

    def _ask(self, line: str, timeout_s: float) -> str:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        self._write(line)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self._end()
                return f"it takes longer than {timeout_s:.0f} s to compile; simplify it"
        answer = process.stdout.readline()
        if not answer:
            self._end()
            return "it is nested too deeply, or needs too much memory; simplify it"
        error: str = json.loads(answer)
        return error

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended, which reading detects

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
