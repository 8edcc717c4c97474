"""`twofold lab simulate`: predicted tokens per second of a model on a machine, by system, slots and batch.

The engine's scheduler schedules every layer of a recorded trace, timed by a virtual clock. Also a capacity planner:
--vram selects the slots that fit into given cards. Predictions leave out what the profile does not contain (sampling,
HTTP, a busy machine): measure before you buy. With --prompts the recorded tokens are played as prompts, in chunks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.device_split import device_split, split_slots
from twofold.experts.policies import POLICIES, check_names
from twofold.experts.profiles import MachineProfile, shipped_profiles
from twofold.tools.lab import sweep
from twofold.tools.lab.devices import Steps, systems_of_devices
from twofold.tools.lab.drafting import drafting_rows, read_acceptance
from twofold.tools.lab.explain import where_peers_win
from twofold.tools.lab.replay import (
    Row,
    add_common_arguments,
    counts_list,
    names_list,
    number_list,
    print_rows,
)
from twofold.tools.lab.report import Table
from twofold.tools.lab.run_trace import OWN_MACHINE, sources_of
from twofold.tools.lab.shapes import ModelShape, find_shape
from twofold.tools.lab.sweep import swept
from twofold.tools.lab.systems import SYSTEMS, System
from twofold.tools.lab.trace import Part, Trace


def slots_for_vram(shape: ModelShape, trace: Trace, vram_gb: float, kv_gb: float) -> float:
    """Share of the experts that fits in addition to the dense weights and the KV cache; 0 … 1.

    Raises ConfigError if not even the dense weights fit. One layer's experts are reserved for streaming prompts.
    """
    dense_gb = (shape.dense_bytes_per_layer * trace.num_layers + 2 * shape.head_bytes) / 1e9
    staging_gb = shape.expert_bytes * trace.num_experts / 1e9
    left = vram_gb - dense_gb - kv_gb - staging_gb
    if left < 0:
        raise ConfigError(
            f"--vram {vram_gb:g}: {shape.name} needs {dense_gb + kv_gb + staging_gb:.1f} GB for dense weights, KV "
            "cache and one layer of experts before any expert has a slot; give more or lower --kv-gb"
        )
    return min(1.0, left * 1e9 / (shape.expert_bytes * trace.num_layers * trace.num_experts))


def simulate_system(
    trace: Trace,
    system: System,
    shape: ModelShape,
    profile: MachineProfile,
    *,
    slots: float,
    split: Sequence[float] = (1.0,),
    batch: int = 1,
    prompt_chunk: int = 0,
    prompt_tokens: int = 0,
    prior_usage: Sequence[float] = (),
    upload_price: float = -1.0,
    keep_layer_us: bool = False,
) -> Any:
    """Play the trace; returns the core's SimulationResult. Slots initially hold the most used experts of `prior_usage`.

    slots: share of the experts that fits into all devices together; split: each device's share of those slots.
    prompt_chunk: sequences are prompts, this many tokens per step, one after the other; 0: decode, `batch` at once.
    prompt_tokens: instead, each sequence is a request with this many prompt tokens; its other tokens are decoded alone.
    """
    num_experts = trace.num_layers * trace.num_experts
    return _core.simulate(
        trace.native,
        batch,
        shape.cost_model(profile),
        _core.SchedulerConfig(
            trace.num_layers,
            trace.num_experts,
            trace.top_k,
            split_slots(round(slots * num_experts), split, num_experts),
            prior_usage=list(prior_usage),
            **{"upload_price": upload_price, **system.options},
        ),
        dense_us=shape.dense_us(profile, trace.num_layers),
        token_us=shape.dense_token_us(profile, trace.num_layers),
        prompt_chunk=prompt_chunk,
        prompt_tokens=prompt_tokens,
        keep_layer_us=keep_layer_us,
    )


def simulate_rows(
    trace: Trace,
    systems: Sequence[System],
    shape: ModelShape,
    profile: MachineProfile,
    slots: Sequence[float],
    batches: Sequence[int],
    *,
    part: Part = "second",
    upload_price: float = -1.0,
    prompts: bool = False,
    tensor_split: str | None = None,
) -> Iterator[Row]:
    """One row per batch, size and system. All start with the experts that the other half of the trace used most.

    prompts: `batches` are tokens per prompt chunk. `slots` is the share of experts that fits into all devices together;
    tensor_split divides it. A machine of several devices is compared with each of them alone and a static split.
    """
    played = trace.part(part)
    prior = (trace.part("first") if part == "second" else played).usage()
    for batch in batches:
        steps = Steps(1, batch) if prompts else Steps(batch)
        for share in slots:
            facts = {
                "trace": trace.name,
                "part": part,
                "model": shape.name,
                "profile": profile.name,
                "steps": "prompts" if prompts else "decode",
                "batch": batch,
            }
            split = device_split(tensor_split, profile)
            for system in systems:
                if profile.joined and system.name == "twofold":
                    yield from _device_rows(
                        facts,
                        share,
                        trace=played,
                        shape=shape,
                        profile=profile,
                        split=split,
                        steps=steps,
                        prior=prior,
                        options={"upload_price": upload_price, **system.options},
                    )
                    continue
                result = simulate_system(
                    played,
                    system,
                    shape,
                    profile,
                    slots=share,
                    split=split,
                    batch=steps.batch,
                    prompt_chunk=steps.prompt_chunk,
                    prior_usage=prior,
                    upload_price=upload_price,
                )
                named = {"slots": share, "system": system.name, "policy": system.options["policy"]}
                yield {**facts, **named, **_figures(result, shape)}


def _device_rows(
    facts: Row,
    share: float,
    *,
    trace: Trace,
    shape: ModelShape,
    profile: MachineProfile,
    split: Sequence[float],
    steps: Steps,
    prior: Sequence[float],
    options: Mapping[str, Any],
) -> Iterator[Row]:
    num_experts = trace.num_layers * trace.num_experts
    for name, num_slots, result in systems_of_devices(
        trace,
        shape,
        profile,
        num_slots=round(share * num_experts),
        split=split,
        steps=steps,
        prior_usage=prior,
        options=options,
    ):
        policy = "static" if name.startswith("static") else options["policy"]
        named = {"slots": num_slots / num_experts, "system": name, "policy": policy}
        yield {**facts, **named, **_figures(result, shape)}


def _figures(result: Any, shape: ModelShape) -> Row:
    active = result.num_hits + result.num_cpu + result.num_fetched
    return {
        "tokens_per_s": result.num_tokens / result.total_us * 1e6,
        "hit_rate": result.num_hits / max(1, active),
        "fetched_per_token": result.num_fetched / result.num_tokens,
        "uploads_per_token": result.num_uploads / result.num_tokens,
        "upload_bytes_per_token": result.num_uploads * shape.expert_bytes / result.num_tokens,
        "link_busy": result.link_us / result.total_us,
        "moe_share": result.moe_us / result.total_us,
        "clock": "virtual",
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `twofold lab simulate`."""
    add_common_arguments(parser)
    parser.add_argument(
        "--profile",
        type=names_list,
        default=list(shipped_profiles()),
        metavar="NAME,…",
        help=f"machines: {', '.join(shipped_profiles())} or files (default: all shipped); {OWN_MACHINE}: that of the "
        "telemetry URL's run; NAME+NAME: one machine with both devices, compared with each alone and with a static "
        "split",
    )
    parser.add_argument(
        "--tensor-split",
        metavar="N,N…",
        help="shares of the slots of each device of NAME+NAME machines (default: in proportion to their VRAM)",
    )
    parser.add_argument(
        "--systems",
        type=names_list,
        default=list(SYSTEMS),
        metavar="NAME,…",
        help="; ".join(f"{s.name}: {s.what}" for s in SYSTEMS.values()),
    )
    parser.add_argument(
        "--prompts",
        type=counts_list(65_536),
        metavar="N,…",
        help="prefill the sequences in chunks of N tokens, instead of decoding with --batch",
    )
    parser.add_argument(
        "--no-stream-ahead",
        action="store_true",
        help="no uploads for the next layer of a prefill chunk ahead of time (system twofold)",
    )
    parser.add_argument(
        "--num-deferred-experts",
        type=int,
        default=0,
        metavar="D",
        help="experts that each token may defer (system twofold; docs/explanation/deferral.md; default: 0)",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help=f"cache policy of system twofold instead of its own: {', '.join(POLICIES)}",
    )
    parser.add_argument(
        "--price",
        type=float,
        default=-1.0,
        metavar="R",
        help="price of one upload, in misses (default: the profile's)",
    )
    _add_card_arguments(parser)
    _add_drafting_arguments(parser)
    sweep.add_arguments(parser)


