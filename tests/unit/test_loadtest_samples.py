"""Which hosts may be loaded, percentiles, the report."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.samples import Sample, check_host, percentile, report


@pytest.mark.parametrize(
    "host",
    [
        "http://127.0.0.1:10002",
        "http://127.8.9.1",
        "http://localhost:1/",
        "http://[::1]:80",
        "https://LOCALHOST",
    ],
)
def test_this_machine_may_be_loaded(host: str) -> None:
    assert check_host(host, allow_remote=False) == host.rstrip("/")


@pytest.mark.parametrize(
    "host",
    [
        "http://example.com",
        "http://10.0.0.1:10002",
        "http://0.0.0.0:10002",
        "http://127.0.0.1.example.com",
        "http://localhost@example.com",
        "http://128.0.0.1",
    ],
)
def test_other_machines_only_when_allowed(host: str) -> None:
    with pytest.raises(ValueError, match="--allow-remote-host"):
        check_host(host, allow_remote=False)
    assert check_host(host, allow_remote=True) == host


@pytest.mark.parametrize("host", ["", "127.0.0.1:10002", "ftp://127.0.0.1", "file:///etc/passwd", "http://"])
def test_what_is_no_address_is_refused_always(host: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        check_host(host, allow_remote=True)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).random(37).tolist()
    for percent in (0, 50, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([3.0], 99) == 3.0
    assert percentile([], 50) is None


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
