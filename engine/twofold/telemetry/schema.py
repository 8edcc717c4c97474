"""The tables of the telemetry database (SQLAlchemy Core), and the path of its file.

Column names carry units: `_s` seconds, `_us` microseconds, `_ms` milliseconds, `_bytes`. `…_s` columns of moments are
Unix times. Columns `*_us` of steps, layers, uploads and cache events are on the run's clock. Where `run.clock` is
"virtual" they are emulated and must be displayed as such; `step.wall_us` and its parts are always wall time,
`step.emulated_*` the parts of an emulated `step_us`.

Tables with many rows have sums: `run_total` sums a whole run and `layer_second` each second of its layers. They are
written in the same transaction as the rows they sum, so they stay valid after retention removes those rows.

`token_layer` stores a token's experts as little-endian blobs of `num_routed` entries (uint16 ids, uint8 placements,
float32 weights); `queries` converts them back to arrays. `layer_second` sums token_layer and upload by second and
layer, so that live charts and the heatmap cost the same after an hour as after a minute.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from sqlalchemy import (
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.types import TypeEngine

from twofold.api.errors import ConfigError
from twofold.api.types import EmulatedParts, StepParts, StepRecord
from twofold.telemetry.blocks import KEYS, blob_dtypes
from twofold.telemetry.sink import EVENT_DTYPES, column_name

SCHEMA_VERSION: Final = 5

metadata = MetaData()


def _required(kind: type[TypeEngine[Any]], *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]


def _primary_run_id() -> Column[int]:
    return Column("run_id", Integer, ForeignKey("run.run_id"), primary_key=True)


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
"""Holds only `schema_version` so far."""

run = Table(
    "run",
    metadata,
    Column("run_id", Integer, primary_key=True),
    Column("started_s", Float, nullable=False),
    Column(
        "last_seen_s", Float, nullable=False, comment="refreshed every second or so while the process lives"
    ),
    Column("finished_s", Float, comment="NULL while running, and after a crash"),
    *_required(Text, "model", "architecture", "accelerator", "accelerator_reason"),
    Column("emulated", Integer, nullable=False, comment="1: *_us are a cost model's, not a GPU's"),
    Column("clock", Text, nullable=False, comment="wall or virtual"),
    Column("policy", Text, nullable=False),
    *_required(Integer, "num_layers", "num_experts", "top_k", "num_slots", "expert_bytes"),
    Column("cpu_isa", Text, nullable=False),
    Column("cpu_threads", Integer, nullable=False),
    *_required(Text, "version", "config_json"),
    Column("telemetry_level", Text, nullable=False, comment="step, layer or expert (--telemetry)"),
)


def _run_id() -> Column[int]:
    return Column("run_id", Integer, ForeignKey("run.run_id"), nullable=False)


request = Table(
    "request",
    metadata,
    _primary_run_id(),
    Column("number", Integer, primary_key=True, comment="`request` in events"),
    *_required(Text, "request_id", "endpoint"),
    Column("submitted_s", Float, nullable=False),
    Column("first_token_s", Float),
    Column("finished_s", Float),
    *_required(Integer, "prompt_tokens", "completion_tokens"),
    Column("finish_reason", Text, comment="NULL while it runs"),
    *_required(Float, "queue_s", "prefill_s", "decode_s"),
    Column("sampling_json", Text, nullable=False),
    Column("cached_tokens", Integer, nullable=False, comment="prompt tokens that hit the prefix cache"),
)

STEP_FIELDS: Final = [each for each in fields(StepRecord) if each.name not in ("parts", "emulated")]
"""Fields of StepRecord that are columns: int or float, always set, with metadata["comment"] as comment."""

step = Table(
    "step",
    metadata,
    _primary_run_id(),
    *(
        Column(
            field.name,
            {"int": Integer, "float": Float, "float | None": Float}[str(field.type)],
            primary_key=field.name == "step",
            nullable=field.name == "begin_us",
            comment=field.metadata.get("comment"),
        )
        for field in STEP_FIELDS
    ),
    *(Column(part, Float, nullable=False) for part in StepParts._fields),
    *(Column(f"emulated_{part}", Float, comment="virtual clock") for part in EmulatedParts._fields),
    Index("step_by_time", "run_id", "started_s"),
)


control = Table(
    "control",
    metadata,
    _run_id(),
    Column("at_s", Float, nullable=False, comment="Unix time"),
    Column("kind", Text, nullable=False, comment="resize, sleep or wake"),
    Column("num_slots", Integer, nullable=False, comment="from then on"),
    Column("num_pages", Integer, nullable=False, comment="of the KV cache, from then on"),
    Index("control_by_time", "run_id", "at_s"),
)
"""Changes made to a running engine."""


def _block_table(kind: str) -> Table:
    """Blocks of events: columns that are numbers, then a blob per field."""
    blobs = [
        Column(column_name(name), LargeBinary, nullable=False, comment=_entries(dtype))
        for name, dtype in blob_dtypes(kind).items()
    ]
    numbers = [Column(name, Integer, nullable=False) for name in KEYS[kind]]
    indices = [Index(f"{kind}_block_by_step", "run_id", "first_step", "last_step")]
    if "request" in KEYS[kind]:
        indices.append(Index(f"{kind}_block_by_request", "run_id", "request", "first_step"))
    return Table(f"{kind}_block", metadata, _run_id(), *numbers, *blobs, *indices)


def _entries(dtype: np.dtype[Any]) -> str:
    entry = dtype.subdtype[0] if dtype.subdtype else dtype
    return f"{entry.name}[num_events{', width' if dtype.subdtype else ''}]"


BLOCKS: Final = {kind: _block_table(kind) for kind in EVENT_DTYPES}
"""Tables of native events, by kind. `queries.events` reads them, the views of `views` show them as rows."""

views = MetaData()
"""Views as tables, for queries only: `views.create_views` makes them."""


def _event_view(kind: str) -> Table:
    """A column per event field, in the same order; arrays are blobs."""
    columns: list[Column[Any]] = [Column("run_id", Integer), Column("first_step", Integer)]
    for field in EVENT_DTYPES[kind].names or ():
        dtype, name = EVENT_DTYPES[kind][field], column_name(field)
        scalar = Integer if dtype.kind in "iu" else Float
        columns.append(Column(name, LargeBinary if dtype.subdtype else scalar))
    return Table(kind, views, *columns)


token_layer, upload, cache_event = (_event_view(kind) for kind in ("token_layer", "upload", "cache_event"))

layer_second = Table(
    "layer_second",
    metadata,
    _run_id(),
    Column("at_s", Integer, nullable=False, comment="Unix second of the step; may have several rows"),
    *_required(
        Integer, "layer", "num_rows", "num_hits", "num_cpu", "num_fetched", "num_uploads", "upload_bytes"
    ),
    Column(
        "uses",
        LargeBinary,
        nullable=False,
        comment="zlib of uint32[num_experts, 3] by placement; may be empty",
    ),
    Index("layer_second_by_time", "run_id", "at_s"),
)

run_total = Table(
    "run_total",
    metadata,
    _primary_run_id(),
    Column("name", Text, primary_key=True, comment="see telemetry/totals.py"),
    Column("amount", Float, nullable=False),
)

load_sample = Table(
    "load_sample",
    metadata,
    Column("run_id", Integer, ForeignKey("run.run_id")),
    Column("loadtest_id", Text, nullable=False),
    Column("finished_s", Float, nullable=False),
    *_required(Integer, "user", "num_users"),
    Column("e2e_ms", Float, nullable=False, comment="wall clock of the client"),
    Column("ok", Integer, nullable=False),
    Column("ttft_ms", Float),
    Column("tpot_ms", Float),
    Column("completion_tokens", Integer, nullable=False),
    Column("error", Text),
    Column("request_id", Text, comment="that of table request; NULL where no answer began"),
    Index("load_sample_by_test", "loadtest_id", "finished_s"),
)

dropped = Table(
    "dropped",
    metadata,
    _primary_run_id(),
    Column("kind", Text, primary_key=True),
    Column("place", Text, primary_key=True, comment="ring, queue or database"),
    Column("at_s", Float, nullable=False, comment="Unix time of the latest"),
    Column("num_events", Integer, nullable=False),
)
"""Counts of lost events."""


def column_names(table: Table) -> list[str]:
    return [column.name for column in table.columns]


def database_path(url: str) -> Path:
    """The file of a telemetry URL; ConfigError for anything but `sqlite:///FILE`."""
    expected = (
        "expected sqlite:///relative/file.db or sqlite:////absolute/file.db "
        "(set --telemetry-url or TWOFOLD_TELEMETRY_URL)"
    )
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(f"telemetry URL {url!r} is not a database URL; {expected}") from None
    if parsed.get_backend_name() != "sqlite":
        raise ConfigError(
            f"telemetry URL {url!r} names {parsed.get_backend_name()!r}, not SQLite; {expected}"
        )
    if not parsed.database or parsed.database == ":memory:" or parsed.query:
        raise ConfigError(f"telemetry URL {url!r} names no file on disk that others can read; {expected}")
    return Path(parsed.database)


def check_version(found: str | None, path: Path) -> None:
    """ConfigError unless the database has this schema version. `found` is None if it has none."""
    if found != str(SCHEMA_VERSION):
        what = "is not a telemetry database" if found is None else f"has telemetry schema version {found}"
        raise ConfigError(
            f"{path} {what}; this Twofold writes and reads version {SCHEMA_VERSION}. "
            "Move the file away or choose another with --telemetry-url"
        )
