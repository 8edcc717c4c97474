"""Labels of a request's prefixes, from its JSON body alone.

The next turn of a conversation repeats the messages before it. A label is a digest of everything up to the end of one
message, so equal labels mean equal text. A router compares them without the tokenizer and without the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final, NamedTuple

_ITEMS: Final = ("messages", "input", "prompt")
"""Fields that grow from turn to turn; the first present one is split into messages or blocks."""
_HEAD: Final = ("model", "system", "instructions", "tools", "cache_salt", "chat_template_kwargs")
"""Fields that precede the messages in a prompt, or that separate prefix caches."""
_BLOCK_CHARS: Final = 1024
"""Length of the parts of a prompt that is one text."""
_LABEL_BYTES: Final = 8
_MAX_FIRST: Final = 8
_MAX_LAST: Final = 56
"""Labels kept of a longer conversation: those of the beginning, which others share, and the newest ones."""


class PromptIdentity(NamedTuple):
    """The parts of a request that a router compares."""

    labels: tuple[bytes, ...] = ()
    """Labels of the prompt's prefixes, shortest first; at most 64 of 8 bytes. Empty if the body holds no prompt."""
    model: str = ""
    """The model that the body names; empty if it names none."""


def prompt_of(body: bytes) -> PromptIdentity:
    """The identity of a JSON body's prompt."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return PromptIdentity()  # the replica answers with the error
    if not isinstance(fields, Mapping):
        return PromptIdentity()
    model = fields.get("model")
    parts = list(_parts(next((fields[name] for name in _ITEMS if fields.get(name)), None)))
    head = _canonical({name: fields[name] for name in _HEAD if fields.get(name)})
    labels = tuple(accumulate(parts, _extended, initial=_extended(b"", head)))[1:]
    if len(labels) > _MAX_FIRST + _MAX_LAST:
        labels = labels[:_MAX_FIRST] + labels[-_MAX_LAST:]
    return PromptIdentity(labels, model if isinstance(model, str) else "")


def _parts(items: Any) -> Iterator[bytes]:
    """The prompt's parts in order: messages, or blocks of a text. The last block may be short."""
    if isinstance(items, str):
        for begin in range(0, len(items), _BLOCK_CHARS):
            yield items[begin : begin + _BLOCK_CHARS].encode(errors="replace")
    elif isinstance(items, list):
        for item in items:
            yield _canonical(item)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _extended(before: bytes, part: bytes) -> bytes:
    return blake2b(before + part, digest_size=_LABEL_BYTES).digest()
