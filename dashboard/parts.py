"""The pieces that pages are made of: figures, cards, charts, legends and notes."""

from __future__ import annotations

import csv
import functools
import html
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any, Final

import streamlit as st
from twofold.telemetry import queries

from dashboard import controls, formats, palette
from dashboard.figures import base
from dashboard.figures.chart import Chart
from dashboard.view import View

_BUTTONS: Final = {
    "displayModeBar": "hover",
    "displaylogo": False,
    "modeBarButtons": [["toImage"]],
    "toImageButtonOptions": {"filename": "twofold", "scale": 2},
}
"""Plotly's settings: at the pointer, a button that saves the chart as a picture."""


@dataclass(frozen=True)
class Shown:
    """A figure on a page."""

    label: str
    value: str
    help: str | None = None
    second_line: str | None = None
    """Small, below the value: the same figure on another clock."""


def metrics(*figures: Shown, key: str = "figures") -> None:
    """A row of figures; `key` is unique on the page and begins with "figures"."""
    with st.container(key=key, horizontal=True):
        for shown in figures:
            st.metric(
                shown.label,
                shown.value,
                delta=shown.second_line,
                delta_color="off",
                delta_arrow="off",
                help=shown.help,
                border=True,
            )


def card(place: Any, name: str, title: str = "") -> Any:
    """A bordered box within `place` (the page itself or a column); `name` is unique on the page."""
    box = place.container(border=True, key=f"card-{name}")
    if title:
        box.markdown(f"**{title}**")
    return box


def chart(
    figure: Chart,
    *,
    key: str,
    alt: str,
    advice: str,
    note: str = "",
    lost: Sequence[queries.LostSteps] = (),
) -> None:
    """A Plotly figure in the theme's colours, and below it one line that says what to do about what it shows.

    Args:
        key: unique on the page; keeps the chart in place between refreshes.
        alt: what the chart shows, for screen readers.
        advice: what an operator does when the chart looks good or bad.
        note: what else the viewer must know, such as a sum.
        lost: stretches of a time series to shade.
    """
    base.shade_lost(figure, lost)
    figure.update_layout(modebar={"bgcolor": base.TRANSPARENT})
    shown: dict[str, Any] = {"theme": "streamlit", "alt": alt, "config": _BUTTONS}
    if figure.covers_window:
        # A key of the window's own: the brush that chose it is not drawn in the new one.
        key = f"{controls.window_name()}-{key}"
        shown |= {"on_select": functools.partial(controls.brush, key), "selection_mode": "box"}
    st.plotly_chart(figure.built(), key=key, **shown)
    before = f"{html.escape(note)}<br>" if note else ""
    st.html(f'<p class="tf-advice">{before}<b aria-hidden="true">→</b> {html.escape(advice)}</p>')


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, name: str, texts: Collection[int] = (0,)
) -> None:
    """A table whose columns `texts` are left-aligned and wrap; on a narrow screen it scrolls sideways by itself."""
    classes = [' class="tf-text"' if column in texts else "" for column in range(len(head))]
    titles = "".join(
        f'<th scope="col"{each}>{html.escape(title)}</th>' if title else "<td></td>"
        for title, each in zip(head, classes, strict=True)
    )
    cells = [
        "".join(f"<td{each}>{html.escape(cell)}</td>" for cell, each in zip(row, classes, strict=True))
        for row in rows
    ]
    wide(
        f'<table class="tf-layers tf-texts"><caption>{html.escape(name)}</caption><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>",
        name,
    )


def wide(markup: str, name: str) -> None:
    """An HTML table that scrolls sideways by itself on a narrow screen, and a button that saves it as CSV.

    `name` is unique on the page, and for screen readers.
    """
    st.html(
        f'<div class="tf-wide" tabindex="0" role="region" aria-label="{html.escape(name)}">{markup}</div>'
    )
    cells, text = _Cells(), io.StringIO()
    cells.feed(markup)
    csv.writer(text).writerows(cells.rows)
    st.download_button(
        "CSV",
        text.getvalue(),
        f"{name}.csv",
        "text/csv",
        key=f"csv-{name}",
        icon=":material/download:",
        type="tertiary",
        on_click="ignore",
    )


