"""The table of placement strategies: how fast each is at every share of experts on the GPU.

    python -m benchmarks.sweep_placement OUT [--trace TRACE.npz,…] [--profile NAME,…] [--ratio 0,0.1,…] [--no-bundled]

Everything is played on emulated machines, on a virtual clock: the bundled model by the engine itself, and with --trace
models of real shapes by forced routing, each sequence as a request whose first tokens are its prompt. `frequency` and
`payback` start from statistics of other requests than those that are measured. Writes OUT/placement.csv, .md and, where
plotly is installed, .html.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.placement import placement_mask
from twofold.experts.profiles import MachineProfile, load_profile, shipped_profiles
from twofold.tools.lab.replay import names_list, shares_list
from twofold.tools.lab.shapes import ModelShape, find_shape
from twofold.tools.lab.simulate import simulate_system
from twofold.tools.lab.systems import System
from twofold.tools.lab.trace import Trace, load_trace, make_trace

STRATEGIES: Final = ("uniform", "frequency", "front-loading", "random", "dynamic", "payback", "lru")
"""dynamic: uniform, placed anew by each prompt. lru: no strategy, the least recently used expert leaves."""

PROMPT_TOKENS: Final = 64
RATIOS: Final = tuple(step / 10 for step in range(11))

_SUBJECTS: Final = (
    "an old king and his three sons", "a fox who kept a promise", "the mill beyond the dark wood", "two sisters at sea",
    "a giant who feared the dark", "the bird that stole the moon", "a tailor and the queen of snow", "seven ravens",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Speeds are of the emulated machine, in tokens per second."""

    model: str
    profile: str
    strategy: str
    ratio: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    hit_rate: float
    uploads_per_token: float
    clock: str = "virtual"


# ---- real shapes, forced routing -------------------------------------------------------------------------------------


def forced_rows(
    trace: Trace,
    shape: ModelShape,
    profile: MachineProfile,
    ratios: Sequence[float],
    numberings: int = 1,
    strategies: Sequence[str] = STRATEGIES,
) -> Iterator[Row]:
    """The second half of a trace's sequences; the first half is what is known before.

    numberings: expert numbers carry no meaning, but uniform and random depend on them. Results are means over this many
    numberings: the trace's own and random ones.
    """
    for ratio in ratios:
        for strategy in strategies:
            by_number = strategy in ("uniform", "random", "dynamic")
            rows = [
                _forced(_numbered(trace, number), shape, profile, ratio, strategy)
                for number in range(numberings if by_number else 1)
            ]
            figures = ("decode_tokens_per_s", "prefill_tokens_per_s", "hit_rate", "uploads_per_token")
            means = {name: sum(getattr(row, name) for row in rows) / len(rows) for name in figures}
            yield replace(rows[0], **means)


def _numbered(trace: Trace, number: int) -> Trace:
    if number == 0:
        return trace
    rng = np.random.default_rng(number)
    names = rng.permuted(np.tile(np.arange(trace.num_experts), (trace.num_layers, 1)), axis=1)
    ids = names[np.arange(trace.num_layers)[:, None], trace.ids]
    return make_trace(trace.name, ids, trace.probs, trace.offsets, trace.num_experts)


def _forced(trace: Trace, shape: ModelShape, profile: MachineProfile, ratio: float, strategy: str) -> Row:
    played = trace.part("second")
    counts = np.asarray(trace.part("first").usage(), np.int64).reshape(trace.num_layers, trace.num_experts)
    found = simulate_system(
        played,
        System(strategy, "", _rules(strategy)),
        shape,
        profile,
        slots=ratio,
        prompt_tokens=PROMPT_TOKENS,
        prior_usage=_prior(strategy, counts, round(ratio * counts.size)),
    )
    active = found.num_hits + found.num_cpu + found.num_fetched
    decoded = found.num_tokens - found.num_prompt_tokens
    return Row(
        shape.name,
        profile.name,
        strategy,
        ratio,
        decoded / (found.total_us - found.prompt_us) * 1e6,
        found.num_prompt_tokens / found.prompt_us * 1e6,
        found.num_hits / active,
        found.num_uploads / found.num_tokens,
    )


def _rules(strategy: str) -> dict[str, Any]:
    if strategy in ("payback", "lru"):
        return {"policy": strategy}
    threshold = PROMPT_TOKENS if strategy == "dynamic" else 0
    return {
        "policy": "static",
        "shared_pool": True,
        "fixed_placement": True,
        "replace_from": threshold,
    }


