"""Tables as text and self-contained HTML pages (inline SVG, no scripts, no network)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError

_COLOURS: Final = (
    "#0b6e4f",
    "#c8553d",
    "#2f4b7c",
    "#a05195",
    "#e0a030",
    "#5a5a5a",
    "#3fa7d6",
    "#8a6d3b",
    "#d45087",
)
_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 300, 60, 24


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
        """A table of `rows`; `columns` has the format of each column's cells, such as "{slots:.0%}"."""
        return cls(list(columns), [[cell.format_map(row) for cell in columns.values()] for row in rows])

    def text(self) -> str:
        """The table with aligned columns."""
        cells = [list(map(str, self.header))] + [list(map(str, row)) for row in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.header))]
        return "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
        )

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(str(c))}</th>" for c in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>" for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def line_plot(title: str, series: Mapping[str, Sequence[tuple[float, float]]], y_label: str) -> str:
    """One SVG: share of slots on x, `y_label` on y, a line per series."""
    points = [p for line in series.values() for p in line]
    top = max((y for _, y in points), default=1.0) * 1.05 or 1.0
    inner_w, inner_h = _WIDTH - _LEFT - 150, _HEIGHT - 2 * _TOP - 12

    def at(x: float, y: float) -> str:
        return f"{_LEFT + x * inner_w:.1f},{_TOP + (1 - y / top) * inner_h:.1f}"

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f'<text x="{_LEFT}" y="14" class="t">{html.escape(title)}</text>',
    ]
    for i in range(5):
        share, level = i / 4, top * i / 4
        y = _TOP + (1 - i / 4) * inner_h
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + inner_w}" y1="{y:.1f}" y2="{y:.1f}" class="g"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{level:.3g}</text>')
        x = _LEFT + share * inner_w
        parts.append(f'<text x="{x:.1f}" y="{_TOP + inner_h + 16}" text-anchor="middle">{share:.0%}</text>')
    parts.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">slots, share of all experts · {html.escape(y_label)}</text>'
    )
    for i, (name, line) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in sorted(line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in line:
            cx, cy = at(x, y).split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
        y_name = _TOP + 14 + 16 * i
        parts.append(f'<text x="{_WIDTH - 140}" y="{y_name}" fill="{colour}">{html.escape(name)}</text>')
    return "".join(parts) + "</svg>"


def write_report(
    path: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    table: Table,
    *,
    value: str,
    notes: Sequence[str] = (),
) -> None:
    """Write a page with a plot of `value` against slots per trace, batch and profile, the whole table, and `notes`."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        where = " · ".join(str(row[k]) for k in ("trace", "profile") if k in row) + f" · batch {row['batch']}"
        line = str(row.get("system", row["policy"]))
        groups.setdefault(where, {}).setdefault(line, []).append((float(row["slots"]), float(row[value])))
    plots = "".join(line_plot(where, series, value.replace("_", " ")) for where, series in groups.items())
    style = (
        "body{font:14px/1.5 system-ui,sans-serif;margin:2rem;max-width:72rem}svg{width:36rem;margin:0 1rem 1rem 0}"
        "svg text{font-size:11px}svg .t{font-weight:600;font-size:13px}.g{stroke:#ddd}table{border-collapse:collapse}"
        "td,th{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #eee}"
    )
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{style}</style><h1>{html.escape(title)}</h1>{plots}{table.html()}{_paragraphs(notes)}</html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}; give a path that can be written") from error


def _paragraphs(notes: Sequence[str]) -> str:
    return "".join(f"<p>{html.escape(note)}</p>" for note in notes)
