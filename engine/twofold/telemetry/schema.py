"""The tables of the telemetry database (SQLAlchemy Core), and the path of its file.

A column is declared where it is measured: as a field of a record (`api.types`, `LoadSample`) or of a native event
(`engine/runtime/moe/events.h`). Type, comment and row follow from it.

Column names carry units: `_s` seconds, `_us` microseconds, `_ms` milliseconds, `_bytes`. `…_s` columns of moments are
Unix times. Columns `*_us` of steps, layers, uploads and cache events are on the run's clock. Where `run.clock` is
"virtual" they are emulated and must be displayed as such; `step.wall_us` and its parts are always wall time,
`step.emulated_*` the parts of an emulated `step_us`.

Tables with many rows have sums: `run_total` sums a whole run and `layer_second` each second of its layers. They are
written in the same transaction as the rows they sum, so they stay valid after retention removes those rows.

`token_layer` stores a token's experts as little-endian blobs of `num_routed` entries (uint16 ids, uint8 placements,
float32 weights, uint8 devices); `queries` converts them back to arrays. `layer_second` sums token_layer and upload by
second and layer, so that live charts and the heatmap cost the same after an hour as after a minute.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TextClause,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.types import TypeEngine

from twofold.api.errors import ConfigError
from twofold.api.machine_sample import MachineSample
from twofold.api.request_record import RequestFacts
from twofold.api.training_step import TrainingStep
from twofold.api.types import ControlRecord, EmulatedParts, RunInfo, StepParts, StepRecord
from twofold.telemetry import migrations
from twofold.telemetry.blocks import KEYS, blob_dtypes
from twofold.telemetry.sink import EVENT_DTYPES, EVENT_MEANINGS, LoadSample
from twofold.telemetry.totals import LAYER_TOTALS

SCHEMA_VERSION: Final = migrations.NEWEST

metadata = MetaData()

INTEGER: Final = Integer().with_variant(BigInteger(), "postgresql")


_KINDS: Final[dict[type, TypeEngine[Any]]] = {int: INTEGER, bool: INTEGER, float: Float(), str: Text()}


def columns_of(
    record: type, *, key: str | None = None, prefix: str = "", optional: bool = False
) -> list[Column[Any]]:
    """A column per field of a record that is a number, a text or a flag, in the same order.

    `X | None` may be NULL, as are all columns if `optional`. The text of `Annotated` is the column's comment. `key`
    names the field that belongs to the primary key. A default is also the value for rows from before the column.
    Fields of other types get no column.
    """
    defaults = getattr(record, "_field_defaults", None) or {
        field.name: field.default for field in getattr(record, "__dataclass_fields__", {}).values()
    }
    columns: list[Column[Any]] = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        annotated = get_origin(hint) is Annotated
        bare, comment = (get_args(hint)[0], hint.__metadata__[0]) if annotated else (hint, None)
        kinds = {type(kind) if isinstance(kind, str | NoneType) else kind for kind in _alternatives(bare)}
        nullable = optional or NoneType in kinds
        (kind, *others) = kinds - {NoneType}
        if kind in _KINDS and not others:
            default = None if nullable else defaults.get(name)
            columns.append(
                Column(
                    f"{prefix}{name}",
                    _KINDS[kind],
                    primary_key=name == key,
                    nullable=nullable,
                    comment=comment,
                    server_default=_literal(default),
                )
            )
    return columns


def _literal(default: object) -> TextClause | None:
    """A default as SQL; SQLite takes only plain literals for a column added later."""
    if isinstance(default, str):
        return text(f"'{default}'")
    return text(f"{default:g}") if isinstance(default, int | float) else None


def _alternatives(hint: Any) -> list[Any]:
    """Types of a union, values of a Literal, or the type itself."""
    if get_origin(hint) not in (Union, UnionType, Literal):
        return [hint]
    return [each for part in get_args(hint) for each in _alternatives(part)]


def _primary_run_id() -> Column[int]:
    return Column("run_id", INTEGER, ForeignKey("run.run_id"), primary_key=True)


def _run_id() -> Column[int]:
    return Column("run_id", INTEGER, ForeignKey("run.run_id"), nullable=False)


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
"""Holds only `schema_version` so far."""

run = Table(
    "run",
    metadata,
    Column("run_id", INTEGER, primary_key=True),
    Column("started_s", Float, nullable=False, comment="Unix time"),
    Column(
        "last_seen_s", Float, nullable=False, comment="refreshed every second or so while the process lives"
    ),
    Column("finished_s", Float, comment="NULL while running, and after a crash"),
    Column("emulated", INTEGER, nullable=False, comment="1: *_us are a cost model's, not a GPU's"),
    *columns_of(RunInfo),
    Column("telemetry_level", Text, nullable=False, comment="step, layer or expert (--telemetry)"),
)

request = Table(
    "request",
    metadata,
    _primary_run_id(),
    *columns_of(RequestFacts, key="number"),
    Column("sampling_json", Text, nullable=False),
)

step = Table(
    "step",
    metadata,
    _primary_run_id(),
    *columns_of(StepRecord, key="step"),
    *columns_of(StepParts),
    *columns_of(EmulatedParts, prefix="emulated_", optional=True),
    Index("step_by_time", "run_id", "started_s"),
)


training_step = Table(
    "training_step",
    metadata,
    _primary_run_id(),
    *columns_of(TrainingStep, key="step"),
    Column(
        "expert_load",
        LargeBinary,
        nullable=False,
        server_default="",
        comment="zlib of uint32[MoE layers, experts]: tokens routed to each expert; may be empty",
    ),
)
"""Optimiser steps of a fine-tuning run."""

control = Table(
    "control", metadata, _run_id(), *columns_of(ControlRecord), Index("control_by_time", "run_id", "at_s")
)
"""Changes made to a running engine."""


def _block_table(kind: str) -> Table:
    """Blocks of events: columns that are numbers, then a blob per field."""
    blobs = [
        Column(name, LargeBinary, nullable=False, server_default="", comment=_entries(kind, name, dtype))
        for name, dtype in blob_dtypes(kind).items()
    ]
    numbers = [Column(name, INTEGER, nullable=False) for name in KEYS[kind]]
    indices = [Index(f"{kind}_block_by_step", "run_id", "first_step", "last_step")]
    if "request" in KEYS[kind]:
        indices.append(Index(f"{kind}_block_by_request", "run_id", "request", "first_step"))
    return Table(f"{kind}_block", metadata, _run_id(), *numbers, *blobs, *indices)


def _entries(kind: str, name: str, dtype: np.dtype[Any]) -> str:
    entry = dtype.subdtype[0] if dtype.subdtype else dtype
    meaning = "minus first_step" if name == "step" else EVENT_MEANINGS[kind][name]
    shape = "num_events, width" if dtype.subdtype else "num_events"
    return f"{entry.name}[{shape}]{f': {meaning}' if meaning else ''}"


BLOCKS: Final = {kind: _block_table(kind) for kind in EVENT_DTYPES}
"""Tables of native events, by kind. `queries.events` reads them, the views of `views` show them as rows."""

views = MetaData()
"""Views as tables, for queries only: `views.create_views` makes them."""


def _event_view(kind: str) -> Table:
    """A column per event field, in the same order; arrays are blobs."""
    columns: list[Column[Any]] = [Column("run_id", INTEGER), Column("first_step", INTEGER)]
    for name in EVENT_DTYPES[kind].names or ():
        dtype = EVENT_DTYPES[kind][name]
        scalar: TypeEngine[Any] = INTEGER if dtype.kind in "iu" else Float()
        comment = EVENT_MEANINGS[kind][name] or None
        columns.append(Column(name, LargeBinary() if dtype.subdtype else scalar, comment=comment))
    return Table(kind, views, *columns)


token_layer, upload, cache_event = (_event_view(kind) for kind in EVENT_DTYPES)
token_expert = Table(
    "token_expert",
    views,
    *(Column(name, INTEGER) for name in ("run_id", "first_step", "last_step", "step", "request", "position")),
    Column("layer", INTEGER, comment="counts MoE layers"),
    Column("rank", INTEGER, comment="place among the token's experts, by descending weight, from 0"),
    Column("expert", INTEGER),
    Column("placement", Text, comment="hit, cpu or fetched"),
    Column("weight", Float),
    Column("device", INTEGER, comment="number of the device that ran it; 0 also on the CPU"),
)

layer_second = Table(
    "layer_second",
    metadata,
    _run_id(),
    Column("at_s", INTEGER, nullable=False, comment="Unix second of the step; may have several rows"),
    *(Column(name, INTEGER, nullable=False) for name in ("layer", "num_rows", *LAYER_TOTALS)),
    Column(
        "uses",
        LargeBinary,
        nullable=False,
        comment="zlib of uint32[num_experts, 3] by placement; may be empty",
    ),
    Index("layer_second_by_time", "run_id", "at_s"),
)

machine_sample = Table(
    "machine_sample",
    metadata,
    _run_id(),
    *columns_of(MachineSample),
    Index("machine_sample_by_time", "run_id", "at_s"),
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
    Column("run_id", INTEGER, ForeignKey("run.run_id")),
    *columns_of(LoadSample),
    Index("load_sample_by_test", "loadtest_id", "finished_s"),
)

dropped = Table(
    "dropped",
    metadata,
    _primary_run_id(),
    Column("kind", Text, primary_key=True),
    Column("place", Text, primary_key=True, comment="ring, queue or database"),
    Column("at_s", Float, nullable=False, comment="Unix time of the latest"),
    Column("num_events", INTEGER, nullable=False),
)
"""Counts of lost events."""


def column_names(table: Table) -> list[str]:
    return [column.name for column in table.columns]


_EXPECTED: Final = (
    "expected sqlite:///relative/file.db, sqlite:////absolute/file.db or postgresql+psycopg://user@host/database "
    "(set --telemetry-url or TWOFOLD_TELEMETRY_URL)"
)


def parse_url(url: str) -> URL:
    """A telemetry URL of a SQLite file or of a PostgreSQL database; ConfigError for anything else."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(f"telemetry URL {url!r} is not a database URL; {_EXPECTED}") from None
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    shown = parsed.render_as_string(hide_password=True)
    if backend != "sqlite":
        raise ConfigError(f"telemetry URL {shown!r} names {backend!r}, not SQLite or PostgreSQL; {_EXPECTED}")
    if not parsed.database or parsed.database == ":memory:" or parsed.query:
        raise ConfigError(f"telemetry URL {shown!r} names no file on disk that others can read; {_EXPECTED}")
    return parsed


def version_of(stored: str | None, path: str) -> int:
    """The schema version that a database has stored; ConfigError if this Twofold knows no such version."""
    if stored is None or not stored.isdigit():
        raise ConfigError(
            f"{path} is not a telemetry database; move it away or choose another file with --telemetry-url"
        )
    found = int(stored)
    if found > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has telemetry schema version {found}, and this Twofold knows versions up to {SCHEMA_VERSION}; "
            "update Twofold or choose another database with --telemetry-url"
        )
    if found < migrations.OLDEST:
        raise ConfigError(
            f"{path} has telemetry schema version {found}, and this Twofold upgrades version {migrations.OLDEST} and "
            "later; move it away or choose another database with --telemetry-url"
        )
    return found
