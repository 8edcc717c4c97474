"""Columns follow from the fields of records and of native events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from sqlalchemy import LargeBinary
from twofold.telemetry import schema
from twofold.telemetry.sink import EVENT_DTYPES

Mood = Literal["good", "bad"]


class _Pair(NamedTuple):
    first: float
    second: float


@dataclass(frozen=True)
class _Record:
    number: int
    at_s: Annotated[float, "Unix time"]
    mood: Mood
    last_mood: Annotated[Mood | None, "NULL at first"]
    pair: _Pair
    reason: str | None = None
    ok: bool = True
    names: tuple[str, ...] = ()


def test_a_column_has_the_type_and_the_meaning_of_its_field() -> None:
    assert [
        (c.name, str(c.type), c.nullable, c.primary_key, c.comment)
        for c in schema.columns_of(_Record, key="number")
    ] == [
        ("number", "INTEGER", False, True, None),
        ("at_s", "FLOAT", False, False, "Unix time"),
        ("mood", "TEXT", False, False, None),
        ("last_mood", "TEXT", True, False, "NULL at first"),
        ("reason", "TEXT", True, False, None),
        ("ok", "INTEGER", False, False, None),
    ]


def test_optional_parts_get_a_prefix() -> None:
    columns = schema.columns_of(_Pair, prefix="other_", optional=True)
    assert [(c.name, c.nullable) for c in columns] == [("other_first", True), ("other_second", True)]


def test_every_field_of_a_native_event_is_a_column_of_its_table() -> None:
    for kind, dtype in EVENT_DTYPES.items():
        table = schema.metadata.tables[kind]
        assert schema.column_names(table) == ["run_id", *(dtype.names or ())]
        arrays = {name for name in dtype.names or () if dtype[name].subdtype}
        assert {c.name for c in table.columns if isinstance(c.type, LargeBinary)} == arrays
    assert schema.token_layer.c.placement.comment == "uint8[num_routed]: 0 hit, 1 cpu, 2 fetched"
    assert schema.upload.c.step.comment is None
