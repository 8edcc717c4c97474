"""Events of a parsed answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

EventKind = Literal[
    "reasoning", "content", "call", "arguments", "call_end", "call_cut", "call_damaged", "skipped"
]


class Event(NamedTuple):
    """A piece of an answer. The `raw` of all events, joined, is the answer's text as the model wrote it."""

    kind: EventKind
    text: str = ""
    """Reasoning and content: the text. Call: the tool's name. Arguments: the next piece of their JSON. Damaged call:
    its whole text, shown as text; the call is dropped. Cut call: empty; its arguments end where the answer does."""
    raw: str = ""
    """Source text of this event. "skipped" has only this: marks, and the space around them."""
    number: int = -1
    """Index of the call that the event belongs to within the answer, from 0."""
    call_id: str = ""
