"""PCIe: how busy the link is, with what, and how near it comes to the ceiling of copies back to back."""

from __future__ import annotations

import numpy as np
import streamlit as st
from twofold.telemetry import queries

from dashboard import cpu_only, formats, frame, parts
from dashboard.figures import link
from dashboard.parts import Shown
from dashboard.view import View
from dashboard.window_rows import WindowRows, window_rows

LANE_STEPS = 4  # latest steps with copies, whose lanes are drawn


def body(view: View) -> None:
    if not parts.has_level(view, "expert"):
        return
    found = window_rows(view)
    if not view.run.has_slots:
        cpu_only.explain(
            "PCIe charts do not apply: this run has no expert slots on a GPU, so no expert is copied."
        )
        cpu_only.bandwidth(view, found)
        return
    if not len(found.copies):
        parts.note(
            "No expert was copied in this window. Send a request, or choose a longer window in the sidebar."
        )
        return
    costs = queries.run_costs(view.run)
    ceiling = None if costs is None else costs.link
    mean = float(found.copies.size_bytes.mean())
    highest = None if ceiling is None else _ceiling(view, ceiling, mean)
    _figures(view, found, highest)
    st.caption(_coverage(found))
    with parts.card(st, "pcie-1", f"Bytes copied over PCIe against the ceiling, GB/s{view.emulated}"):
        parts.chart(
            link.rates(
                found.link,
                ceiling=highest,
                alone=None if ceiling is None or view.run.emulated else float(ceiling.bytes_per_s(mean)),
            ),
            key="rates",
            alt="Bytes per second over PCIe by reason, and the ceiling",
            advice="At the solid line the link is full: larger copies or fewer uploads help, a faster slot does not.",
            note=_ceiling_note(view, ceiling, mean),
        )
    _use(view, found)
    _links(view, found)
    _sizes(view, found, ceiling)


def _ceiling(view: View, ceiling: queries.LinkCeiling, mean: float) -> float:
    """Highest rate of copies back to back, bytes per second.

    On a virtual clock each copy has its latency; a real link hides it behind the copy before.
    """
    return float(ceiling.bytes_per_s(mean)) if view.run.emulated else ceiling.bandwidth_gbps * 1e9


def _ceiling_note(view: View, ceiling: queries.LinkCeiling | None, mean: float) -> str:
    if ceiling is None:
        return "No ceiling is drawn: the run recorded no calibrated figures (twofold calibrate)."
    alone = (
        f"A copy of {formats.size(mean)}, the mean, takes {ceiling.latency_us:.0f} µs of latency and "
        f"{mean / ceiling.bandwidth_gbps / 1e3:.1f} µs of transfer"
    )
    reached = f"at most {float(ceiling.bytes_per_s(mean)) / 1e9:.2f} of {ceiling.bandwidth_gbps:.1f} GB/s"
    if view.run.emulated:
        return f"{alone}: back to back {reached}."
    return (
        f"Ceiling: the calibrated {ceiling.bandwidth_gbps:.1f} GB/s of copies back to back. {alone}: alone "
        f"{reached}."
    )


def _coverage(found: WindowRows) -> str:
    """The steps that the page is about."""
    steps = found.copied_steps
    since, until = (formats.moment(float(steps.started_s[at])) for at in (0, -1))
    text = (
        f"Covers {len(steps):,} steps from {since} to {until}, and all {len(found.copies):,} copies that they "
        "decided."
    )
    if len(steps) < len(found.steps):
        text += f" The window has {len(found.steps):,} steps: only its latest {queries.MAX_COPIES:,} copies are read."
    return text


def _use(view: View, found: WindowRows) -> None:
    left, right = st.columns(2)
    with parts.card(left, "pcie-2", f"Busy share of the link{view.emulated}"):
        parts.chart(
            link.busy(found.link),
            key="busy",
            alt="Share of the steps' time in which the link copied",
            advice="Near 100 %: uploads wait for one another; raise the slots or choose --policy payback.",
        )
    with parts.card(right, "pcie-3", f"Lanes of the last {LANE_STEPS} steps with copies{view.emulated}"):
        parts.chart(
            link.lanes(link.latest(found.copies, num_steps=LANE_STEPS)),
            key="lanes",
            alt="Copies on the demand lane and the background lane over time",
            advice="Gaps are idle link time. A full demand lane delays layers; a full background lane only admissions.",
        )


