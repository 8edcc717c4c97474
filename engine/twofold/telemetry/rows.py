"""Converts events to rows: structured arrays and records become tuples in the order of their table's columns.

Pure functions, no database. `statements` writes them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twofold.api.machine_sample import MachineSample
from twofold.api.request_record import RequestRecord
from twofold.api.training_step import TrainingStep
from twofold.api.types import ControlRecord, EmulatedParts, RunInfo, StepRecord
from twofold.api.valid_text import valid_text
from twofold.telemetry import schema
from twofold.telemetry.sink import LoadSample, Placement, TelemetryLevel

Row = tuple[Any, ...]
Events = np.ndarray[Any, np.dtype[Any]]
Seconds = npt.NDArray[np.int64]

SUMMED: Final = ("token_layer", "upload")
"""Kinds of events that layer_second sums."""
NUM_PLACEMENTS = len(Placement)
_NOT_EMULATED = (None,) * len(EmulatedParts._fields)


_PARTS: Final = StepRecord._fields.index("parts")
_CONTROL: Final = schema.column_names(schema.control)
_REQUEST: Final = schema.column_names(schema.request)
_MACHINE_SAMPLE: Final = schema.column_names(schema.machine_sample)
_TRAINING_STEP: Final = schema.column_names(schema.training_step)
_LOAD_SAMPLE: Final = schema.column_names(schema.load_sample)


def _row(columns: list[str], record: object, **others: Any) -> Row:
    """Fields of `record` and `others`, in the order of the columns of the same names."""
    values = vars(record) | others
    return tuple(values[name] for name in columns)


def run_values(run: RunInfo, started_s: float, level: TelemetryLevel) -> dict[str, Any]:
    """Row of table `run` without run_id, which the database assigns."""
    # Paths may hold bytes that are no text.
    facts = {
        name: valid_text(value) if isinstance(value, str) else value
        for name, value in vars(run).items()
        if name in schema.run.c
    }
    return facts | {
        "started_s": started_s,
        "last_seen_s": started_s,
        "finished_s": None,
        "emulated": int(run.accelerator.startswith("emulated")),
        "telemetry_level": level,
    }


def control_row(run_id: int, record: ControlRecord) -> Row:
    return _row(_CONTROL, record, run_id=run_id)


def request_row(run_id: int, record: RequestRecord) -> Row:
    sampling_json = json.dumps(asdict(record.sampling), separators=(",", ":"))
    return _row(_REQUEST, record, run_id=run_id, sampling_json=sampling_json)


def machine_sample_row(run_id: int, sample: MachineSample) -> Row:
    return _row(_MACHINE_SAMPLE, sample, run_id=run_id)


def training_step_row(run_id: int, record: TrainingStep, *, with_load: bool) -> Row:
    load = record.expert_load
    blob = b"" if load is None or not with_load else zlib.compress(load.astype("<u4").tobytes(), 1)
    return _row(_TRAINING_STEP, record, run_id=run_id, expert_load=blob)


def load_sample_row(run_id: int | None, sample: LoadSample) -> Row:
    return _row(_LOAD_SAMPLE, sample, run_id=run_id)


def step_rows(run_id: int, records: Iterable[StepRecord]) -> Iterator[Row]:
    """Rows of table `step`: the records' numbers, then the parts of their times."""
    for record in records:
        fields: tuple[Any, ...] = record
        emulated = record.emulated or _NOT_EMULATED
        yield (run_id, *fields[:_PARTS], *fields[_PARTS + 2 :], *record.parts, *emulated)


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
    kinds = [kind for kind in SUMMED if kind in events]
    present = np.unique(np.concatenate([seconds[kind] for kind in kinds])).tolist() if kinds else []
    for second in present:
        chosen = events
        if len(present) > 1:
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
    width = int(events["num_routed"].max(initial=0))
    experts, placement = events["experts"][:, :width], events["placement"][:, :width]
    valid = np.arange(experts.shape[1]) < events["num_routed"][:, None]
    valid &= (experts < num_experts) & (placement < NUM_PLACEMENTS)
    flat = (layer[:, None] * num_experts + experts) * NUM_PLACEMENTS + placement
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
