"""Native events as columns: one database row is a block of events with a blob per field.

A row per event would cost the writer several microseconds, a block costs it a fraction of one per event. `KEYS` are the
block's own columns. Blobs are little-endian arrays with one entry per event; `step` is stored as its distance from
`first_step`, and of an array field the first `width` entries, the most that any event of the block has. A blob of
`SPARSE` is empty where all entries are 0. A block of token_layer holds one request's events, so that its index finds
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.telemetry.sink import EVENT_DTYPES

Events = npt.NDArray[Any]
Row = tuple[Any, ...]

STEP_DTYPE: Final = np.dtype("<u4")
KEYS: Final = {
    "token_layer": ("request", "first_step", "last_step", "num_events"),
    "upload": ("first_step", "last_step", "num_events"),
    "cache_event": ("first_step", "last_step", "num_events"),
}
"""Columns of a block that are numbers, by kind."""
SPARSE: Final = frozenset({"device", "devices"})
"""Fields that are 0 in every event of most runs."""


@cache
def blob_dtypes(kind: str) -> Mapping[str, np.dtype[Any]]:
    """Type of the entries of each blob, by field; array fields have subarrays."""
    dtype = EVENT_DTYPES[kind]
    fields = {name: dtype[name] for name in dtype.names or () if name not in KEYS[kind]}
    return {**fields, "step": STEP_DTYPE}


def joined(parts: Sequence[Events]) -> Events:
    """Events of several arrays, in order. `numpy.concatenate` takes 50 µs to compare such types."""
    dtype = parts[0].dtype
    if len(parts) == 1:
        return parts[0]
    if any(part.dtype != dtype for part in parts):
        return np.concatenate(parts)
    events = np.empty(sum(map(len, parts)), dtype)
    # As bytes, because assignment copies such types field by field.
    whole, begin = events.view(np.uint8), 0
    for part in parts:
        contiguous = np.ascontiguousarray(part).view(np.uint8)
        whole[begin : begin + len(contiguous)] = contiguous
        begin += len(contiguous)
    return events


def block_rows(kind: str, run_id: int, events: Events) -> Iterator[Row]:
    """Rows of table `<kind>_block`: run_id, its keys, its blobs."""
    if not len(events):
        return
    has_request = "request" in KEYS[kind]
    begins = np.zeros(1, np.int64)
    if has_request and not bool((events["request"] == events["request"][0]).all()):
        order = np.argsort(events["request"], kind="stable")
        # As bytes, like `joined`.
        whole = np.ascontiguousarray(events).view(np.uint8).reshape(len(events), -1)
        events = whole[order].view(events.dtype).reshape(-1)
        begins = np.flatnonzero(np.diff(events["request"], prepend=events["request"][0] - 1))
    counts = np.diff(begins, append=len(events))
    first = np.minimum.reduceat(events["step"], begins)
    last = np.maximum.reduceat(events["step"], begins)
    keys = [first.tolist(), last.tolist(), counts.tolist()]
    if has_request:
        keys.insert(0, events["request"][begins].tolist())
    blobs = [
        [
            entries[begin : begin + size]
            for begin, size in zip((begins * entry).tolist(), (counts * entry).tolist(), strict=True)
        ]
        for entries, entry in _blobs(kind, events, np.repeat(first, counts))
    ]
    yield from zip([run_id] * len(begins), *keys, *blobs, strict=True)


def _blobs(kind: str, events: Events, first_steps: Events) -> Iterator[tuple[bytes, int]]:
    """Each field's entries one after another, and the bytes of an entry."""
    for name, dtype in blob_dtypes(kind).items():
        values = events[name]
        if name in SPARSE and not values.any():
            yield b"", 0
            continue
        if name == "step":
            values = values - first_steps
        width = 1
        if dtype.subdtype:
            dtype, width = dtype.subdtype[0], int(events["num_routed"].max())
            values = values[:, :width]
        yield np.ascontiguousarray(values, dtype.newbyteorder("<")).tobytes(), width * dtype.itemsize


def entries(kind: str, name: str, row: Any) -> Events:
    """The entries of a scalar field of a block, one per event. `row` has the field and num_events as attributes."""
    dtype = blob_dtypes(kind)[name].newbyteorder("<")
    blob = getattr(row, name)
    return np.frombuffer(blob, dtype) if blob else np.zeros(row.num_events, dtype)


def events_of(kind: str, rows: Sequence[Any]) -> Events:
    """The events of blocks, block after block. `rows` have the columns of `<kind>_block` as attributes."""
    events = np.zeros(sum(row.num_events for row in rows), EVENT_DTYPES[kind])
    dtypes = blob_dtypes(kind)
    begin = 0
    for row in rows:
        part = events[begin : begin + row.num_events]
        begin += row.num_events
        for name, dtype in dtypes.items():
            blob = getattr(row, name)
            if not blob:  # the field is newer than the block, all entries are 0, or no event has an expert
                continue
            entry = dtype.subdtype[0] if dtype.subdtype else dtype
            values = np.frombuffer(blob, entry.newbyteorder("<"))
            if dtype.subdtype:
                values = values.reshape(row.num_events, -1)
                part[name][:, : values.shape[1]] = values
            else:
                part[name] = values
        part["step"] += row.first_step
        if "request" in KEYS[kind]:
            part["request"] = row.request
    return events