def _prior(strategy: str, counts: np.ndarray, slots: int) -> list[float]:
    """Initial priorities: slots are filled with the highest before the start."""
    if strategy in ("payback", "lru"):
        strategy = "frequency"
    first = placement_mask("uniform" if strategy == "dynamic" else strategy, *counts.shape, slots, counts)
    return [float(cell) for cell in first.ravel()]


# ---- the bundled model, by the engine --------------------------------------------------------------------------------


def bundled_rows(
    profile: str, ratios: Sequence[float], model: str = "", requests: int = 4, answer_tokens: int = 120
) -> Iterator[Row]:
    """Greedy answers to half of the subjects; the other half is what is known before."""
    half = len(_SUBJECTS) // 2
    with tempfile.TemporaryDirectory() as folder:
        statistics = Path(folder) / "statistics.npz"
        _record(model, profile, _SUBJECTS[half:][:requests], answer_tokens, statistics)
        for ratio in ratios:
            for strategy in STRATEGIES:
                engine = Engine.load(_config(model, profile, ratio, strategy, statistics))
                yield _measured(engine, strategy, ratio, _SUBJECTS[:half][:requests], answer_tokens)
                engine.close()


def _config(model: str, profile: str, ratio: float, strategy: str, statistics: Path) -> EngineConfig:
    policies = ("payback", "lru")
    static = "uniform" if strategy == "dynamic" else strategy
    return EngineConfig(
        model=model,
        accelerator=f"emulated:{profile}",
        gpu_experts_ratio=ratio,
        policy=strategy if strategy in policies else "payback",
        expert_placement_strategy="payback" if strategy in policies else static,
        init_expert_location=str(statistics) if strategy in ("frequency", *policies) else None,
        enable_dynamic_expert_update=strategy == "dynamic",
        gpu_prefill_token_threshold=PROMPT_TOKENS,
        enable_prefix_caching=False,
        max_total_tokens=2048,
    )


def _record(model: str, profile: str, subjects: Iterable[str], tokens: int, path: Path) -> None:
    engine = Engine.load(EngineConfig(model=model, accelerator="none", max_total_tokens=2048))
    engine._moe.enable_events(True)
    counts = np.zeros((engine.info.num_layers, engine.info.num_experts), np.int64)
    for subject in subjects:
        _ask(engine, subject, tokens)
        events = engine._moe.drain_events()["token_layer"]
        chosen = events["experts"][:, : engine.info.top_k]
        np.add.at(counts, (np.repeat(events["layer"], engine.info.top_k), chosen.ravel()), 1)
    engine.close()
    write_statistics(path, counts)


def _ask(engine: Engine, subject: str, tokens: int) -> tuple[int, float, float]:
    """(prompt tokens, time to the first token, time of the others), on the virtual clock."""
    text = f"Once upon a time there was a story of {subject}. "
    prompt = engine.tokenizer.encode(text * 8)[: 2 * PROMPT_TOKENS]
    times: list[float] = []
    began = engine._run_clock.now_s()
    engine.generate(
        prompt,
        SamplingParams(max_tokens=tokens, ignore_eos=True),
        lambda _: times.append(engine._run_clock.now_s()),
    )
    return len(prompt), times[0] - began, times[-1] - times[0]


def _measured(engine: Engine, strategy: str, ratio: float, subjects: Sequence[str], tokens: int) -> Row:
    prompts = prefill_s = decode_s = 0.0
    for subject in subjects:
        num_prompt, first_s, rest_s = _ask(engine, subject, tokens)
        prompts, prefill_s, decode_s = prompts + num_prompt, prefill_s + first_s, decode_s + rest_s
    placed = engine.stats().placement
    routed = placed.hits + placed.cpu_misses + placed.fetched
    return Row(
        "bundled",
        engine.info.accelerator.removeprefix("emulated:"),
        strategy,
        ratio,
        len(subjects) * (tokens - 1) / decode_s,
        prompts / prefill_s,
        placed.hits / routed,
        placed.uploads / (prompts + len(subjects) * tokens),
    )


