"""Explains one token's latency in sentences and a table. No Streamlit: arrays in, text out."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from twofold.telemetry import queries

from dashboard import causes, formats
from dashboard.figures.times import PART_NAMES
from dashboard.palette import AMOUNT, PLACEMENT_COLORS, faint, text_on

_CHIPS = {place: f"background:{color};color:{text_on(color)}" for place, color in PLACEMENT_COLORS.items()}


SLOW: Final = 5.0
"""Times its median from which a layer is slow enough to look for a cause outside the model."""


def sentences(
    tokens: queries.RequestTokens,
    chosen: int,
    uploads: Sequence[queries.Upload],
    *,
    emulated: bool,
    figures: tuple[queries.StepFigures, queries.StepFigures] | None = None,
) -> list[str]:
    """Facts about token `chosen` (an index into `tokens`), most relevant first.

    Args:
        uploads: its step's.
        figures: those of its step, and the medians of the request's steps.
    """
    counters = None if figures is None else figures[0].counters
    return [
        _duration(tokens, chosen, emulated=emulated),
        *([] if figures is None else causes.sentences(*figures)),
        _batch(tokens, chosen),
        _misses(tokens, chosen),
        _layer(tokens, chosen, None if emulated else counters),
        _link(uploads),
        _estimate(tokens, chosen, emulated=emulated),
    ]


def _duration(tokens: queries.RequestTokens, chosen: int, *, emulated: bool) -> str:
    took_us = float(tokens.wall_us[chosen])
    if np.isnan(took_us):
        return "The duration of its step was not recorded (lost event)."
    text = f"Its step took **{formats.microseconds(took_us)}**, {_compared(tokens.wall_us, took_us)}"
    if not emulated:
        return f"{text}."
    clock_us = float(tokens.step_us[chosen])
    return f"{text}. On the emulated clock: {formats.microseconds(clock_us)}, {_compared(tokens.step_us, clock_us)}."


def _compared(all_us: npt.NDArray[np.float64], took_us: float) -> str:
    median_us = float(np.nanmedian(all_us))
    ratio = took_us / median_us if median_us > 0 else 1.0
    much = "close to" if 0.9 <= ratio <= 1.1 else f"{ratio:.1f} ×"
    return f"{much} this request's median ({formats.microseconds(median_us)})"


def _batch(tokens: queries.RequestTokens, chosen: int) -> str:
    others = int(tokens.batch_tokens[chosen]) - 1
    if others <= 0:
        return "It was the only token of the step."
    usual = int(np.median(tokens.batch_tokens)) - 1
    more = " — a prompt was prefilled in the same step" if others > 2 * max(usual, 4) else ""
    return f"It shared the step with **{others:,} other tokens** (usually {max(usual, 0):,}){more}."


def _misses(tokens: queries.RequestTokens, chosen: int) -> str:
    counts = tokens.num_by_placement.sum(axis=1)
    hits, cpu, fetched = (int(value) for value in counts[chosen])
    missed = counts[:, queries.Placement.CPU] + counts[:, queries.Placement.FETCHED]
    return (
        f"**{cpu + fetched} of its {hits + cpu + fetched} routed experts were not on the GPU** "
        f"(median of this request: {int(np.median(missed))}): {cpu} ran on the CPU, {fetched} were fetched."
    )


def _layer(tokens: queries.RequestTokens, chosen: int, counters: queries.StepCounters | None) -> str:
    times = tokens.layer_us[chosen]
    if np.isnan(times).all():
        return "The times of its experts were not recorded."
    layer = int(np.nanargmax(times))
    share = float(times[layer] / np.nansum(times)) if np.nansum(times) > 0 else 0.0
    usual = float(np.nanmedian(tokens.layer_us[:, layer]))
    took = (
        f"The experts of layer **{layer}** took longest: {formats.microseconds(float(times[layer]))}, "
        f"{share:.0%} of {formats.microseconds(float(np.nansum(times)))} in all layers "
        f"(its median: {formats.microseconds(usual)})"
    )
    if counters is not None and times[layer] >= SLOW * usual > 0:
        return f"{took}: {times[layer] / usual:,.0f} × its median. {cause(counters).capitalize()}."
    if not tokens.num_by_placement[:, :, [queries.Placement.HIT, queries.Placement.FETCHED]].any():
        return f"{took}."  # nothing ran beside the CPU, so nothing waited for it
    waited_for = (
        "the CPU" if tokens.cpu_us[chosen, layer] > tokens.gpu_us[chosen, layer] else "the GPU or PCIe"
    )
    return f"{took}; the layer waited for {waited_for}."


def cause(counters: queries.StepCounters | None) -> str:
    """The likely cause of a slow layer, by the kernel's counters of its step."""
    if counters is not None and counters.involuntary_switches is None and counters.engine_cpu_us is not None:
        return "unknown: the kernel's counters of this step were read with a later one"
    if counters is None or counters.involuntary_switches is None:
        return "unknown: this run recorded no kernel counters"
    steps = round(counters.num_counted_steps or 1)
    where = "in this step" if steps == 1 else f"in this step or the {steps - 1} before it"
    if counters.major_faults:
        return f"{counters.major_faults:,} pages were read from disk {where}: too little memory"
    if counters.involuntary_switches:
        count = counters.involuntary_switches
        times = "once" if count == 1 else f"{count:,} times"
        return (
            f"probably another process: the kernel took a core from the server {times} {where} "
            "(involuntary context switches)"
        )
    return "no counter explains it: no core was taken away and no page was read from disk"


