"""Lab: what if this window had run with another policy, with more slots, or on another machine?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import streamlit as st
from twofold.tools.lab import recorded_run

from dashboard import formats, frame, parts
from dashboard.figures import cache, lab
from dashboard.view import View
from dashboard.window_rows import WindowRows, window_rows

LIMIT_S: Final = 20.0  # longest time that the capacity planner computes
_Item = TypeVar("_Item")


def body(view: View) -> None:
    if not parts.has_level(view, "expert"):
        return
    found = window_rows(view)
    before, after = found.halves if len(found.rows) else (None, None)
    if before is None or after is None or not before.num_tokens or not after.num_tokens:
        parts.note(
            "Too few decode tokens in this window. Send a request, or choose a longer window in the sidebar."
        )
        return
    st.caption(
        f"Material: {found.routing.num_tokens:,} recorded decode tokens. Caches are counted on the last "
        f"{after.num_tokens:,}, warmed up on the {before.num_tokens:,} before. All times are predictions on a virtual "
        "clock."
    )
    replay, machine, capacity = st.tabs(["Other policies and slots", "Another machine", "Capacity planner"])
    with replay:
        _replay(view, found)
    with machine:
        _machine(view, found)
    with capacity:
        _capacity(view, found)


def _slots_share(view: View) -> int:
    total = max(1, view.run.num_layers * view.run.num_experts)
    return round(100 * view.run.num_slots / total) if view.run.has_slots else 25


def _run_once(view: View, name: str, items: Iterable[_Item], num_items: int) -> list[_Item]:
    """Compute `items` with a progress bar, and keep them in the session for this run and window."""
    done: list[_Item] = []
    bar = st.progress(0.0, text="Computing …")
    for item in items:
        done.append(item)
        bar.progress(min(1.0, len(done) / num_items), text=f"{len(done)} of {num_items}")
    bar.empty()
    st.session_state[f"lab-{name}"] = (view.run.run_id, done)
    return done


def _kept(view: View, name: str) -> list[Any]:
    """Results of the last computation of this name for this run; empty without one."""
    run_id, done = st.session_state.get(f"lab-{name}", (None, []))
    return done if run_id == view.run.run_id else []


def _replay(view: View, found: WindowRows) -> None:
    before, after = found.halves
    names = recorded_run.policy_names()
    with st.form("replay", border=False):
        policies = st.multiselect(
            "Policies",
            list(names),
            default=[name for name in ("lru", "two-in-eight", "payback", "oracle-payback") if name in names],
            help="  \n".join(f"**{name}**: {text}" for name, text in names.items()),
        )
        left, right = st.columns(2)
        share = left.slider("Slots, % of all experts", 1, 100, _slots_share(view))
        price = right.number_input(
            "Price of an upload, in misses",
            0.0,
            100.0,
            round(recorded_run.upload_price(view.run), 2),
            help="0: uploads cost nothing. The default is the cost model's.",
        )
        requested = st.form_submit_button("Replay", type="primary")
    results = _kept(view, "replay")
    if requested and policies:
        num_slots = max(1, round(share / 100 * view.run.num_layers * view.run.num_experts))
        results = _run_once(
            view,
            "replay",
            recorded_run.replay_policies(
                recorded_run.trace_of(after, view.run),
                policies,
                num_slots=num_slots,
                price=price,
                batch=after.batch,
                warm_up=recorded_run.trace_of(before, view.run),
            ),
            len(policies),
        )
    if not results:
        return
    parts.chart(
        cache.policies(results, recorded=None, uploads=None),
        key="lab-policies",
        alt="Hit rate against uploads per token of each policy",
        advice="Up and to the left is better. Take the policy with the lowest cost: --policy NAME.",
    )
    costs = [each.cost_per_token for each in results]
    base = next((cost for each, cost in zip(results, costs, strict=True) if each.policy == "lru"), costs[0])
    st.html(f'<div class="tf-wide">{cache.policy_table(results, costs, base)}</div>')


def _sizes_known(view: View) -> bool:
    if recorded_run.shape_of(view.run) is not None:
        return True
    parts.note(
        "The sizes of this run's model were not recorded (an older server), so no time can be predicted. Record a new "
        "run, or use `twofold lab simulate --model`."
    )
    return False


def _machine(view: View, found: WindowRows) -> None:
    if not _sizes_known(view):
        return
    own = recorded_run.machine_of(view.run)
    with st.form("machine", border=False):
        machines = st.multiselect(
            "Machines", recorded_run.machine_names(), default=list(recorded_run.machine_names())
        )
        left, right = st.columns(2)
        share = left.slider("Slots, % of all experts", 1, 100, _slots_share(view), key="machine-slots")
        batch = right.number_input("Requests at once", 1, 64, found.routing.batch)
        requested = st.form_submit_button("Simulate", type="primary")
    results = _kept(view, "machine")
    if requested and machines:
        chosen = recorded_run.machines(machines)
        if own is not None and view.run.has_slots and own.name not in machines:
            chosen.append(own)
        results = _run_once(
            view,
            "machine",
            recorded_run.simulate_machines(
                found.routing, view.run, chosen, slots=share / 100, batch=int(batch)
            ),
            len(chosen),
        )
    if not results:
        return
    parts.chart(
        lab.speeds(results),
        key="lab-machines",
        alt="Predicted tokens per second by machine",
        advice="Link near 100 % busy: a faster slot helps more than a faster GPU. Measure before you buy.",
        note="Predicted by the cost model, without sampling, HTTP and other load.",
    )


def _capacity(view: View, found: WindowRows) -> None:
    if not _sizes_known(view):
        return
    with st.form("capacity", border=False):
        left, right = st.columns(2)
        target = left.number_input("Tokens/s wanted", 0.1, 10_000.0, 20.0)
        batch = right.number_input("Requests at once", 1, 64, 1, key="capacity-batch")
        requested = st.form_submit_button("Which GPU would I need?", type="primary")
    results = _kept(view, "capacity")
    if requested:
        names = recorded_run.machine_names()
        results = _run_once(
            view,
            "capacity",
            recorded_run.plan_capacity(
                found.routing, view.run, recorded_run.machines(names), batch=int(batch), limit_s=LIMIT_S
            ),
            len(names) * len(recorded_run.VRAM_GB),
        )
    if not results:
        return
    fits = [each for each in results if each is not None]
    enough = [each for each in fits if each.tokens_per_s >= target]
    if enough:
        least = min(enough, key=lambda each: (each.vram_gb or 0.0, each.tokens_per_s))
        st.success(
            f"A card with **{least.vram_gb:g} GB** on a machine like **{least.machine}** is predicted to reach "
            f"{formats.rate(least.tokens_per_s)} tokens/s ({least.slot_share:.0%} of the experts on the GPU).",
            icon=":material/check_circle:",
        )
    else:
        best = max((each.tokens_per_s for each in fits), default=0.0)
        st.warning(
            f"None of these machines reaches {target:g} tokens/s; the best is predicted to reach {formats.rate(best)}. "
            "Try a smaller weight format (`twofold quantize`).",
            icon=":material/block:",
        )
    parts.chart(
        lab.capacity(fits, target=float(target)),
        key="lab-capacity",
        alt="Predicted tokens per second by VRAM and machine, and the wanted speed",
        advice="Where a line flattens, more VRAM buys nothing: the CPU's memory or the link decides.",
        note=f"{len(fits)} of {len(results)} cards hold the model's dense weights. 1 GB is kept for the KV cache. "
        "Machines differ in CPU, link and GPU; each is tried with every size of VRAM. Measure before you buy.",
    )


frame.live_page(
    "Lab",
    "What would have happened to the tokens of this window with another cache policy, more slots, or another machine?",
    body,
    refresh=False,
)
