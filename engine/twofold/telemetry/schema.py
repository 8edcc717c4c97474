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
float32 weights); `queries` converts them back to arrays. `layer_second` sums token_layer and upload by second and
layer, so that live charts and the heatmap cost the same after an hour as after a minute.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

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
from twofold.api.types import ControlRecord, EmulatedParts, RequestFacts, RunInfo, StepParts, StepRecord
from twofold.telemetry.sink import EVENT_DTYPES, EVENT_MEANINGS, LoadSample
from twofold.telemetry.totals import LAYER_TOTALS

SCHEMA_VERSION: Final = 5

metadata = MetaData()


_KINDS: Final[dict[type, type[TypeEngine[Any]]]] = {int: Integer, bool: Integer, float: Float, str: Text}


def columns_of(
    record: type, *, key: str | None = None, prefix: str = "", optional: bool = False
) -> list[Column[Any]]:
    """A column per field of a record that is a number, a text or a flag, in the same order.

    `X | None` may be NULL, as are all columns if `optional`. The text of `Annotated` is the column's comment. `key`
    names the field that belongs to the primary key. Fields of other types get no column.
    """
    columns: list[Column[Any]] = []
    for name, hint in get_type_hints(record, include_extras=True).items():
        annotated = get_origin(hint) is Annotated
        bare, comment = (get_args(hint)[0], hint.__metadata__[0]) if annotated else (hint, None)
        kinds = {type(kind) if isinstance(kind, str | NoneType) else kind for kind in _alternatives(bare)}
        nullable = optional or NoneType in kinds
        (kind, *others) = kinds - {NoneType}
        if kind in _KINDS and not others:
            columns.append(
                Column(
                    f"{prefix}{name}",
                    _KINDS[kind],
                    primary_key=name == key,
                    nullable=nullable,
                    comment=comment,
                )
            )
    return columns


def _alternatives(hint: Any) -> list[Any]:
    """Types of a union, values of a Literal, or the type itself."""
    if get_origin(hint) not in (Union, UnionType, Literal):
        return [hint]
    return [each for part in get_args(hint) for each in _alternatives(part)]


def _primary_run_id() -> Column[int]:
    return Column("run_id", Integer, ForeignKey("run.run_id"), primary_key=True)


def _run_id() -> Column[int]:
    return Column("run_id", Integer, ForeignKey("run.run_id"), nullable=False)


meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
"""Holds only `schema_version` so far."""

run = Table(
    "run",
    metadata,
    Column("run_id", Integer, primary_key=True),
    Column("started_s", Float, nullable=False, comment="Unix time"),
    Column(
        "last_seen_s", Float, nullable=False, comment="refreshed every second or so while the process lives"
    ),
    Column("finished_s", Float, comment="NULL while running, and after a crash"),
    Column("emulated", Integer, nullable=False, comment="1: *_us are a cost model's, not a GPU's"),
    *columns_of(RunInfo),
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


control = Table(
    "control", metadata, _run_id(), *columns_of(ControlRecord), Index("control_by_time", "run_id", "at_s")
)
"""Changes made to a running engine."""


def _event_table(kind: str, *, index: str) -> Table:
    """A table with a column per event field, in the same order; arrays are blobs."""
    columns: list[Column[Any]] = []
    for name in EVENT_DTYPES[kind].names or ():
        dtype = EVENT_DTYPES[kind][name]
        scalar = Integer if dtype.kind in "iu" else Float
        column_type = LargeBinary if dtype.subdtype else scalar
        comment = EVENT_MEANINGS[kind][name] or None
        columns.append(Column(name, column_type, nullable=False, comment=comment))
    return Table(kind, metadata, _run_id(), *columns, Index(f"{kind}_by_{index}", "run_id", index))


# Pages query a request's rows; everything by time comes from layer_second.
token_layer = _event_table("token_layer", index="request")
upload = _event_table("upload", index="step")
cache_event = _event_table("cache_event", index="step")

layer_second = Table(
    "layer_second",
    metadata,
    _run_id(),
    Column("at_s", Integer, nullable=False, comment="Unix second of the step; may have several rows"),
    *(Column(name, Integer, nullable=False) for name in ("layer", "num_rows", *LAYER_TOTALS)),
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
