"""Lab: what if this window had run with another policy, with more slots, or on another machine?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import streamlit as st
from twofold.tools.lab import recorded_run

from dashboard import formats, frame, parts
from dashboard.figures import cache, lab
from dashboard.view import View
from dashboard.window_rows import WindowRows, window_rows

LIMIT_S: Final = 20.0  # longest time that the capacity planner computes
_OWN: Final = ""  # the run's own model, or computer
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
    parts.wide(cache.policy_table(results, costs, base), "Policies, replayed")


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
    own_shape, own_host = recorded_run.shape_of(view.run), recorded_run.machine_of(view.run)
    models = ([_OWN] if own_shape is not None else []) + list(recorded_run.SHAPES)
    hosts = ([_OWN] if own_host is not None else []) + list(recorded_run.HOSTS)
    own_model = formats.last_part(view.run.model)
    with st.form("capacity", border=False):
        left, right = st.columns(2)
        model = left.selectbox("Model", models, format_func=lambda name: own_model if name == _OWN else name)
        host = right.selectbox(
            "Computer", hosts, format_func=lambda name: "the computer of this run" if name == _OWN else name
        )
        profile = own_host if host == _OWN else recorded_run.machines([recorded_run.HOSTS[host]])[0]
        assert profile is not None
        target = left.number_input("Tokens/s wanted", 0.1, 10_000.0, 20.0)
        batch = right.number_input("Requests at once", 1, 64, 1, key="capacity-batch")
        pcie = right.selectbox("PCIe of the computer", (None, 3, 4, 5), format_func=_slot)
        requested = st.form_submit_button("Which GPU would I need?", type="primary")
    kept = _kept(view, "capacity")
    if requested:
        shape = own_shape if model == _OWN else recorded_run.SHAPES[model]
        assert shape is not None
        trace = recorded_run.shortened(recorded_run.trace_of(found.routing, view.run))
        if shape.routing != (trace.num_layers, trace.num_experts, trace.top_k):
            trace = recorded_run.routing_like(trace, shape)
        results = _run_once(
            view,
            "capacity",
            recorded_run.plan_cards(
                trace,
                shape,
                profile,
                pcie=pcie or recorded_run.pcie_of(profile),
                batch=int(batch),
                limit_s=LIMIT_S,
            ),
            len(recorded_run.CARDS),
        )
        basis = recorded_run.Basis(
            is_own_model=model == _OWN,
            is_calibrated=host == _OWN and not view.run.emulated,
            num_tokens=found.routing.num_tokens,
        )
        kept = [_Planned(results, basis, own_model if model == _OWN else model, float(target))]
        st.session_state["lab-capacity"] = (view.run.run_id, kept)
    if kept:
        _answer(kept[0])


@dataclass(frozen=True)
class _Planned:
    """Results of the capacity planner, and the question that they answer."""

    results: list[recorded_run.MachineResult | None]
    """By card; None where the model does not fit."""
    basis: recorded_run.Basis
    model: str
    target: float


def _slot(pcie: int | None) -> str:
    return "as its profile says" if pcie is None else f"PCIe {pcie}.0 x16"


def _answer(planned: _Planned) -> None:
    """The smallest card that reaches the wanted speed, in a sentence, and all cards in a chart."""
    fits = [each for each in planned.results if each is not None]
    enough = [each for each in fits if each.tokens_per_s >= planned.target]
    if enough:
        least = min(enough, key=lambda each: (each.vram_gb or 0.0, each.tokens_per_s))
        sure, reasons = planned.basis.confidence(least.tokens_per_s, planned.target)
        st.success(
            f"For {planned.target:g} tokens/s of {planned.model}, take an **{least.machine}**: it is predicted to "
            f"reach {formats.rate(least.tokens_per_s)} tokens/s, with {least.slot_share:.0%} of the experts on the "
            f"card. "
            f"Confidence: **{sure}** ({'; '.join(reasons)}).",
            icon=":material/check_circle:",
        )
    elif fits:
        best = max(fits, key=lambda each: each.tokens_per_s)
        st.warning(
            f"None of these cards reaches {planned.target:g} tokens/s of {planned.model} in this computer. The best, "
            f"{best.machine}, is predicted to reach {formats.rate(best.tokens_per_s)}. Try a smaller weight format "
            "(`twofold quantize`) or a computer with faster memory.",
            icon=":material/block:",
        )
    else:
        st.warning(
            f"None of these cards holds the dense weights of {planned.model}.", icon=":material/block:"
        )
        return
    parts.chart(
        lab.cards(fits, target=planned.target),
        key="lab-capacity",
        alt="Predicted tokens per second by card, and the wanted speed",
        advice="Cards of one size that differ little are limited by the computer's memory or link, not by the card.",
        note=f"{len(fits)} of {len(planned.results)} cards hold the model's dense weights. Of each card's memory, "
        "0.6 GB are left to the driver and 1 GB to the KV cache. Measure before you buy.",
    )


frame.live_page(
    "Lab",
    "What would have happened to the tokens of this window with another cache policy, more slots, or another machine?",
    body,
    refresh=False,
)
