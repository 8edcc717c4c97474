"""`twofold fit`: the settings that `twofold serve` would choose for a model on this machine. Loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json

from twofold.api.config import EngineConfig
from twofold.api.settings import given_fields
from twofold.fit.machine import fit_here
from twofold.fit.plan import FitPlan
from twofold.models.model_files import open_model_files
from twofold.tools.cli.model_options import add_model_arguments, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 if the model fits, else 1."""
    config = engine_config(args)
    plan = fit_here(config, given_fields(EngineConfig, args), open_model_files(config.model))
    print(json.dumps(as_json(plan)) if args.json else "\n".join(plan.lines()))
    return 0 if plan.fits else 1


def as_json(plan: FitPlan) -> dict[str, object]:
    return {
        "fits": plan.fits,
        "problem": plan.problem,
        "would_fit": list(plan.remedies),
        "choices": [dataclasses.asdict(choice) for choice in plan.choices],
        "context": plan.context,
        "predicted": dataclasses.asdict(plan.speed) if plan.speed is not None else None,
    }
