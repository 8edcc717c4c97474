"""The report of a load test."""

from __future__ import annotations

from loadtest.samples import Sample, report


def sample(**changes: object) -> Sample:
    values: dict[str, object] = {
        "loadtest_id": "lt",
        "finished_s": 1.0,
        "user": 0,
        "num_users": 1,
        "e2e_ms": 1000.0,
        "ok": True,
        "ttft_ms": 100.0,
        "tpot_ms": 9.0,
        "completion_tokens": 101,
        "error": None,
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def test_the_report_keeps_failures_apart() -> None:
    failed = sample(ok=False, ttft_ms=None, tpot_ms=None, e2e_ms=5.0, completion_tokens=0, error="HTTP 503")
    rows = {
        line[:22].strip(): line[22:].split()
        for line in report([sample(), sample(), failed], 10.0).splitlines()
    }
    assert rows["TTFT, ms"] == ["100.0"] * 4
    assert rows["E2E, ms"] == ["1,000.0"] * 4
    assert rows["answers"] == ["2"]
    assert rows["tokens/s, all users"] == ["20.2"]
    assert rows["failures"] == ["1"]
    assert "1 × HTTP 503" in report([failed], 10.0)
    assert "-" in report([], 0.0)