def _add_card_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vram",
        type=number_list(float, "sizes above 0 GB such as 8,12,24", 1e-9, 10_000),
        metavar="GB,…",
        help="VRAM sizes: use the slots that fit into each, instead of --slots",
    )
    parser.add_argument(
        "--kv-gb",
        type=float,
        default=1.0,
        metavar="GB",
        help="VRAM for KV cache and buffers, with --vram (default: 1)",
    )


def _add_drafting_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--acceptance",
        metavar="P[,P…]|DB",
        help="decode with speculation, at this acceptance by position in the draft, or at that of the newest run with "
        "drafts in a telemetry database; compares off, fixed depths and the engine's own choice",
    )
    parser.add_argument(
        "--draft-depths",
        type=counts_list(16),
        default=[1, 2, 3, 4],
        metavar="N,…",
        help="fixed depths to compare, with --acceptance; the engine chooses up to the deepest (default: 1,2,3,4)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the simulations, on Ray with --ray; print a table, or rows with --json, or write a page with --html."""
    if args.acceptance is not None and (args.prompts or args.batch != [1]):
        raise ConfigError("--acceptance decodes one sequence; leave out --prompts and --batch")
    steps = "prompts" if args.prompts else "batch"
    axes = ("traces", "profile", steps, "vram" if args.vram else "slots")
    rows = swept(cell_rows, args, axes if args.ray else axes[:2])
    if args.acceptance is not None:
        table = _drafting_table(rows)
        print_rows(
            rows, args, table, title="Predicted speed with drafts (virtual clock)", value="tokens_per_s"
        )
        return 0
    print_rows(
        rows,
        args,
        _table(rows),
        title="Predicted speed (virtual clock)",
        value="tokens_per_s",
        notes=where_peers_win(rows),
    )
    return 0


def cell_rows(args: argparse.Namespace) -> list[Row]:
    """The rows of these arguments, computed in this process."""
    systems = [
        _system(name, args.policy, args.no_stream_ahead, args.num_deferred_experts) for name in args.systems
    ]
    acceptance = None if args.acceptance is None else read_acceptance(args.acceptance)
    rows: list[Row] = []
    for source in sources_of(args):
        trace = source.trace
        shape = find_shape(args.model, trace)
        cards = dict.fromkeys(args.slots)
        if args.vram:
            cards = {slots_for_vram(shape, trace, gb, args.kv_gb): gb for gb in args.vram}
        for name in args.profile:
            profile = source.profile(name)
            if acceptance is not None:
                found = drafting_rows(
                    trace.part(args.part),
                    systems,
                    shape,
                    profile,
                    list(cards),
                    acceptance=acceptance,
                    depths=args.draft_depths,
                    split=device_split(args.tensor_split, profile),
                    prior_usage=trace.part("first").usage(),
                )
            else:
                found = simulate_rows(
                    trace,
                    systems,
                    shape,
                    profile,
                    list(cards),
                    args.prompts or args.batch,
                    part=args.part,
                    upload_price=args.price,
                    prompts=bool(args.prompts),
                    tensor_split=args.tensor_split,
                )
            rows.extend({**row, "vram_gb": cards[row["slots"]]} if args.vram else row for row in found)
    return rows


def _system(name: str, policy: str | None, no_stream_ahead: bool, num_deferred: int) -> System:
    if name not in SYSTEMS:
        raise ConfigError(f"system {name!r} is unknown; expected one of {', '.join(SYSTEMS)}")
    system = SYSTEMS[name]
    if name != "twofold":
        return system
    options = dict(system.options)
    if policy is not None:
        check_names([policy])
        options["policy"] = policy
    if no_stream_ahead:
        options["stream_ahead_from"] = 0
    if num_deferred:
        options["num_deferred"] = num_deferred
    return System(system.name, system.what, options)


def _table(rows: Sequence[Row]) -> Table:
    shown = [
        {
            **row,
            "steps": f"prompts of {row['batch']}" if row["steps"] == "prompts" else row["batch"],
            "vram": f"{row['vram_gb']:g} GB" if "vram_gb" in row else "-",
        }
        for row in rows
    ]
    columns = {
        "trace": "{trace}",
        "machine": "{profile}",
        "batch": "{steps}",
        "slots": "{slots:.0%}",
        "VRAM": "{vram}",
        "system": "{system}",
        "tokens/s": "{tokens_per_s:.1f}",
        "hit rate": "{hit_rate:.1%}",
        "uploads/token": "{uploads_per_token:.2f}",
        "link busy": "{link_busy:.0%}",
    }
    return Table.of(shown, columns)


def _drafting_table(rows: Sequence[Row]) -> Table:
    shown = [{**row, "vram": f"{row['vram_gb']:g} GB" if "vram_gb" in row else "-"} for row in rows]
    columns = {
        "trace": "{trace}",
        "machine": "{profile}",
        "slots": "{slots:.0%}",
        "VRAM": "{vram}",
        "system": "{system}",
        "drafts": "{drafts}",
        "tokens/s": "{tokens_per_s:.1f}",
        "x off": "{speed:.2f}",
        "drafted/step": "{drafted_per_step:.2f}",
        "accepted": "{accepted:.0%}",
        "tokens/step": "{tokens_per_step:.2f}",
    }
    return Table.of(shown, columns)
