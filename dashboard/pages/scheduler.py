"""Scheduler: the plans it chose, the plans it priced, and how its predictions compare with the measured times."""

from __future__ import annotations

import streamlit as st
from twofold.telemetry import queries
from twofold.tools.lab import recorded_run

from dashboard import cpu_only, draft_cards, formats, frame, parts, slow_layers
from dashboard.figures import scheduler
from dashboard.parts import Shown
from dashboard.view import View
from dashboard.window_rows import WindowRows, computed_rows


def body(view: View) -> None:
    found = computed_rows(view)
    if found is None:
        return
    _figures(view, found)
    if view.run.has_slots:
        _plans(view, found)
    else:
        cpu_only.explain(
            "Plans do not apply: without expert slots every expert of every layer runs on the CPU."
        )
        cpu_only.bandwidth(view, found)
    _estimates(view, found)
    draft_cards.cards(view)
    slow_layers.card(view, found)
    st.caption(
        f"Computed from {found.extent}. Whole steps that took longest, and why: "
        f"[Slow steps](slow_steps?run={view.run.run_id})."
    )


def _figures(view: View, found: WindowRows) -> None:
    layers = found.rows.layers
    decode = layers.is_decode
    missed = decode & (layers.num_cpu + layers.num_fetched > 0)
    settings = queries.run_settings(view.run)
    shown = [
        Shown("Layers of decode steps", f"{int(decode.sum()):,}"),
        Shown(
            f"Median layer{view.emulated}",
            formats.microseconds(float(_median(layers.layer_us[decode]))),
            "A layer's experts, from the router's output to the joined result.",
        ),
    ]
    if view.run.has_slots:
        share = float(missed.sum() / decode.sum()) if decode.any() else None
        fetched = int(layers.num_fetched[missed].sum())
        misses = fetched + int(layers.num_cpu[missed].sum())
        shown += [
            Shown("Layers with misses", formats.percent(share)),
            Shown(
                "Misses fetched",
                formats.percent(fetched / misses if misses else None),
                "Copied and run on the GPU; the others ran on the CPU.",
            ),
        ]
    deferred = settings.get("num_deferred_experts")
    if deferred not in (None, 0, "0", "off"):
        shown.append(
            Shown("Deferred experts", f"{deferred}", "--num-deferred-experts: they join the next layer.")
        )
    drafted, accepted = view.query(queries.speculation)
    if drafted:
        shown.append(
            Shown(
                "Drafts accepted",
                formats.percent(accepted / drafted),
                f"{accepted:,} of {drafted:,} draft tokens.",
            )
        )
    parts.metrics(*shown)


def _median(values: queries.F64) -> float:
    return float(sorted(values)[len(values) // 2]) if len(values) else float("nan")


def _plans(view: View, found: WindowRows) -> None:
    layers = found.rows.layers
    plans = queries.usual_plans(layers)
    left, right = st.columns(2)
    with parts.card(left, "scheduler-1", "Plan mix: misses of a layer, and how many were fetched"):
        parts.chart(
            scheduler.plan_mix(queries.plan_mix(layers)),
            key="mix",
            alt="Share of layers by number of misses and number fetched",
            advice="All in the first column: an upload is dearer than the CPU here. Long rows of misses: more slots.",
        )
    with parts.card(right, "scheduler-2", f"Alternatives that were priced{view.emulated}"):
        if not plans:
            parts.note("Every layer of these steps had all its experts on the GPU.")
            return
        number = st.selectbox(
            "Layers with",
            range(len(plans)),
            format_func=lambda at: _plan_name(plans[at]),
            key="plan",
        )
        plan = plans[number]
        shape, machine = recorded_run.shape_of(view.run), recorded_run.machine_of(view.run)
        prices = None
        if shape is not None and machine is not None:
            prices = recorded_run.plan_prices(
                shape, machine, num_hits=plan.num_hits, num_misses=plan.num_misses
            )
        parts.chart(
            scheduler.alternatives(prices, plan),
            key="alternatives",
            alt="Predicted and recorded layer time by number of misses fetched, and how often each was chosen",
            advice="Chosen is not the lowest bar: the link was not idle, or the fetch was kept for later steps.",
            note="" if prices else "No prices: the run recorded no figures of its cost model.",
        )


def _plan_name(plan: queries.UsualPlan) -> str:
    hits = "1 hit" if plan.num_hits == 1 else f"{plan.num_hits} hits"
    misses = "1 miss" if plan.num_misses == 1 else f"{plan.num_misses} misses"
    return f"{hits}, {misses} ({plan.num_layers:,} layers)"


def _estimates(view: View, found: WindowRows) -> None:
    layers = found.rows.layers
    if view.run.emulated:
        with parts.card(st, "scheduler-3", "Predicted against measured"):
            parts.note("Does not apply: on the emulated clock a layer takes exactly the predicted time.")
        return
    if not (layers.predicted_us > 0).any():
        with parts.card(st, "scheduler-3", "Predicted against measured"):
            parts.note(
                "Nothing was predicted. Run `twofold calibrate` once on this machine, then start the server."
            )
        return
    left, right = st.columns(2)
    with parts.card(left, "scheduler-3", "Predicted against measured layer times"):
        parts.chart(
            scheduler.estimated_measured(layers.predicted_us, layers.layer_us),
            key="predicted",
            alt="Density of layers by predicted and measured time",
            advice="A cloud off the diagonal: calibrate again. A tail above it: another process disturbs.",
        )
    with parts.card(right, "scheduler-4", "Residuals by layer"):
        found_residuals = queries.layer_residuals(layers, found.rows.num_layers)
        parts.chart(
            scheduler.residuals(found_residuals),
            key="residuals",
            alt="Measured against predicted time by layer, median and percentiles",
            advice="One layer off: its format differs from the calibrated one. All off alike: calibrate again.",
            note=f"{found_residuals.num_layers_measured:,} layers of steps.",
        )


frame.live_page(
    "Scheduler",
    "For each layer the scheduler prices every number of misses to fetch, and takes the cheapest. Was it right?",
    body,
)
