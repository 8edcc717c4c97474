"""The table of placement strategies: how fast each is at every share of experts on the GPU.

    python -m benchmarks placement OUT --trace TRACE.npz,… [--profile NAME,…] [--ratio 0,0.1,…]

Played on emulated machines, on a virtual clock, by forced routing: each recorded sequence is a request whose first
tokens are its prompt. `frequency` and `payback` start from statistics of other requests than those that are measured.
Writes OUT/placement.csv and .md; the dashboard shows the former where TWOFOLD_PLACEMENT_SWEEP names it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from twofold.experts.placement import placement_mask
from twofold.experts.profiles import MachineProfile, load_profile, shipped_profiles
from twofold.tools.lab.replay import names_list, shares_list
from twofold.tools.lab.shapes import ModelShape, find_shape
from twofold.tools.lab.simulate import simulate_system
from twofold.tools.lab.systems import System
from twofold.tools.lab.trace import Trace, load_trace, make_trace

from benchmarks.scenario import Report, Scenario, markdown_table, positive

STRATEGIES: Final = ("uniform", "frequency", "front-loading", "random", "dynamic", "payback", "lru")
"""dynamic: uniform, placed again by each prompt. lru: no strategy, the least recently used expert leaves."""

PROMPT_TOKENS: Final = 64
RATIOS: Final = tuple(step / 10 for step in range(11))


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


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def markdown(rows: Sequence[Row]) -> str:
    """A table for each model and machine: strategies down, shares across."""
    parts = []
    for model, profile in dict.fromkeys((row.model, row.profile) for row in rows):
        here = [row for row in rows if (row.model, row.profile) == (model, profile)]
        ratios = sorted({row.ratio for row in here})
        cells = {(row.strategy, row.ratio): row.decode_tokens_per_s for row in here}
        lines = [
            [strategy, *(f"{cells[strategy, ratio]:.1f}" for ratio in ratios)]
            for strategy in dict.fromkeys(row.strategy for row in here)
        ]
        head = ["experts in slots", *(f"{ratio:.0%}" for ratio in ratios)]
        title = f"{model} on {profile} (emulated), decoded tokens per second:"
        parts.append(f"{title}\n\n{markdown_table(head, lines)}")
    return "\n\n".join(parts) + "\n"


FLAGS: Final[dict[str, Mapping[str, Any]]] = {
    "output": {"type": Path, "metavar": "OUT", "help": "folder for placement.csv and .md"},
    "--trace": {"type": names_list, "default": [], "metavar": "FILE,…", "help": "recorded routing (npz)"},
    "--model": {"metavar": "NAME", "help": "of the traces (default: each trace's name)"},
    "--profile": {
        "type": names_list,
        "default": list(shipped_profiles()),
        "metavar": "NAME,…",
        "help": "machines (default: all shipped)",
    },
    "--ratio": {"type": shares_list, "default": list(RATIOS), "metavar": "R,…", "help": "0.0-1.0"},
    "--numberings": {
        "type": positive,
        "default": 1,
        "metavar": "N",
        "help": "of a trace's experts, to take means of (default: 1)",
    },
}


def check(args: argparse.Namespace) -> None:
    if not args.trace and args.from_report is None:
        raise ValueError("--trace FILE is needed: `twofold lab record` writes one")


def measure(args: argparse.Namespace) -> Report:
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for profile, path in itertools.product(args.profile, args.trace):
        trace = load_trace(path)
        shape, machine = find_shape(args.model, trace), load_profile(profile)
        rows += forced_rows(trace, shape, machine, args.ratio, args.numberings)
    write_csv(rows, args.output / "placement.csv")
    (args.output / "placement.md").write_text(markdown(rows), encoding="utf-8")
    return {"rows": [asdict(row) for row in rows]}


def show(report: Report) -> str:
    return markdown([Row(**row) for row in report["rows"]])


SCENARIO: Final = Scenario(measure, show, FLAGS, check)
