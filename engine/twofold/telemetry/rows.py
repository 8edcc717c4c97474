"""Converts events to rows: structured arrays and records become tuples in the order of their table's columns.

Pure functions, no database. The driver takes tuples directly: measured several times faster than dictionaries through
SQLAlchemy's `insert()` and some thirty times faster than mapped objects.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.types import ControlRecord, EmulatedParts, RequestRecord, RunInfo, StepRecord
from twofold.telemetry import schema
from twofold.telemetry.sink import EVENT_DTYPES, LoadSample, Placement

Row = tuple[Any, ...]
Events = np.ndarray[Any, np.dtype[Any]]
Seconds = npt.NDArray[np.int64]

NUM_PLACEMENTS = len(Placement)
_NOT_EMULATED = (None,) * len(EmulatedParts._fields)


_RUN: Final = schema.column_names(schema.run)[1:]
_STEP_FIELDS: Final = [column.name for column in schema.columns_of(StepRecord)]
_CONTROL: Final = schema.column_names(schema.control)
_REQUEST: Final = schema.column_names(schema.request)
_LOAD_SAMPLE: Final = schema.column_names(schema.load_sample)
_step_fields: Final = attrgetter(*_STEP_FIELDS)


def _row(columns: list[str], record: object, **others: Any) -> Row:
    """Fields of `record` and `others`, in the order of the columns of the same names."""
    values = vars(record) | others
    return tuple(values[name] for name in columns)


def run_row(run: RunInfo, started_s: float) -> Row:
    """Row of table `run` without run_id, which the database assigns."""
    emulated = run.accelerator.startswith("emulated")
    return _row(_RUN, run, started_s=started_s, last_seen_s=started_s, finished_s=None, emulated=emulated)


def control_row(run_id: int, record: ControlRecord) -> Row:
    return _row(_CONTROL, record, run_id=run_id)


def request_row(run_id: int, record: RequestRecord) -> Row:
    sampling_json = json.dumps(asdict(record.sampling), separators=(",", ":"))
    return _row(_REQUEST, record, run_id=run_id, sampling_json=sampling_json)


def load_sample_row(run_id: int | None, sample: LoadSample) -> Row:
    return _row(_LOAD_SAMPLE, sample, run_id=run_id)


def step_row(run_id: int, record: StepRecord) -> Row:
    return (run_id, *_step_fields(record), *record.parts, *(record.emulated or _NOT_EMULATED))


def _blobs(values: npt.NDArray[Any], counts: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> list[bytes]:
    """The first counts[i] entries of each row of `values` [n, 16] as bytes of `dtype`."""
    width = int(counts.max(initial=0))
    packed = np.ascontiguousarray(values[:, :width], dtype=dtype)
    size = packed.dtype.itemsize * width
    if size == 0:
        return [b""] * len(values)
    blobs: list[bytes] = packed.view(f"V{size}").ravel().tolist()
    if bool((counts == width).all()):
        return blobs
    itemsize = packed.dtype.itemsize
    return [blob[: itemsize * int(count)] for blob, count in zip(blobs, counts, strict=True)]


def event_rows(kind: str, run_id: int, events: Events) -> Iterator[Row]:
    """Rows of table `kind`."""
    names = EVENT_DTYPES[kind].names or ()
    return zip(repeat(run_id, len(events)), *(_column(events, kind, name) for name in names), strict=True)


def _column(events: Events, kind: str, name: str) -> list[Any]:
    array = EVENT_DTYPES[kind][name].subdtype
    if array is None:
        values: list[Any] = events[name].tolist()
        return values
    counts = np.minimum(events["num_routed"], events[name].shape[1])
    return _blobs(events[name], counts, array[0])


@dataclass
class _Uses:
    """Use counts of one second, per layer."""

    num_rows: npt.NDArray[np.int64]
    """[layers]"""
    placements: npt.NDArray[np.int64]
    """[layers, 3] by `Placement`."""
    experts: npt.NDArray[np.uint32]
    """[layers, num_experts, 3]"""


def layer_second_rows(
    run_id: int, num_experts: int, events: Mapping[str, Events], seconds: Mapping[str, Seconds]
) -> Iterator[Row]:
    """Sums per second and layer as rows of layer_second. `seconds`: second of each event, by kind."""
    kinds = [kind for kind in ("token_layer", "upload") if kind in events]
    for second in np.unique(np.concatenate([seconds[kind] for kind in kinds])).tolist() if kinds else ():
        chosen = {kind: events[kind][seconds[kind] == second] for kind in kinds}
        yield from _rows_of_second(
            run_id, num_experts, second, chosen.get("token_layer"), uploads=chosen.get("upload")
        )


def _rows_of_second(
    run_id: int, num_experts: int, second: int, token_layers: Events | None, uploads: Events | None
) -> Iterator[Row]:
    num_layers = 1 + max(
        int(events["layer"].max(initial=-1)) for events in (token_layers, uploads) if events is not None
    )
    uses = None if token_layers is None else _uses(token_layers, num_layers, num_experts)
    num_uploads = upload_bytes = np.zeros(num_layers, np.int64)
    if uploads is not None:
        num_uploads = np.bincount(uploads["layer"], minlength=num_layers)
        upload_bytes = np.bincount(uploads["layer"], weights=uploads["size_bytes"], minlength=num_layers)
    for layer in range(num_layers):
        if not num_uploads[layer] and (uses is None or not uses.num_rows[layer]):
            continue
        yield (
            run_id,
            second,
            layer,
            0 if uses is None else int(uses.num_rows[layer]),
            *((0, 0, 0) if uses is None else uses.placements[layer].tolist()),
            int(num_uploads[layer]),
            int(upload_bytes[layer]),
            b"" if uses is None else zlib.compress(uses.experts[layer].astype("<u4").tobytes(), 1),
        )


def _uses(events: Events, num_layers: int, num_experts: int) -> _Uses:
    layer = events["layer"].astype(np.int64)
    valid = np.arange(events["experts"].shape[1]) < events["num_routed"][:, None]
    valid &= (events["experts"] < num_experts) & (events["placement"] < NUM_PLACEMENTS)
    flat = (layer[:, None] * num_experts + events["experts"]) * NUM_PLACEMENTS + events["placement"]
    counts = np.bincount(flat[valid], minlength=num_layers * num_experts * NUM_PLACEMENTS)
    by_placement = [
        np.bincount(layer, weights=events[name], minlength=num_layers)
        for name in ("num_hits", "num_cpu", "num_fetched")
    ]
    return _Uses(
        num_rows=np.bincount(layer, minlength=num_layers),
        placements=np.stack(by_placement, axis=1).astype(np.int64),
        experts=counts.reshape(num_layers, num_experts, NUM_PLACEMENTS).astype(np.uint32),
    )
