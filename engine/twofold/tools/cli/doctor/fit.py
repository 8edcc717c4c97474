"""`twofold fit`: the settings of `twofold serve` on this machine, or each rank's memory. Loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twofold.api.config import EngineConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import from_namespace, given_fields
from twofold.fit.machine import fit_here
from twofold.fit.plan import FitPlan
from twofold.fit.ranks import as_json as ranks_as_json
from twofold.fit.ranks import fit_ranks
from twofold.models.model_files import open_model_files
from twofold.models.sizing import gib
from twofold.tools.cli.doctor.next_command import next_command
from twofold.tools.cli.model_options import add_model_arguments, engine_config
from twofold.tools.cli.parser import ShortHelp
from twofold.tools.cli.serve.ranks import add_rank_arguments
from twofold.weights.host_memory import available_memory_bytes

SHORT_HELP: Final = ShortHelp(
    (
        *("--json", "--accelerator", "--devices", "--gpu-experts-ratio", "--gpu-memory-utilization"),
        *("--max-model-len", "--max-total-tokens", "--max-num-seqs", "--kv-cache-dtype", "--cpu-threads"),
        *("--speculative-config", "--tensor-parallel-size"),
    ),
    (
        ("fit ~/models/Qwen3-30B-A3B", "the settings that serve would choose here"),
        ("fit ~/models/model.gguf --accelerator emulated:rtx4090-pcie4", "with a GPU that is not here"),
        ("fit ~/models/Qwen3-235B-A22B --tensor-parallel-size 2", "the memory of each of two ranks"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 if the model, or this machine's ranks of it, fit, else 1."""
    config = engine_config(args)
    parallel = from_namespace(ParallelConfig, args)
    if parallel.tensor_parallel_size > 1:
        return _show_ranks(config, parallel, is_json=args.json)
    plan = fit_here(config, given_fields(EngineConfig, args), open_model_files(config.model))
    command = next_command(args, "serve") if plan.fits else None
    if args.json:
        print(json.dumps(as_json(plan) | {"next": command}))
    else:
        _, *table = plan.lines()
        ending = () if command is None else ("", f"ready: {command}")
        print(*_in_words(plan), *table, *ending, sep="\n")
    return 0 if plan.fits else 1


def _in_words(plan: FitPlan) -> Iterator[str]:
    """The first line of the table, explained."""
    name, needed = Path(plan.config.model).name, plan.size.host_bytes(plan.context)
    if not plan.fits:
        yield f"fit: {name} cannot be served here: {plan.problem}"
        return
    yield (
        f"fit: {name} fits: it needs {gib(needed)} of the {gib(plan.machine.host_bytes)} of memory that are free, with "
        f"one request of {plan.context} tokens."
    )
    yield (
        "`twofold serve` would use the settings below: each is a flag, its value and the reason. Give a flag with "
        "another value"
    )
    yield "to set it yourself; the others are then fitted around it."


def _show_ranks(config: EngineConfig, parallel: ParallelConfig, *, is_json: bool) -> int:
    from twofold.parallel.session import check_rank_files, rank_config

    config, files = rank_config(config), open_model_files(config.model, config.speculation.mtp_use)
    check_rank_files(files)
    fit = fit_ranks(config, parallel, files, available_memory_bytes())
    print(json.dumps(ranks_as_json(fit)) if is_json else "\n".join(fit.lines()))
    return 0 if fit.fits else 1


def as_json(plan: FitPlan) -> dict[str, object]:
    return {
        "fits": plan.fits,
        "problem": plan.problem,
        "would_fit": list(plan.remedies),
        "choices": [dataclasses.asdict(choice) for choice in plan.choices],
        "context": plan.context,
        "predicted": dataclasses.asdict(plan.speed) if plan.speed is not None else None,
    }