def _link(uploads: Sequence[queries.Upload]) -> str:
    if not uploads:
        return "No expert was copied over PCIe during its step."
    num_experts = "1 expert" if len(uploads) == 1 else f"{len(uploads)} experts"
    total = sum(upload.size_bytes for upload in uploads)
    copying_us = sum(upload.end_us - upload.begin_us for upload in uploads)
    waits_us = max(upload.begin_us - upload.queued_us for upload in uploads)
    demand = sum(upload.reason is queries.UploadReason.DEMAND for upload in uploads)
    return (
        f"Uploads during its step: {num_experts} ({formats.size(total)}) over PCIe in "
        f"{formats.microseconds(copying_us)}, {demand} on demand; "
        f"the longest wait for the link was {formats.microseconds(waits_us)}."
    )


def _estimate(tokens: queries.RequestTokens, chosen: int, *, emulated: bool) -> str:
    if emulated:
        return "No comparison with the cost model: emulated time is its prediction."
    took_us = float(np.nansum(tokens.layer_us[chosen]))
    predicted_us = float(np.nansum(tokens.predicted_us[chosen]))
    if predicted_us <= 0:
        return "The cost model made no prediction for its experts."
    return (
        f"The cost model had predicted {formats.microseconds(predicted_us)} for its experts; "
        f"they took {formats.microseconds(took_us)} ({took_us / predicted_us - 1:+.0%})."
    )


def step_time_bars(
    figures: tuple[queries.StepFigures, queries.StepFigures] | None, queue_s: float | None
) -> str:
    """HTML: the parts of a token's step as bars that sum to it, by the wall clock and, if any, the emulated clock.

    Args:
        figures: those of its step, and the medians of the request's steps.
        queue_s: queue time of its request; None where this is not its first step.
    """
    if figures is None:
        return "<p>The parts of its step are not stored (lost event, or deleted at the database's size limit).</p>"
    waited = (
        ""
        if queue_s is None
        else f"<p>Before this step the request waited {formats.seconds(queue_s)} in the queue.</p>"
    )
    times, usual = figures[0].times, figures[1].times
    emulated = bool(times.emulated_parts_us)
    wall = "the wall clock of this machine, which emulates the GPU" if emulated else "the wall clock"
    tables = [_part_table(wall, times.parts_us, usual.parts_us, times.wall_us)]
    if emulated:
        parts = times.emulated_parts_us, usual.emulated_parts_us
        tables.append(_part_table("the emulated clock", *parts, times.emulated_us))
    return waited + "".join(tables)


