"""Builds the output items of a response and their stream events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from twofold.server.openai.custom_tools import custom_input
from twofold.server.responses.input import Offer, sealed
from twofold.text.chat.events import Event

StreamEvent = tuple[str, dict[str, Any]]
"""A stream event without its number: type and fields."""

_CALLS: Final = ("function_call", "custom_tool_call")


class OutputItems:
    """Items in the order of the answer; only the last one can be open."""

    def __init__(self, offer: Offer, *, one_call: bool, as_summary: bool, with_sealed: bool) -> None:
        """
        Args:
            one_call: return only the answer's first call.
            as_summary: return thinking as its own summary.
            with_sealed: return thinking also in `encrypted_content`.
        """
        self.items: list[dict[str, Any]] = []
        self._offer = offer
        self._one_call = one_call
        self._as_summary = as_summary
        self._with_sealed = with_sealed
        self._open = False
        self._pieces: list[str] = []
        """Pieces of the open item's text."""
        self._logprobs: list[dict[str, Any]] = []
        """Log probabilities of the open message's tokens, if requested."""
        self._num_made = 0
        self._damaged: set[str] = set()
        """Ids of damaged calls, which became text."""
        self._skips = False
        """Whether the call being parsed is left out."""

    @property
    def whole(self) -> list[dict[str, Any]]:
        """All items without damaged calls, whose text is part of the message."""
        kept: list[dict[str, Any]] = []
        for item in self.items:
            if item["id"] in self._damaged:
                continue
            if kept and kept[-1]["type"] == item["type"] == "message":
                before = kept.pop()
                (one,), (other,) = before["content"], item["content"]
                both = {name: one[name] + other[name] for name in ("text", "logprobs")}
                item = item | {"id": before["id"], "content": [one | both]}
            kept.append(item)
        return kept

    def take(self, events: Iterable[Event], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[StreamEvent]:
        """Add the next pieces of the answer. `logprobs` belong to its message text; the first such piece carries
        them."""
        waiting = list(logprobs)
        for event in events:
            if event.kind == "call":
                self._skips = self._one_call and self._num_made > 0
                if not self._skips:
                    yield from self.end()
                    yield from self._begin_call(event)
            elif event.kind == "arguments" and not self._skips:
                self._pieces.append(event.text)
                if self._type == "function_call":
                    yield self._event("function_call_arguments.delta", delta=event.text)
            elif event.kind == "call_end" and not self._skips:
                self._num_made += 1
                yield from self.end()
            elif event.kind == "call_damaged":
                if not self._skips and self._type in _CALLS:
                    self._damaged.add(self.items[-1]["id"])
                    yield from self.end("incomplete")
                yield from self._text("message", event.text, waiting)
            elif event.kind == "content":
                yield from self._text("message", event.text, waiting)
            elif event.kind == "reasoning":
                yield from self._text("reasoning", event.text)

    def end(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Close the open item."""
        if not self._open:
            return
        text, item = "".join(self._pieces), self.items[-1]
        kind = self._type
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            if status == "completed":
                yield self._event("function_call_arguments.done", name=item["name"], arguments=text)
        elif kind == "custom_tool_call":
            item["input"] = custom_input(text)
            if status == "completed":
                yield self._event("custom_tool_call_input.delta", delta=item["input"])
                yield self._event("custom_tool_call_input.done", input=item["input"])
        else:
            event, place, part = self._part(text)
            more: dict[str, Any] = {"logprobs": self._logprobs} if kind == "message" else {}
            yield self._event(f"{event}.done", **place, text=text, **more)
            yield self._event(f"{_part_event(place)}.done", **place, part=part)
            item["summary" if "summary_index" in place else "content"] = [part]
            if kind == "reasoning" and self._with_sealed:
                item["encrypted_content"] = sealed(text)
        yield self._event("output_item.done", item=dict(item))
        self._open = False

    @property
    def _type(self) -> str:
        return self.items[-1]["type"] if self._open else ""

    def _text(
        self, kind: str, text: str, waiting: list[dict[str, Any]] | None = None
    ) -> Iterator[StreamEvent]:
        """Add a piece of text, with the pending log probabilities."""
        if not text:
            return
        if self._type != kind:
            yield from self.end()
            item: dict[str, Any] = {"id": _id("msg"), "role": "assistant", "content": []}
            if kind == "reasoning":
                item = {"id": _id("rs"), "summary": [], "content": [], "encrypted_content": None}
            yield from self._begin({"type": kind, "status": "in_progress"} | item)
            _, place, part = self._part("")
            yield self._event(f"{_part_event(place)}.added", **place, part=part)
        self._pieces.append(text)
        event, place, _ = self._part("")
        more: dict[str, Any] = {}
        if waiting is not None:
            more["logprobs"] = waiting.copy()
            self._logprobs += waiting
            waiting.clear()
        yield self._event(f"{event}.delta", **place, delta=text, **more)

    def _part(self, text: str) -> tuple[str, dict[str, int], dict[str, Any]]:
        """The name of the part's events, its position, and the part itself with `text`."""
        if self._type == "message":
            logprobs = self._logprobs if text else []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            return "output_text", {"content_index": 0}, part
        if self._as_summary:
            part = {"type": "summary_text", "text": text}
            return "reasoning_summary_text", {"summary_index": 0}, part
        return "reasoning_text", {"content_index": 0}, {"type": "reasoning_text", "text": text}

    def _begin_call(self, event: Event) -> Iterator[StreamEvent]:
        tool = self._offer.tool(event.text)
        item: dict[str, Any] = {
            "type": f"{tool.kind}_call" if tool.kind == "function" else "custom_tool_call",
            "status": "in_progress",
            "id": _id("fc" if tool.kind == "function" else "ctc"),
            "call_id": event.call_id,
            "name": tool.name,
        }
        item |= {"arguments": ""} if tool.kind == "function" else {"input": ""}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        yield from self._begin(item)

    def _begin(self, item: dict[str, Any]) -> Iterator[StreamEvent]:
        self.items.append(item)
        self._open = True
        self._pieces, self._logprobs = [], []
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _event(self, event: str, **fields: Any) -> StreamEvent:
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if event != "output_item.done":
            place = {"item_id": self.items[-1]["id"]} | place
        return f"response.{event}", place | fields


def _part_event(place: dict[str, int]) -> str:
    return "reasoning_summary_part" if "summary_index" in place else "content_part"


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
