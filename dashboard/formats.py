"""Formats figures as short strings. No Streamlit."""

from __future__ import annotations

from datetime import datetime
from typing import Final

NOTHING = "–"


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def rate(value: float | None) -> str:
    """Rates such as tokens/s, with three significant figures."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def size(value: float | None) -> str:
    """Bytes, always in MB, so that copies can be compared from page to page."""
    if value is None:
        return NOTHING
    decimals = 0 if value >= 1e8 else 1 if value >= 1e6 else 3
    return f"{value / 1e6:,.{decimals}f} MB"


def link_rate(value: float | None) -> str:
    """Bytes per second in GB/s."""
    return NOTHING if value is None else f"{value / 1e9:.2f} GB/s"


def milliseconds(value: float | None) -> str:
    if value is None or value != value:
        return NOTHING
    if value >= 10_000:
        return f"{value / 1000:,.1f} s"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def microseconds(value: float | None) -> str:
    if value is None or value != value:
        return NOTHING
    return f"{value:,.0f} µs" if value < 1000 else milliseconds(value / 1000)


def seconds(value: float | None) -> str:
    return NOTHING if value is None else milliseconds(value * 1000)


def duration(value_s: float) -> str:
    whole = int(value_s)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


_UNITS: Final = {
    "us": "µs",
    "gbps": "GB/s",
    "gflops": "GFLOP/s",
    "gb": "GB",
    "mhz": "MHz",
    "ms": "ms",
    "s": "s",
}


def named_figure(name: str, value: float) -> tuple[str, str]:
    """A figure whose name ends in its unit: its name in words, and its value with the unit."""
    words = name.split("_")
    unit = _UNITS.get(words[-1])
    return " ".join(words if unit is None else words[:-1]), f"{value:,g}" + (f" {unit}" if unit else "")


def moment(at_s: float | None, *, with_date: bool = False) -> str:
    """Unix seconds as local time of this machine."""
    if at_s is None:
        return NOTHING
    return datetime.fromtimestamp(at_s).strftime("%d %b %H:%M:%S" if with_date else "%H:%M:%S")


def last_part(path: str) -> str:
    """A model's directory name without its parent path."""
    return path.rstrip("/").rpartition("/")[2] or path