# ---- what is written -------------------------------------------------------------------------------------------------


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def markdown(rows: Sequence[Row], value: Callable[[Row], float] = lambda row: row.decode_tokens_per_s) -> str:
    """A table for each model and machine: strategies down, shares across."""
    parts = []
    for model, profile in dict.fromkeys((row.model, row.profile) for row in rows):
        here = [row for row in rows if (row.model, row.profile) == (model, profile)]
        ratios = sorted({row.ratio for row in here})
        cells = {(row.strategy, row.ratio): value(row) for row in here}
        lines = [
            f"{model} on {profile} (emulated), decoded tokens per second:",
            "",
            "| experts in slots | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |",
            "|---|" + "---|" * len(ratios),
        ]
        for strategy in dict.fromkeys(row.strategy for row in here):
            values = " | ".join(f"{cells[strategy, ratio]:.1f}" for ratio in ratios)
            lines.append(f"| {strategy} | {values} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def contradictions(rows: Sequence[Row], tolerance: float = 0.0) -> list[str]:
    """Cells that are not in the expected order: below 60 % frequency and dynamic ≥ uniform ≥ random; payback the
    fastest from 10 to 90 %."""
    cells = {(row.model, row.profile, row.ratio, row.strategy): row.decode_tokens_per_s for row in rows}
    pairs = [
        (a, b, 0.0, 0.6) for a, b in (("frequency", "uniform"), ("dynamic", "uniform"), ("uniform", "random"))
    ]
    pairs += [("payback", other, 0.1, 0.9001) for other in STRATEGIES if other != "payback"]
    found = []
    for model, profile, ratio in dict.fromkeys((row.model, row.profile, row.ratio) for row in rows):
        for above, below, least, most in pairs:
            high, low = (cells.get((model, profile, ratio, each)) for each in (above, below))
            if high is None or low is None or not least <= ratio < most:
                continue
            if high < low * (1 - tolerance):
                found.append(
                    f"{model} on {profile}, {ratio:.0%}: {above} {high:.2f} < {below} {low:.2f} tokens/s"
                )
    return found


def write_figure(rows: Sequence[Row], path: Path) -> None:
    """A page with one plot for each model and machine. Raises ImportError without plotly."""
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    places = list(dict.fromkeys((row.model, row.profile) for row in rows))
    figure = make_subplots(
        len(places), 1, subplot_titles=[f"{model} on {profile} (emulated)" for model, profile in places]
    )
    for number, strategy in enumerate(STRATEGIES):
        for place, where in enumerate(places):
            line = [row for row in rows if (row.model, row.profile) == where and row.strategy == strategy]
            figure.add_trace(
                go.Scatter(
                    x=[100 * row.ratio for row in line],
                    y=[row.decode_tokens_per_s for row in line],
                    name=strategy,
                    legendgroup=strategy,
                    showlegend=place == 0,
                    line={"color": _COLOURS[number]},
                ),
                row=place + 1,
                col=1,
            )
    figure.update_xaxes(title="experts in slots, %")
    figure.update_yaxes(title="decoded tokens/s", rangemode="tozero")
    figure.update_layout(height=420 * len(places), title="Placement strategies, emulated")
    figure.write_html(path, include_plotlyjs=True)


_COLOURS: Final = ("#2f4b7c", "#0b6e4f", "#8a6d3b", "#a0a0a0", "#e0a030", "#c8553d", "#a05195")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="folder for placement.csv, .md and .html")
    parser.add_argument(
        "--trace", type=names_list, default=[], metavar="FILE,…", help="recorded routing (npz)"
    )
    parser.add_argument("--model", metavar="NAME", help="of the traces (default: each trace's name)")
    parser.add_argument(
        "--profile", type=names_list, default=list(shipped_profiles()), metavar="NAME,…", help="machines"
    )
    parser.add_argument("--ratio", type=shares_list, default=list(RATIOS), metavar="R,…", help="0.0-1.0")
    parser.add_argument("--no-bundled", action="store_true", help="leave the bundled model out")
    parser.add_argument(
        "--numberings",
        type=int,
        default=1,
        metavar="N",
        help="of a trace's experts, to take means of (default: 1)",
    )
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for profile in args.profile:
        for path in args.trace:
            trace = load_trace(path)
            shape, machine = find_shape(args.model, trace), load_profile(profile)
            rows += forced_rows(trace, shape, machine, args.ratio, args.numberings)
        if not args.no_bundled:
            rows += bundled_rows(profile, args.ratio)
    write_csv(rows, args.output / "placement.csv")
    (args.output / "placement.md").write_text(markdown(rows), encoding="utf-8")
    try:
        write_figure(rows, args.output / "placement.html")
    except ImportError:
        print("plotly is not installed: no placement.html (pip install 'twofold[dashboard]')")
    print(markdown(rows))
    print("\n".join(contradictions(rows) or ["all cells are in the expected order"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
