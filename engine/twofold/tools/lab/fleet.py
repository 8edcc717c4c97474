"""`twofold lab fleet`: how many replicas of which machine hold an objective for a load.

A discrete-event simulation (`fleet_simulation`) of 1, 2, 3 … replicas. Times of steps come from a recorded run of the
machine, or from the simulation of a trace on a profile. The load comes from recorded requests, or is drawn.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.experts.profiles import load_profile, shipped_profiles
from twofold.tools.lab import sweep
from twofold.tools.lab.fleet_simulation import Arrival, ReplicaLimits, Served, StepTimes, simulate_fleet
from twofold.tools.lab.replay import Row, names_list, print_rows
from twofold.tools.lab.report import Table
from twofold.tools.lab.run_trace import source_of
from twofold.tools.lab.shapes import MODEL_HELP, find_shape
from twofold.tools.lab.simulate import simulate_system
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.loadgen.arrivals import arrivals_within
from twofold.tools.loadgen.lengths import CHAT_INPUT, CHAT_OUTPUT
from twofold.tools.loadgen.slo import Slo, parse_slos

_BATCHES: Final = (1, 2, 4, 8, 16)
_CHUNKS: Final = (32, 128, 512)
"""Points at which a profile's step times are simulated: decoding sequences, prompt tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `twofold lab fleet`."""
    parser.add_argument(
        "machines",
        type=names_list,
        metavar="MACHINE,…",
        help="telemetry URLs, whose last run gives measured step times, and profiles "
        f"({', '.join(shipped_profiles())}, or files), for which --trace is simulated",
    )
    parser.add_argument(
        "--slo", required=True, metavar="LIMITS", help="objectives, e.g. ttft_p95_ms=500,tpot_p95_ms=50"
    )
    parser.add_argument(
        "--arrivals",
        metavar="URL",
        help="telemetry URL: its complete requests of all runs are the load (default: drawn)",
    )
    parser.add_argument(
        "--speedup", type=float, default=1.0, metavar="X", help="play --arrivals X times as fast"
    )
    parser.add_argument(
        "--rate", type=float, default=1.0, metavar="R", help="drawn load: requests per second (default: 1)"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="drawn load: its length (default: 300)"
    )
    parser.add_argument(
        "--input-len", type=int, default=2048, metavar="N", help="drawn load: most prompt tokens"
    )
    parser.add_argument(
        "--output-len", type=int, default=512, metavar="N", help="drawn load: most answer tokens"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the drawn load and of the router"
    )
    parser.add_argument(
        "--max-replicas", type=int, default=16, metavar="N", help="most replicas to try (default: 16)"
    )
    _add_replica_arguments(parser)
    sweep.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON array of rows")
    parser.set_defaults(html=None)


