"""Reads messages: by prompt_toolkit in a terminal, where it is installed; else line by line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from twofold.api.errors import ConfigError

PROMPT = "> "


def message_reader() -> Callable[[], str]:
    """A function that returns the next message; EOFError at the end, KeyboardInterrupt for Ctrl-C."""
    if not sys.stdin.isatty():
        return _next_line
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with contextlib.suppress(ImportError):
            return _prompt_toolkit()
    # Line editing and history for input(); missing in a few Python builds.
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
    return lambda: input(f"\n{PROMPT}")


def _next_line() -> str:
    try:
        return input()
    except UnicodeDecodeError:
        raise ConfigError("standard input is not UTF-8 text; chat reads text only") from None


def _prompt_toolkit() -> Callable[[], str]:
    """A pasted text with several lines is one message; Alt-Enter begins a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    try:
        file = _history_file()
        history: FileHistory | InMemoryHistory = FileHistory(str(file))
    except OSError:
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, multiline=True, prompt_continuation="  "
    )

    def read() -> str:
        print()
        return session.prompt(PROMPT)

    return read


def _history_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    file = Path(base) / "twofold" / "chat_history"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.touch(mode=0o600)
    return file
