"""The command with which `doctor` and `fit` end: the same model and flags, for another command."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Final

_OWN_FLAGS: Final = frozenset(("--json", "--gpu", "--debug"))
_SECRETS: Final = frozenset(("--api-key", "--admin-key"))


def next_command(args: argparse.Namespace, command: str) -> str:
    """`twofold COMMAND` with the arguments that were given. Keys are replaced: the output ends up in bug reports."""
    words = list(args.given_arguments)
    words.remove(args.command)
    return " ".join(["twofold", command, *map(_quoted, _without_secrets(words))])


def _without_secrets(words: list[str]) -> Iterator[str]:
    hides_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        if hides_next:
            yield "KEY"
            hides_next = False
        elif name in _SECRETS:
            hides_next = not equals
            yield f"{name}=KEY" if equals else name
        elif name not in _OWN_FLAGS:
            yield word


def _quoted(word: str) -> str:
    # The shell expands a leading ~ only outside quotes.
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)
