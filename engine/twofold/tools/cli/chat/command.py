"""`twofold chat`: talk with a model in the terminal, or through a pipe (one line in, one answer out)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from twofold.tools.cli.chat.conversation import HELP, Conversation
from twofold.tools.cli.model_options import (
    SAMPLING,
    add_model_arguments,
    add_sampling_arguments,
    emulation_notice,
    engine_config,
    running_engine,
)
from twofold.tools.cli.parser import ShortHelp

KEY_NAME: Final = "TWOFOLD_API_KEY"

SHORT_HELP: Final = ShortHelp(
    (
        *("--system", "--temperature", "--top-p", "--top-k", "--min-p", "--max-tokens"),
        *(
            "--accelerator",
            "--gpu-experts-ratio",
            "--max-model-len",
            "--cpu-threads",
            "--seed",
            "--base-url",
        ),
    ),
    (
        ("chat", "the bundled demonstration model"),
        ("chat ~/models/Qwen3-30B-A3B", "a model on disk"),
        ("chat --base-url http://127.0.0.1:10002", "the model of a running server"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="system message at the start of the conversation")
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help="talk to a running server, Twofold's or any with OpenAI's API, instead of loading a model; MODEL is then "
        f"a name that it serves (default: its first). {KEY_NAME} is its key",
    )
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if args.base_url:
        from twofold.tools.cli.chat.served import ServedModel
        from twofold.tools.loadgen.http_client import check_url

        url = check_url(args.base_url, flag="--base-url", allow_remote=True)
        served = ServedModel(url, os.environ.get(KEY_NAME, ""), getattr(args, "model", None))
        _greet(f"{served.model} at {served.url}", served.accelerator)
        Conversation(served, sampling, args.system).run()
        return 0
    from twofold.server.bridge.models.sampling_defaults import sampling_defaults
    from twofold.tools.cli.chat.local import LocalModel

    config = engine_config(args)
    defaults = sampling_defaults(Path(config.model))
    with running_engine(args, config) as engine:
        local = LocalModel(engine, defaults)
        _greet(
            f"{local.model} on {engine.info.accelerator}", engine.info.accelerator, engine.info.output_changes
        )
        Conversation(local, sampling, args.system).run()
    return 0


def _greet(what: str, accelerator: str, output_changes: Sequence[str] = ()) -> None:
    """In a terminal: the model, the commands, and what is not as it seems."""
    if not sys.stdin.isatty():
        return
    print(f"{what}\n{HELP}")
    if notice := emulation_notice(accelerator):
        print(notice)
    for text in output_changes:
        print(f"note: {text}")
