"""Numbers of a Plotly figure as the browser gets them."""

from __future__ import annotations

import base64

import numpy as np


def values_of(packed: dict[str, str] | list[float | None]) -> np.ndarray:
    """An array of a trace: packed as base64, or a list with None for NaN."""
    if isinstance(packed, dict):
        return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"]).astype(np.float64)
    return np.array(packed, np.float64)
