"""Names of the repairs, each logged once: agents send the same conversation with every request."""

from __future__ import annotations

import functools
import logging
from typing import Final, Literal

_logger = logging.getLogger("twofold.server")

Repair = Literal[
    "unreadable content",
    "damaged arguments",
    "call ids",
    "results by order",
    "one call per message",
    "calls as text",
    "joined messages",
    "system as user",
    "result as user",
    "missing message",
    "items of other servers",
    "plain turns",
]

REPAIRS: Final[dict[Repair, str]] = {
    "unreadable content": "a picture, recording or file became a placeholder that names it: the model reads text only",
    "damaged arguments": "arguments of an earlier call are no JSON object; the model sees them as text in an object",
    "call ids": "ids of calls were replaced: the template takes nine letters and digits, or they were too long",
    "results by order": "results were matched or sorted to their calls by order: ids were missing or unknown, or the "
    "template does not show them",
    "one call per message": "calls of one message were split: the template renders one call per message",
    "calls as text": "calls and results became text: the template renders none",
    "joined messages": "messages of the same role in a row were joined: the template refuses them",
    "system as user": "a system message became the user's: the template takes none in this place",
    "result as user": "a tool's result without a call became the user's message: the template refuses it",
    "missing message": "a placeholder was inserted for a message that the template requires in this place",
    "items of other servers": "items of tools that ran on another server, which hold no call, were left out",
    "plain turns": "the template refused the conversation; calls and results became text, and roles alternate",
}
"""What each repair did, for the log and the guide."""


@functools.cache
def report(repair: Repair) -> None:
    """Log a repair, once per process."""
    _logger.warning("repaired a conversation: %s (reported once)", REPAIRS[repair])
