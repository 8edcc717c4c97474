"""What an answer is made of."""

from __future__ import annotations

from typing import Literal, NamedTuple

EventKind = Literal["reasoning", "content", "call", "arguments", "call_end", "call_damaged", "skipped"]


class Event(NamedTuple):
    """A piece of an answer. The `raw` of all events, joined, is the answer's text as the model wrote it."""

    kind: EventKind
    text: str = ""
    """Of reasoning and content: the text. Of a call: the tool's name. Of arguments: the next piece of their JSON. Of a
    damaged call: all that the model wrote of it, to be shown as text; the call counts as never made."""
    raw: str = ""
    """What of the answer this is. "skipped" has nothing else: marks, and the space around them."""
    number: int = -1
    """Of a call and what belongs to it: which of the answer's it is, from 0."""
    call_id: str = ""
