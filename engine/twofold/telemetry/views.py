"""SQL views that show the events inside blocks as rows, so that any SQL program can read them.

`token_layer`, `upload` and `cache_event` have one row per event, `token_expert` one per routed expert of a token in a
layer. They use no custom functions. Unpacking costs microseconds per row: give `run_id`, and `request` or a range of
`first_step` and `last_step`, which indices serve. Views hold no data. They are made again whenever a file is opened for
writing, so they need no migration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from sqlalchemy import Connection, inspect

from twofold.telemetry.blocks import KEYS, SPARSE, blob_dtypes
from twofold.telemetry.sink import EVENT_DTYPES, Placement

_Bytes = Callable[[str, int], str]
"""The SQL for byte `offset` of an entry; the text is the SQL for the entry's first byte, counted from 0."""

_BYTES: Final = "x'" + bytes(range(256)).hex() + "'"
_WIDTH: Final = "(length(b.experts) / (2 * b.num_events))"
"""The SQL for the entries per event of a token_layer block's arrays."""
_UNEVEN: Final = (
    f"CASE WHEN replace(hex(b.num_routed), printf('%02X', {_WIDTH}), '') = '' THEN '0,' ELSE '1,' END"
)
"""SQLite's SQL for '0,' if every event of a block has as many experts as its arrays have entries, else '1,'."""
_PLACEMENT: Final = " ".join(f"WHEN {int(each)} THEN '{each.name.lower()}'" for each in Placement)


def view_statements(dialect: str) -> dict[str, str]:
    """CREATE VIEW of each view, for "sqlite" or "postgresql"."""
    views = {kind: _event_view(kind, dialect) for kind in EVENT_DTYPES}
    return {**views, "token_expert": _token_expert_view(dialect)}


def create_views(connection: Connection) -> None:
    """Make all views, within the caller's transaction; those that exist are replaced."""
    drop_views(connection)
    for statement in view_statements(connection.dialect.name).values():
        connection.exec_driver_sql(statement)


def drop_views(connection: Connection) -> None:
    """Remove all views that exist, so that their tables may change."""
    present = inspect(connection).get_view_names()
    for name in view_statements(connection.dialect.name):
        if name in present:
            connection.exec_driver_sql(f"DROP VIEW {name}")


def _event_view(kind: str, dialect: str) -> str:
    columns = [f"{_value(kind, name, dialect)} AS {name}" for name in EVENT_DTYPES[kind].names or ()]
    selected = f"SELECT {_block_keys()}, {', '.join(columns)} {_from(kind, dialect)}"
    return f"CREATE VIEW {kind} AS {_with_bytes(dialect)}{selected}"


def _token_expert_view(dialect: str) -> str:
    """One row per routed expert, by descending weight."""
    kind = "token_layer"
    event = f"({_index(dialect)} / {_WIDTH})"
    rank = f"({_index(dialect)} - {event} * {_WIDTH})"  # psycopg takes a percent sign for a parameter
    scalars = [
        f"{_value(kind, name, dialect, event)} AS {name}" for name in ("step", "request", "position", "layer")
    ]
    arrays = "experts", "placement", "weights", "devices"
    entries = {name: _entry(kind, name, dialect, event=event, rank=rank) for name in arrays}
    is_routed = f"{rank} < {_value(kind, 'num_routed', dialect, event)}"
    if dialect == "sqlite":
        # Nothing is unpacked to count the rows of blocks whose events have equally many experts.
        is_routed = f"(e.value = 0 OR {is_routed})"
    return (
        f"CREATE VIEW token_expert AS {_with_bytes(dialect)}SELECT {_block_keys()}, {', '.join(scalars)}, "
        f"{rank} AS rank, {entries['experts']} AS expert, "
        f"CASE {entries['placement']} {_PLACEMENT} END AS placement, {entries['weights']} AS weight, "
        f"{entries['devices']} AS device "
        f"{_from(kind, dialect, f'b.num_events * {_WIDTH}', _UNEVEN)} WHERE {is_routed}"
    )


def _with_bytes(dialect: str) -> str:
    """SQLite has no function for the number of a byte: its place in the string of all bytes is that number."""
    return f"WITH k AS (SELECT {_BYTES} AS every) " if dialect == "sqlite" else ""


def _block_keys() -> str:
    return "b.run_id AS run_id, b.first_step AS first_step, b.last_step AS last_step"


