"""The dashboard's colours: one meaning each, the same on every page, readable on light and dark backgrounds.

Placements and upload reasons have hues (Okabe and Ito's, distinguishable with every kind of colour vision). Plain
quantities are slate, distinguished by line style and pattern. Amounts are shown by depth of colour. Text and grids have
no colour here: they are the theme's.
"""

from __future__ import annotations

from typing import Final

from twofold.telemetry.queries import Placement, UploadReason

HIT: Final = "#009e73"
FETCHED: Final = "#e69f00"
"""Fetched on demand: the expert, and its upload."""
CPU: Final = "#0072b2"
PREFETCH: Final = "#cc79a7"
ADMISSION: Final = "#56b4e9"
FAILED: Final = "#d55e00"
QUANTITY: Final = "#7a8aa0"
AMOUNT: Final = "#7c5cd6"
"""Amounts such as misses and uses: the stronger the colour, the more."""
UNUSED: Final = "rgba(128,128,128,0.18)"
DEVICES: Final = (HIT, CPU, FETCHED, PREFETCH, ADMISSION, FAILED, AMOUNT, QUANTITY)
"""Devices of a machine, in order, where a chart shows nothing else."""

PART_COLORS: Final = {
    "experts_cpu": CPU,
    "experts_gpu": HIT,
    "attention": "#aa4499",
    "router": "#ddaa33",
    "dense_ffn": "#66ccee",
    "head": "#882255",
    "emit": "#bb5566",
    "sampling": "#999933",
    "schedule": "#44aa99",
    "batch": "#6699cc",
    "embed": "#994455",
    "telemetry": "#997700",
    "rest": QUANTITY,
    "other": "#bbbbbb",
}
"""Parts of a step's time, by the names of STEP_PARTS; "other": the sum of small ones."""

PLACEMENT_COLORS: Final = {Placement.HIT: HIT, Placement.FETCHED: FETCHED, Placement.CPU: CPU}
REASON_COLORS: Final = {
    UploadReason.DEMAND: FETCHED,
    UploadReason.ADMISSION: ADMISSION,
    UploadReason.PREFETCH: PREFETCH,
}


def faint(color: str, alpha: float) -> str:
    red, green, blue = _channels(color)
    return f"rgba({red},{green},{blue},{alpha})"


def depths(color: str) -> list[list[object]]:
    """A colour scale from nearly transparent to `color`, for either background."""
    return [[0, faint(color, 0.08)], [1, faint(color, 1.0)]]


def text_on(color: str) -> str:
    """Black or white, whichever is more readable on `color`."""
    return "#ffffff" if contrast(color, "#ffffff") >= contrast(color, "#000000") else "#000000"


def contrast(one: str, other: str) -> float:
    """WCAG contrast ratio of two colours, 1 to 21."""
    lighter, darker = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _channels(color: str) -> tuple[int, int, int]:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _luminance(color: str) -> float:
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(color))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
