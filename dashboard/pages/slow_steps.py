"""Slow steps page: the steps of the run that took longest, each with its likely cause."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from twofold.telemetry import queries

from dashboard import causes, explanation, formats, frame, links, parts
from dashboard.figures.times import PART_NAMES
from dashboard.view import View

_MAX_REQUESTS = 12
"""Requests of a step that are linked."""


def body(view: View) -> None:
    kinds = ["Decode only", "With prompts"]
    kind = st.segmented_control(
        "Steps",
        kinds,
        default=kinds[0],
        key=f"kind-{view.run.run_id}",
        help="A step that computes prompt tokens takes longer by itself.",
    )
    steps = view.slowest_steps(with_prompts=kind == kinds[1])
    found = view.query(queries.slow_steps, tuple(steps))
    if not found:
        parts.note("No such steps yet: send a request.")
        return
    chosen = _choose(view, found)
    with parts.card(st, "slow-step", f"Why step {chosen.step} took this long"):
        _explain(view, chosen)


def _choose(view: View, found: list[queries.SlowStep]) -> queries.SlowStep:
    """The selected step, else that of the address, else the slowest."""
    event = st.dataframe(
        _table(found),
        column_config=_columns(),
        hide_index=True,
        on_select="rerun",
        selection_mode="single-row",
        key=f"slow-{view.run.run_id}-{len(found)}",
    )
    st.caption("The run's slowest steps by the wall clock. Select a row to see its parts below.")
    if event.selection.rows:
        chosen = found[event.selection.rows[0]]
        links.publish("step", chosen.step, found[0].step)
        return chosen
    wanted = links.requested("step")
    linked = [each for each in found if str(each.step) == wanted]
    if wanted is not None and not linked:
        st.warning(f"Step {wanted} is not among these; the slowest is shown.", icon=":material/search_off:")
    return linked[0] if linked else found[0]


def _table(found: list[queries.SlowStep]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "step": [each.step for each in found],
            "time": [formats.moment(each.started_s) for each in found],
            "wall": [each.figures.times.wall_us / 1e3 for each in found],
            "usual": [each.usual.times.wall_us / 1e3 for each in found],
            "part": [_largest_part(each) for each in found],
            "cause": [_cause(each) for each in found],
        }
    )


def _columns() -> dict[str, object]:
    number = st.column_config.NumberColumn
    return {
        "step": number("step", width="small", pinned=True),
        "wall": number("wall, ms", format="%.2f"),
        "usual": number("usual, ms", format="%.2f", help="Median of the 64 steps before and after it."),
        "part": st.column_config.TextColumn(
            "largest part", help="The part that grew most above its own median."
        ),
        "cause": st.column_config.TextColumn("cause", width="large"),
    }


def _largest_part(step: queries.SlowStep) -> str:
    return PART_NAMES[causes.largest_part(step.figures.times.parts_us, step.usual.times.parts_us)]


def _cause(step: queries.SlowStep) -> str:
    if step.figures.times.wall_us < causes.LONGER * step.usual.times.wall_us:
        return "as long as usual"
    return causes.cause_text(step.figures, step.usual)


def _explain(view: View, step: queries.SlowStep) -> None:
    figures = step.figures, step.usual
    st.markdown("\n".join(f"- {sentence}" for sentence in causes.sentences(*figures)))
    parts.wide(explanation.step_time_bars(figures, None), "Step time by part")
    tokens = view.query(queries.tokens_of_step, step.step)
    if not tokens:
        st.caption("The requests of a step are stored at telemetry level expert.")
        return
    linked = ", ".join(
        f"[{number} (token {position})](requests?run={view.run.run_id}&request={number}&token={position})"
        for number, position in tokens[:_MAX_REQUESTS]
    )
    more = f" and {len(tokens) - _MAX_REQUESTS:,} more" if len(tokens) > _MAX_REQUESTS else ""
    st.markdown(f"Requests in this step: {linked}{more}.")


frame.live_page(
    "Slow steps",
    "A step computes the next token of every running request. These took longest, and this is why.",
    body,
    refresh=False,
)