def _from(kind: str, dialect: str, num_rows: str = "b.num_events", value: str = "'0,'") -> str:
    """Blocks, each with num_rows rows, whose index is `_index`; on SQLite with `value` as text in JSON."""
    if dialect == "postgresql":
        return f"FROM {kind}_block b CROSS JOIN LATERAL generate_series(0, {num_rows} - 1) AS e(i)"
    # SQLite's series: a JSON array of as many equal numbers; its keys count from 0.
    numbers = f"'[' || rtrim(replace(hex(zeroblob({num_rows})), '00', {value}), ',') || ']'"
    return f"FROM k CROSS JOIN {kind}_block b CROSS JOIN json_each({numbers}) AS e"


def _index(dialect: str) -> str:
    return "e.i" if dialect == "postgresql" else "e.key"


def _value(kind: str, name: str, dialect: str, event: str = "") -> str:
    """The SQL for a field of event `event`, the row's by default: a number, or its part of an array's blob."""
    event = event or _index(dialect)
    if name in KEYS[kind]:
        return f"b.{name}"
    dtype = blob_dtypes(kind)[name]
    if dtype.subdtype is None:
        value = _number(f"b.{name}", f"{event} * {dtype.itemsize}", dtype, dialect)
        return f"b.first_step + {value}" if name == "step" else _or_zero(name, value)
    size = dtype.subdtype[0].itemsize
    routed = _value(kind, "num_routed", dialect, event)
    start = f"{event} * (length(b.{name}) / b.num_events) + 1"
    if dialect == "postgresql":
        return f"substring(b.{name}, ({start})::int, ({size} * {routed})::int)"
    part = f"substr(b.{name}, {start}, {size} * {routed})"
    return f"coalesce({part}, x'')" if name in SPARSE else part  # SQLite's part of an empty blob is NULL


def _entry(kind: str, name: str, dialect: str, *, event: str, rank: str) -> str:
    """The SQL for one entry of an event's array."""
    subdtype = blob_dtypes(kind)[name].subdtype
    assert subdtype is not None
    dtype = subdtype[0]
    start = f"{event} * (length(b.{name}) / b.num_events) + {rank} * {dtype.itemsize}"
    return _or_zero(name, _number(f"b.{name}", start, dtype, dialect))


def _or_zero(name: str, value: str) -> str:
    """The SQL for a number, 0 where the field's blob is empty."""
    return f"CASE WHEN length(b.{name}) = 0 THEN 0 ELSE {value} END" if name in SPARSE else value


def _number(blob: str, start: str, dtype: np.dtype[Any], dialect: str) -> str:
    """The SQL for the number of `dtype` at byte `start` of a blob."""

    def byte(offset: int) -> str:
        if dialect == "postgresql":
            return f"get_byte({blob}, ({start} + {offset})::int)::bigint"
        return f"(instr(k.every, substr({blob}, {start} + {offset + 1}, 1)) - 1)"

    size = dtype.itemsize
    if dtype.kind == "f":
        return _float([byte(offset) for offset in range(size)], dialect)
    bits = " + ".join(f"({byte(offset)} << {8 * offset})" for offset in range(size))
    if dtype.kind == "u" or size == 8:
        return f"({bits})"
    # Shifting to the top and back extends the sign.
    return f"((({bits}) << {64 - 8 * size}) >> {64 - 8 * size})"


def _float(byte: list[str], dialect: str) -> str:
    """The SQL for an IEEE 754 number of 4 or 8 bytes. Numbers below 2**-62 are 0, infinities and NaN are NULL."""
    size = len(byte)
    fraction_bits = 23 if size == 4 else 52
    high_bits = fraction_bits % 8
    top, second = byte[-1], byte[-2]
    exponent = f"((({top} & 127) << {8 - high_bits}) + ({second} >> {high_bits}))"
    bias = 127 if size == 4 else 1023
    low = [f"({each} << {8 * place})" for place, each in enumerate(byte[:-2])]
    fraction = " + ".join([*low, f"(({second} & {2**high_bits - 1}) << {8 * (size - 2)})"])
    significand = f"(1.0 + ({fraction}) / {float(2**fraction_bits)!r})"
    one = "1::bigint" if dialect == "postgresql" else "1"
    shift = "({})::int" if dialect == "postgresql" else "({})"
    power = (
        f"CASE WHEN {exponent} = {2 * bias + 1} THEN NULL WHEN {exponent} < {bias - 62} THEN 0.0 "
        f"WHEN {exponent} < {bias} THEN 1.0 / ({one} << {shift.format(f'{bias} - {exponent}')}) "
        f"ELSE 1.0 * ({one} << {shift.format(f'{exponent} - {bias}')}) END"
    )
    value = f"(CASE WHEN {top} > 127 THEN -1 ELSE 1 END * {significand} * {power})"
    return f"({value})::float8" if dialect == "postgresql" else value