class _Cells(HTMLParser):
    """The texts of an HTML table's cells by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def devices(view: View, key: str) -> None:
    """A card with what each device did, where a run has several."""
    uses = view.query(queries.device_uses)
    if len(uses) < 2:
        return
    runs = max(sum(each.num_runs for each in uses), 1)
    rows = [
        [
            each.name,
            formats.NOTHING if each.num_slots is None else f"{each.num_slots:,}",
            f"{each.num_runs:,}",
            formats.percent(each.num_runs / runs),
            f"{each.num_uploads:,}",
            formats.size(each.upload_bytes),
        ]
        for each in uses
    ]
    with card(st, key):
        head = ["device", "slots", "experts run", "share", "uploads", "copied"]
        table(head, rows, name="Devices, whole run")
        st.caption("Experts that a device ran count for each token. The CPU ran the others.")


def note(text: str) -> None:
    """Why there is nothing to show, in a box."""
    st.info(text, icon=":material/hourglass_empty:")


def has_level(view: View, level: queries.TelemetryLevel) -> bool:
    """Whether the run was recorded at telemetry level `level` or a finer one; if not, the page says so."""
    missing = queries.needs_level(view.run, level)
    if missing:
        note(missing)
    return missing is None


def placement_key() -> None:
    """The legend of placements, the same on every page."""
    entries = [(palette.PLACEMENT_COLORS[place], base.PLACEMENT_NAMES[place]) for place in base.STACK_ORDER]
    entries.append((palette.UNUSED, "unused"))
    st.html(
        "".join(
            f'<span class="tf-key"><i style="background:{color}"></i>{name}</span>' for color, name in entries
        )
    )


def header(view: View) -> None:
    """The run's model and settings, whether it is live, lost events, and whether its times are emulated."""
    run = view.run
    if run.emulated and run.kind == "training":
        st.warning("**Emulated.** Planned for an emulated GPU. The CPU computes, and all times are measured.")
    elif run.emulated:
        st.warning(
            f"**Emulated.** This machine emulates the GPU: `{run.accelerator}`. Uploads, evictions and answers are "
            "real, but the CPU computes them. GPU and PCIe times are predicted by a cost "
            "model on a virtual clock, not measured. For measured times restart the server with `--accelerator none` "
            "(all experts on the CPU), or `cuda` on a machine with an NVIDIA GPU.",
            icon=":material/science:",
        )
    facts = [f"{run.num_layers} MoE layers × {run.num_experts} experts, top-{run.top_k}"]
    host = getattr(run, "host", "")
    facts += [f"host <b>{html.escape(host)}</b>"] if host else []
    facts.append(f"accelerator <b>{html.escape(run.accelerator)}</b>")
    if run.has_slots:
        facts.append(f"policy {html.escape(run.policy)}")
        facts.append(f"{run.num_slots:,} of {run.num_layers * run.num_experts:,} experts fit on the GPU")
    else:
        facts.append("every expert runs on the CPU")
    model = html.escape(formats.last_part(run.model))
    named = f"<b>{html.escape(run.run_name)}</b> · " if run.run_name else ""
    st.html(f'<div class="tf-facts">{_pills(view)} &nbsp; {named}<b>{model}</b> · {" · ".join(facts)}</div>')


def _pills(view: View) -> str:
    run = view.run
    if view.live:
        pill = '<span class="tf-pill tf-live">● live</span>'
    else:
        how = "ended" if run.finished_s else "interrupted"
        last_s = run.finished_s or run.last_seen_s
        pill = f'<span class="tf-pill tf-ended">{how} {formats.moment(last_s, with_date=True)}</span>'
    lost = sum(entry.num_events for entry in view.query(queries.dropped))
    if lost:
        pill += f' <span class="tf-pill tf-lost">{lost:,} events lost: figures are too low</span>'
    return pill
