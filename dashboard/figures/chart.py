"""A Plotly figure under construction: plain dictionaries, with the methods of `plotly.graph_objects.Figure`.

Plotly checks every attribute when it is set, 20 ms per chart, and a page draws up to ten charts at every refresh. Here
attributes are only merged; `tests/dashboard/test_figures.py` lets Plotly check what each page draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go


class Chart:
    """Traces and layout of a figure of one plot, of plots side by side (`widths`), or of `rows` of them.

    Plots count from 1. Those side by side share the vertical axis, rows the horizontal one.
    """

    def __init__(self, *, widths: tuple[float, ...] = (), rows: int = 0, spacing: float = 0.0) -> None:
        self._data: list[dict[str, Any]] = []
        self._layout: dict[str, Any] = {}
        self.covers_window = False
        """Whether its horizontal axis is the page's window."""
        self._numbers = [str(plot + 1) if plot else "" for plot in range(max(1, len(widths), rows))]
        shares = widths or (1.0,) * rows
        room, begin = 1.0 - spacing * (len(shares) - 1), 0.0
        # Rows are numbered from the top, where the vertical domain ends.
        for number, share in zip(self._numbers if widths else self._numbers[::-1], shares, strict=False):
            end = min(1.0, begin + share / sum(shares) * room)
            self._place(number, [begin, end], is_row=not widths)
            begin = end + spacing

    def _place(self, number: str, domain: list[float], *, is_row: bool) -> None:
        last = self._numbers[-1]
        split, shared = ("yaxis", "xaxis") if is_row else ("xaxis", "yaxis")
        self._layout[f"{split}{number}"] = {"anchor": f"{shared[0]}{number}", "domain": domain}
        leader = last if is_row else ""
        follows = {} if number == leader else {"matches": f"{shared[0]}{leader}", "showticklabels": False}
        self._layout[f"{shared}{number}"] = {"anchor": f"{split[0]}{number}", "domain": [0.0, 1.0], **follows}

    def add_scatter(self, *, plot: int = 1, **trace: Any) -> None:
        self._add("scatter", plot, trace)

    def add_bar(self, *, plot: int = 1, **trace: Any) -> None:
        self._add("bar", plot, trace)

    def add_heatmap(self, *, plot: int = 1, **trace: Any) -> None:
        self._add("heatmap", plot, trace)

    def add_annotation(self, **annotation: Any) -> None:
        self._layout.setdefault("annotations", []).append(annotation)

    def add_hline(self, *, y: float, line: dict[str, Any]) -> None:
        """A horizontal line across the plot."""
        across = {"type": "line", "x0": 0, "x1": 1, "xref": "x domain", "y0": y, "y1": y, "yref": "y"}
        self._layout.setdefault("shapes", []).append({**across, "line": line})

    def add_vline(self, *, x: float, line: dict[str, Any], text: str) -> None:
        """A vertical line through all plots, named above the first one."""
        for number in self._numbers:
            across = {"type": "line", "y0": 0, "y1": 1, "yref": f"y{number} domain", "x0": x, "x1": x}
            self._layout.setdefault("shapes", []).append({**across, "xref": f"x{number}", "line": line})
        place = {"x": x, "xref": "x", "xanchor": "left", "y": 1, "yref": "y domain", "yanchor": "top"}
        self.add_annotation(text=text, font={"size": 11}, showarrow=False, **place)

    def add_band(self, *, x0: float, x1: float, color: str) -> None:
        """A shaded stretch through all plots, below their traces."""
        for number in self._numbers:
            place = {"x0": x0, "x1": x1, "xref": f"x{number}", "y0": 0, "y1": 1, "yref": f"y{number} domain"}
            look = {"type": "rect", "layer": "below", "fillcolor": color, "line": {"width": 0}}
            self._layout.setdefault("shapes", []).append({**look, **place})

    def add_titles(self, titles: Sequence[str]) -> None:
        """A title above each plot, at its left."""
        for number, text in zip(self._numbers, titles, strict=True):
            place = {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": f"y{number} domain"}
            self.add_annotation(text=text, font={"size": 12}, showarrow=False, yanchor="bottom", **place)

    def update_layout(self, **values: Any) -> None:
        _merge(self._layout, values)

    def update_xaxes(self, *, plot: int | None = None, **values: Any) -> None:
        """Set attributes of the horizontal axis of one plot, of all by default."""
        self._update_axes("xaxis", plot, values)

    def update_yaxes(self, *, plot: int | None = None, **values: Any) -> None:
        self._update_axes("yaxis", plot, values)

    def update_traces(self, **values: Any) -> None:
        for trace in self._data:
            _merge(trace, values)

    def is_empty(self) -> bool:
        """Whether it has no trace."""
        return not self._data

    def has_range(self) -> bool:
        """Whether the range of the vertical axis was set."""
        return self._layout.get("yaxis", {}).get("range") is not None

    def is_titled(self) -> bool:
        """Whether the vertical axis has a title."""
        return "title" in self._layout.get("yaxis", {})

    def built(self) -> go.Figure:
        """The figure, unchecked, without the theme's defaults, which the browser adds."""
        layout = {"template": {"layout": {}}, **self._layout}
        return go.Figure(data=self._data, layout=layout, _validate=False)

    def _add(self, kind: str, plot: int, trace: dict[str, Any]) -> None:
        number = self._numbers[plot - 1]
        axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"} if number else {}
        self._data.append({"type": kind, **axes, **{k: v for k, v in trace.items() if v is not None}})

    def _update_axes(self, kind: str, plot: int | None, values: dict[str, Any]) -> None:
        for number in self._numbers if plot is None else [self._numbers[plot - 1]]:
            # A title in a string of its own is Plotly's shorthand in Python, unknown to the browser.
            titled = {"title": {"text": values["title"]}} if "title" in values else {}
            _merge(self._layout.setdefault(f"{kind}{number}", {}), {**values, **titled})


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        elif value is not None:
            into[name] = dict(value) if isinstance(value, dict) else value
