"""Recent responses, kept in memory so that a request can continue one or refer to its items by their ids."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """One response with its own input; that of the response it continues is found by its id."""

    body: dict[str, Any]
    """The response object."""
    input_items: Sequence[Item]
    previous_id: str | None
    num_bytes: int

    @property
    def output(self) -> list[Item]:
        return list(self.body["output"])


class ResponseStore:
    """The newest responses, bounded in number and bytes. Used on the event loop only."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        """By id, least recently used first."""
        self._places: dict[str, str] = {}
        """Id of the response that holds an item, by the item's id."""

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, body: dict[str, Any], input_items: Sequence[Item], previous_id: str | None) -> None:
        """Keep a finished response; the least recently used ones make room. One larger than all room is dropped."""
        size = len(json.dumps([body, list(input_items)], ensure_ascii=False).encode(errors="replace"))
        if not self.is_on or size > self._max_bytes:
            return
        stored = StoredResponse(body, input_items, previous_id, size)
        self._responses[body["id"]] = stored
        self._num_bytes += size
        self._places |= {item["id"]: body["id"] for item in _identified(stored)}
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._responses)))

    def get(self, response_id: str) -> StoredResponse | None:
        """The response, which counts as used now."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def remove(self, response_id: str) -> bool:
        """Forget a response; False if there is none of this id."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return False
        self._num_bytes -= stored.num_bytes
        for item in _identified(stored):
            if self._places.get(item["id"]) == response_id:
                del self._places[item["id"]]
        return True

    def item(self, item_id: str) -> Item | None:
        """The item of this id in any response."""
        stored = self.get(self._places.get(item_id, ""))
        found = () if stored is None else (item for item in _identified(stored) if item["id"] == item_id)
        return next(iter(found), None)

    def conversation(self, response_id: str) -> list[Item] | None:
        """All items up to the response's output; None if it, or one that it continues, is not kept."""
        turns: list[list[Item]] = []
        place: str | None = response_id
        while place is not None:
            stored = self.get(place)
            if stored is None or len(turns) > self._max_responses:
                return None
            turns.append([*stored.input_items, *stored.output])
            place = stored.previous_id
        return [item for turn in reversed(turns) for item in turn]


def _identified(stored: StoredResponse) -> Iterator[Item]:
    """Items with an id."""
    for item in (*stored.output, *stored.input_items):
        if isinstance(item.get("id"), str):
            yield item