def _links(view: View, found: WindowRows) -> None:
    """Each device's link, where there are several: a slow or idle one is seen at once."""
    names = view.run.devices
    if len(names) < 2:
        return
    clock_us = max(float(found.copied_steps.step_us.sum()), 1e-9)
    rows = [
        [
            names[link.device],
            f"{link.num_copies:,}",
            formats.size(link.num_bytes),
            formats.percent(link.copying_us / clock_us),
            f"{link.bytes_per_s / 1e9:.2f}" if link.num_copies else formats.NOTHING,
        ]
        for link in queries.copies_by_device(found.copies, len(names))
    ]
    with parts.card(st, "pcie-devices"):
        head = ["device", "copies", "bytes", "link busy", "GB/s copying"]
        parts.table(head, rows, name=f"Links of the devices{view.emulated}")


def _sizes(view: View, found: WindowRows, ceiling: queries.LinkCeiling | None) -> None:
    left, right = st.columns(2)
    if ceiling is not None:
        with parts.card(left, "pcie-4", f"Rate while copying, by copy size{view.emulated}"):
            parts.chart(
                link.size_curve(ceiling, found.reasons),
                key="curve",
                alt="Calibrated rate of a copy alone by its size, and the rate reached by each reason",
                advice="Left of the bend, latency decides: larger experts per copy would be faster. Points below the "
                "line: calibrate again.",
            )
    with parts.card(right if ceiling is not None else left, "pcie-5", "Copy sizes"):
        parts.chart(
            link.sizes(found.copies),
            key="sizes",
            alt="Number of copies by size and reason",
            advice="One bar: all experts have one format. Many small copies: the link pays its latency often.",
        )
    with parts.card(st, "pcie-6", f"Demand against prefetch and admission{view.emulated}"):
        parts.wide(_table(view, found, ceiling), "Copies by reason")
        st.html(
            '<p class="tf-advice"><b aria-hidden="true">→</b> Many uploads never used: try --prefetch off, or compare '
            "policies on Cache. Long waits of demand copies: too much in the background.</p>"
        )


def _figures(view: View, found: WindowRows, highest: float | None) -> None:
    clock_s = float(found.copied_steps.step_us.sum()) / 1e6
    rate = float(found.copies.size_bytes.sum()) / clock_s if clock_s else None
    busy_us = float(np.nansum(found.link.busy_share * _clock_us(found)))
    outcomes = found.paybacks.outcome
    wasted = float((outcomes == queries.UploadOutcome.WASTED).mean()) if len(outcomes) else None
    parts.metrics(
        Shown(
            f"Link busy{view.emulated}",
            formats.percent(busy_us / clock_s / 1e6 if clock_s else None),
            "Share of the time in steps in which the link copied.",
            "of the time in steps",
        ),
        Shown(
            f"PCIe traffic{view.emulated}",
            formats.link_rate(rate),
            "Per second in steps, on the run's clock.",
            None if highest is None or rate is None else f"{rate / highest:.0%} of ceiling",
        ),
        Shown("Copies", f"{len(found.copies):,}"),
        Shown("Median copy", formats.size(float(np.median(found.copies.size_bytes)))),
        Shown("Uploads never used", formats.percent(wasted), "Lost their slot before any token used them."),
    )


def _clock_us(found: WindowRows) -> np.ndarray:
    """Clock time of the steps of each bucket of `link`."""
    steps, num = found.copied_steps, len(found.link.at_s)
    return np.bincount(np.arange(len(steps)) * num // max(1, len(steps)), steps.step_us, num)


def _table(view: View, found: WindowRows, ceiling: queries.LinkCeiling | None) -> str:
    rows = []
    for total in found.reasons:
        if not total.num_copies:
            continue
        limit = (
            "–"
            if ceiling is None
            else f"{total.bytes_per_s / _ceiling(view, ceiling, total.num_bytes / total.num_copies):.0%}"
        )
        rows.append(
            f'<tr><td class="tf-experts">{link.REASON_NAMES[total.reason]}</td><td>{total.num_copies:,}</td>'
            f"<td>{formats.size(total.num_bytes)}</td><td>{formats.size(total.median_bytes)}</td>"
            f"<td>{formats.microseconds(total.median_wait_us)}</td><td>{total.bytes_per_s / 1e9:.2f}</td>"
            f"<td>{limit}</td><td>{formats.percent(link.unused_share(found.paybacks, total.reason))}</td></tr>"
        )
    names = ("copies", "bytes", "median size", "median wait", "GB/s copying", "of ceiling", "never used")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<table class="tf-layers"><thead><tr><th class="tf-experts">reason</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


frame.live_page(
    "PCIe",
    "Experts that the cache misses can be copied to the GPU. How busy is the link, and did the copies pay?",
    body,
)