def _part_table(
    clock: str, parts_us: Mapping[str, float], usual_us: Mapping[str, float], whole_us: float
) -> str:
    rows = []
    for name, us in sorted(parts_us.items(), key=lambda part: -part[1]):
        if us <= 0:
            continue
        share = us / whole_us if whole_us > 0 else 0.0
        bar = f'<div style="height:0.6em;width:{share:.1%};background:currentColor;opacity:0.35"></div>'
        rows.append(
            f'<tr><td class="tf-experts">{PART_NAMES[name]}</td><td class="tf-experts" style="width:45%">{bar}</td>'
            f"<td>{us:,.0f}</td><td>{share:.1%}</td><td>{usual_us.get(name, 0.0):,.0f}</td></tr>"
        )
    return (
        f'<table class="tf-layers"><thead><tr><th class="tf-experts">the step on {clock}</th><th></th>'
        f"<th>µs</th><th>share</th><th>usual, µs</th></tr></thead><tbody>{''.join(rows)}"
        f'<tr><td class="tf-experts"><b>whole step</b></td><td></td><td><b>{whole_us:,.0f}</b></td><td></td>'
        "<td></td></tr>"
        "</tbody></table>"
    )


def coloured_answer(request: queries.Request, tokens: queries.RequestTokens) -> str:
    """HTML: the recorded text of an answer; the more of a token's experts missed the GPU, the darker its background."""
    pieces: list[str] = json.loads(request.answer_json or "[]")
    counts = tokens.num_by_placement.sum(axis=1)
    missed = counts[:, queries.Placement.CPU] + counts[:, queries.Placement.FETCHED]
    # The step at position p computes the logits of the token at p + 1.
    found = dict(zip((tokens.position + 1).tolist(), missed.tolist(), strict=True))
    most = max(int(missed.max(initial=0)), 1)
    spans = []
    for index, piece in enumerate(pieces):
        misses = found.get(request.prompt_tokens + index)
        shade = "" if misses is None else f"background:{faint(AMOUNT, 0.7 * misses / most)}"
        title = "not recorded" if misses is None else f"{misses} misses"
        spans.append(f'<span style="{shade}" title="{title}">{html.escape(piece)}</span>')
    return f'<div class="tf-answer">{"".join(spans)}</div>'


def layer_table(tokens: queries.RequestTokens, chosen: int, *, emulated: bool) -> str:
    """HTML table, one row per MoE layer: the routed experts with weights and places, and times in µs. Predicted times
    only for real runs."""
    times = [
        ("layer, µs", tokens.layer_us),
        ("predicted, µs", tokens.predicted_us),
        ("CPU part, µs", tokens.cpu_us),
        ("GPU part, µs", tokens.gpu_us),
    ]
    if emulated:
        del times[1]
    head = "".join(f"<th>{name}</th>" for name, _ in times)
    rows = []
    for layer in range(tokens.layer_us.shape[1]):
        figures = "".join(f"<td>{_figure(float(values[chosen, layer]))}</td>" for _, values in times)
        chips = _chips(tokens, chosen, layer)
        rows.append(f'<tr><td>{layer}</td><td class="tf-experts">{chips}</td>{figures}</tr>')
    return (
        '<table class="tf-layers"><thead><tr><th>MoE layer</th><th class="tf-experts">experts</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _figure(value: float) -> str:
    return formats.NOTHING if np.isnan(value) else f"{value:,.1f}"


def _chips(tokens: queries.RequestTokens, chosen: int, layer: int) -> str:
    found = zip(
        tokens.experts[chosen, layer].tolist(),
        tokens.placement[chosen, layer].tolist(),
        tokens.weights[chosen, layer].tolist(),
        strict=True,
    )
    return "".join(
        f'<span class="tf-chip" style="{_CHIPS[queries.Placement(place)]}">'
        f"{expert} <small>{weight:.2f}</small></span>"
        for expert, place, weight in found
        if expert >= 0
    )
