"""Formats that cross borders: load samples as JSON, event arrays."""

from __future__ import annotations

from typing import Any

import pytest
from twofold.api.errors import RequestError
from twofold.telemetry.sink import LoadSample, parse_load_samples

GOOD: dict[str, Any] = {
    "loadtest_id": "lt-1",
    "finished_s": 1.7e9,
    "user": 3,
    "num_users": 10,
    "e2e_ms": 812.5,
    "ok": True,
    "ttft_ms": 91.0,
    "tpot_ms": 7.1,
    "completion_tokens": 101,
    "error": None,
}


def test_a_good_body_becomes_samples() -> None:
    failed = {"loadtest_id": "lt-1", "finished_s": 1.7e9, "user": 0, "num_users": 1, "e2e_ms": 3, "ok": False}
    staged = GOOD | {"stage": "spike", "name": "chat", "itl_p95_ms": 9.5, "gave_up": True}
    assert parse_load_samples({"samples": [{**GOOD, "unknown": 1}, failed, staged]}) == [
        LoadSample("lt-1", 1.7e9, 3, 10, 812.5, True, 91.0, 7.1, 101),
        LoadSample("lt-1", 1.7e9, 0, 1, 3.0, False),
        LoadSample(
            *("lt-1", 1.7e9, 3, 10, 812.5, True, 91.0, 7.1, 101),
            itl_p95_ms=9.5,
            stage="spike",
            name="chat",
            gave_up=True,
        ),
    ]


@pytest.mark.parametrize(
    "body", [None, [], {}, {"samples": {}}, {"samples": [3]}, {"samples": [GOOD] * 10_001}]
)
def test_a_body_of_another_shape_is_refused(body: object) -> None:
    with pytest.raises(RequestError) as caught:
        parse_load_samples(body)
    assert caught.value.param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loadtest_id", ""),
        ("loadtest_id", "x" * 1001),
        ("loadtest_id", 7),
        ("finished_s", None),
        ("finished_s", float("nan")),
        ("user", "3"),
        ("num_users", -1),
        ("e2e_ms", float("inf")),
        ("ok", 1),
        ("gave_up", 0),
        ("stage", 3),
        ("itl_p95_ms", "9"),
        ("ttft_ms", True),
        ("error", 404),
        ("itls_json", "[1,"),
        ("plan_json", "[" * 200_001),
    ],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"samples\[1\]\.{field}") as caught:
        parse_load_samples({"samples": [GOOD, {**GOOD, field: value}]})
    assert caught.value.param == f"samples[1].{field}"