def _add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    default = EngineConfig
    parser.add_argument(
        "--trace", metavar="TRACE", help="routing that is simulated on profiles: a trace, or a telemetry URL"
    )
    parser.add_argument(
        "--slots",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the experts that has a slot on profiles (default: 0.5)",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs, metavar="N")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=default.max_num_batched_tokens, metavar="N"
    )
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=1 << 30,
        metavar="N",
        help="tokens for which one KV cache has pages (default: unlimited)",
    )
    parser.add_argument(
        "--overhead-ms",
        type=float,
        default=2.0,
        metavar="X",
        help="time of router and HTTP per request (default: 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Find the smallest fleet of each machine; print a table, or rows with --json."""
    _check(args)
    rows = sweep.swept(cell_rows, args, ("machines",))
    print_rows(
        rows,
        args,
        _table(rows),
        title="Replicas for a load (simulation)",
        value="ttft_p95_ms",
        notes=_needed(rows),
    )
    return 0


def _check(args: argparse.Namespace) -> None:
    if not parse_slos(args.slo):
        raise ConfigError("--slo is empty; give at least one objective, e.g. ttft_p95_ms=500")
    for flag in (
        "speedup",
        "rate",
        "seconds",
        "input_len",
        "output_len",
        "max_replicas",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_tokens",
    ):
        if not 0 < getattr(args, flag) < float("inf"):
            raise ConfigError(
                f"--{flag.replace('_', '-')} {getattr(args, flag)} was given; a number above 0 is expected"
            )


def cell_rows(args: argparse.Namespace) -> list[Row]:
    """Fleets of one machine, from one replica up to the first that holds the objectives."""
    (machine,) = args.machines
    times, slos = step_times(machine, args), parse_slos(args.slo)
    load = arrivals(args)
    limits = ReplicaLimits(args.max_num_seqs, args.max_num_batched_tokens, args.kv_tokens)
    rows: list[Row] = []
    for count in range(1, args.max_replicas + 1):
        served = simulate_fleet(
            load, [times] * count, limits, overhead_s=args.overhead_ms / 1e3, seed=args.seed
        )
        rows.append(_row(machine, count, served, slos=slos, load=load))
        if rows[-1]["holds"]:
            break
    return rows


def step_times(machine: str, args: argparse.Namespace) -> StepTimes:
    """Measured step times of a telemetry URL's last run, or those of a profile with the trace."""
    if "://" in machine:
        from twofold.telemetry import queries

        db = queries.open_database(machine)
        costs = queries.step_costs(db, queries.find_run(db))
        return StepTimes.fitted(costs.num_decode, costs.num_prefill, costs.wall_s)
    if args.trace is None:
        raise ConfigError(
            f"machine {machine!r} is a profile, but no --trace was given; record one with `twofold lab record`"
        )
    trace = source_of(args.trace).trace
    shape, profile = find_shape(args.model, trace), load_profile(machine)
    played, prior = trace.part("second"), trace.part("first").usage()
    points: list[tuple[float, float, float]] = []
    for count, is_prompt in [*((each, False) for each in _BATCHES), *((each, True) for each in _CHUNKS)]:
        result = simulate_system(
            played,
            SYSTEMS["twofold"],
            shape,
            profile,
            slots=args.slots,
            batch=1 if is_prompt else count,
            prompt_chunk=count if is_prompt else 0,
            prior_usage=prior,
        )
        seconds = result.total_us / result.num_tokens * count / 1e6
        points.append((0.0, count, seconds) if is_prompt else (count, 0.0, seconds))
    decode, prefill, seconds_of = np.array(points).T
    return StepTimes.fitted(decode, prefill, seconds_of, is_exact=True)


def arrivals(args: argparse.Namespace) -> list[Arrival]:
    """The load: recorded requests, or drawn ones. ConfigError if nothing is recorded."""
    if args.arrivals is None:
        draw = random.Random(args.seed)  # noqa: S311 (the same load for the same seed)
        prompts, answers = CHAT_INPUT.at_most(args.input_len), CHAT_OUTPUT.at_most(args.output_len)
        return [
            Arrival(at_s, prompts.draw(draw), answers.draw(draw))
            for at_s in arrivals_within(args.rate, args.seconds, args.seed)
        ]
    from twofold.telemetry import queries

    db = queries.open_database(args.arrivals)
    found = queries.finished_requests(db, queries.runs(db, limit=1000))
    if not found:
        raise ConfigError(f"telemetry database {db.path} holds no complete request; send some first")
    begin_s = found[0].received_s
    return [
        Arrival(
            (each.received_s - begin_s) / args.speedup,
            each.prompt_tokens,
            max(1, each.completion_tokens),
            each.cached_tokens,
        )
        for each in found
    ]


class _Measured:
    """A simulated request as objectives read it."""

    ok = True

    def __init__(self, served: Served) -> None:
        self._values = {
            "ttft": served.ttft_s,
            "tpot": served.tpot_s,
            "itl": served.tpot_s,
            "e2el": served.e2e_s,
        }

    def values(self, metric: str) -> Sequence[float]:
        return (self._values[metric] * 1e3,)


def _row(
    machine: str, count: int, served: Sequence[Served], *, slos: Sequence[Slo], load: Sequence[Arrival]
) -> Row:
    measured = [_Measured(each) for each in served]
    results = [slo.check(measured) for slo in slos]
    end_s = max(arrival.at_s + each.e2e_s for arrival, each in zip(load, served, strict=True))
    ttft, tpot = np.array([each.ttft_s for each in served]), np.array([each.tpot_s for each in served])
    busiest = np.bincount([each.replica for each in served], minlength=count).max() / len(served)
    return {
        "machine": machine if "://" not in machine else Path(machine).name,
        "replicas": count,
        "requests": len(served),
        "ttft_p50_ms": float(np.percentile(ttft, 50) * 1e3),
        "ttft_p95_ms": float(np.percentile(ttft, 95) * 1e3),
        "tpot_p95_ms": float(np.percentile(tpot, 95) * 1e3),
        "tokens_per_s": sum(each.output_tokens for each in served) / end_s,
        "busiest_share": float(busiest),
        "objectives": ", ".join(map(str, results)),
        "holds": all(result.met for result in results),
        "clock": "virtual",
    }


def _needed(rows: Sequence[Row]) -> list[str]:
    """One line per machine: how many replicas hold the objectives."""
    lines = []
    for machine in dict.fromkeys(row["machine"] for row in rows):
        last = [row for row in rows if row["machine"] == machine][-1]
        verdict = (
            f"{last['replicas']} replicas hold"
            if last["holds"]
            else f"{last['replicas']} replicas do not hold"
        )
        lines.append(f"{machine}: {verdict} the objectives")
    return lines


def _table(rows: Sequence[Row]) -> Table:
    shown = [{**row, "verdict": "yes" if row["holds"] else "no"} for row in rows]
    columns = {
        "machine": "{machine}",
        "replicas": "{replicas}",
        "TTFT p50": "{ttft_p50_ms:.0f} ms",
        "TTFT p95": "{ttft_p95_ms:.0f} ms",
        "TPOT p95": "{tpot_p95_ms:.1f} ms",
        "tokens/s": "{tokens_per_s:.1f}",
        "busiest replica": "{busiest_share:.0%}",
        "holds": "{verdict}",
    }
    return Table.of(shown, columns)
