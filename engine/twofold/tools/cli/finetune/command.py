"""`twofold finetune`: train a LoRA adapter beside a base that stays as it is stored."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twofold.api.config import DatabaseConfig, EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.settings import add_arguments as add_config_arguments
from twofold.api.settings import flag_name, from_namespace, given_fields
from twofold.api.training_step import TrainingStep
from twofold.tools.cli.hub.model_path import MODEL_NAME_HELP, model_path, served_name
from twofold.tools.cli.number_options import add_options, cpu_threads_option, number, whole

if TYPE_CHECKING:
    from twofold.telemetry.sink import TelemetrySink
    from twofold.training.finetune.run import FinetuneConfig, Result

_MOST_BAD_LINES: Final = 50
_MOST: Final = 2**31 - 1
_SCHEDULES: Final = ("cosine", "linear", "constant")
_DTYPES: Final = ("float32", "bfloat16")
_TARGETS: Final = "attention,dense,shared,experts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help=f"model directory, {MODEL_NAME_HELP} or a GGUF file with --config (default: the bundled model)",
    )
    parser.add_argument(
        "--config", metavar="DIR", help="directory of config.json and tokenizer, where MODEL is a GGUF file"
    )
    _add_data_arguments(parser.add_argument_group("data"))
    _add_adapter_arguments(parser.add_argument_group("adapter"))
    _add_schedule_arguments(parser.add_argument_group("schedule"))
    _add_machine_arguments(parser.add_argument_group("machine and output"))
    add_config_arguments(parser, DatabaseConfig)


def _add_data_arguments(data: Any) -> None:
    data.add_argument(
        "--data",
        required=True,
        metavar="FILE",
        help="JSON lines: messages, conversations (ShareGPT), prompt and completion, or text "
        "(docs/adapters/fine-tune.md)",
    )
    data.add_argument("--eval-data", metavar="FILE", help="held-out lines; default: a share of --data")
    add_options(
        data,
        [
            ("--eval-share", "SHARE", number(0, 0.9), 0.05, "share of --data that is held out; 0: none"),
            (
                "--max-length",
                "N",
                whole(0, _MOST),
                0,
                "most tokens of a line; 0: the model's context, at most 2048",
            ),
            (
                "--batch-tokens",
                "N",
                whole(0, _MOST),
                0,
                "most tokens of a micro-batch; 0: those of the longest line, at least 512",
            ),
        ],
    )
    data.add_argument("--truncate", action="store_true", help="cut longer lines instead of refusing them")
    data.add_argument(
        "--padding", action="store_true", help="pad lines to a common length instead of packing them"
    )


def _add_adapter_arguments(group: Any) -> None:
    names = f"groups ({_TARGETS.replace(',', ', ')}) or names of modules, separated by commas"
    add_options(
        group,
        [
            ("--rank", "R", whole(1, 512), 16, "rank of the factors"),
            (
                "--alpha",
                "ALPHA",
                number(0.001, 1e6),
                None,
                "scale of the adapter times its rank (default: 2 × --rank)",
            ),
            ("--targets", "NAMES", str, _TARGETS, names),
        ],
    )


def _add_schedule_arguments(group: Any) -> None:
    group.add_argument(
        "--schedule",
        choices=_SCHEDULES,
        default="cosine",
        help="learning rate after warm-up (default: cosine)",
    )
    add_options(
        group,
        [
            ("--epochs", "N", number(0.001, 1e6), 3.0, "passes over the data"),
            ("--max-steps", "N", whole(0, _MOST), 0, "optimiser steps, instead of --epochs; 0: by --epochs"),
            ("--learning-rate", "RATE", number(1e-9, 10), 2e-4, "highest learning rate"),
            ("--warmup-share", "SHARE", number(0, 1), 0.03, "share of the steps in which the rate rises"),
            ("--weight-decay", "DECAY", number(0, 10), 0.0, "weight decay of AdamW"),
            ("--max-grad-norm", "NORM", number(0, 1e6), 1.0, "longer gradients are clipped; 0: none"),
            ("--gradient-accumulation", "N", whole(1, 1_000_000), 1, "micro-batches of an optimiser step"),
            ("--eval-steps", "N", whole(1, _MOST), 50, "steps between evaluations of the held-out lines"),
            (
                "--early-stop",
                "N",
                whole(0, 1_000_000),
                0,
                "end after N evaluations without a lower held-out loss; 0: never",
            ),
            ("--seed", "N", whole(0, 2**32 - 1), 0, "seed of factors, data order and held-out lines"),
        ],
    )


def _add_machine_arguments(machine: Any) -> None:
    machine.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the adapter; an interrupted run is resumed (default: MODEL-lora)",
    )
    machine.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="float32",
        help="of the dense part in memory; experts stay as they are stored (default: float32)",
    )
    machine.add_argument(
        "--accelerator",
        default="auto",
        metavar="KIND",
        help="auto, cuda, none, or emulated:PROFILE, which plans for that card and tells the times it would take; the "
        "CPU computes (default: auto)",
    )
    kept = "bytes of experts' activations kept for backward; further layers compute them again (default: all are kept)"
    checkpoints = "checkpoints that are kept, besides the best one"
    add_options(
        machine,
        [
            ("--activation-bytes", "BYTES", whole(0, 2**62), None, kept),
            ("--save-steps", "N", whole(1, _MOST), 50, "steps between checkpoints"),
            ("--num-checkpoints", "N", whole(1, 1000), 2, checkpoints),
            cpu_threads_option(),
        ],
    )
    machine.add_argument(
        "--serve",
        action="store_true",
        help="serve base and adapter afterwards; flags of `twofold serve` follow --, as in: --serve -- --port 8000",
    )


def run(args: argparse.Namespace) -> int:
    from twofold.tools.cli.finetune.recording import recording
    from twofold.training.finetune.data import BadLinesError
    from twofold.training.finetune.run import FinetuneRun, Report

    config, database = _config(args), from_namespace(DatabaseConfig, args)
    command = _serve_command(args, config)
    progress = _ProgressLine()
    try:
        job = FinetuneRun(config, Report(_say, progress.show))
    except BadLinesError as error:
        for line in error.lines[:_MOST_BAD_LINES]:
            print(line, file=sys.stderr)
        if len(error.lines) > _MOST_BAD_LINES:
            print(f"... and {len(error.lines) - _MOST_BAD_LINES} further lines", file=sys.stderr)
        return 2
    if job.is_complete:
        _say(f"{config.out} is complete already")
    else:
        if job.data.num_truncated:
            _say(f"{job.data.num_truncated} lines were cut to {job.config.max_length} tokens")
        _say(f"forecast: {job.memory.num_parameters:,} trained parameters; memory {job.memory}")
        begin = time.monotonic()
        with recording(database, job) as sink:
            progress.sink = sink
            result = job.train()
        progress.end()
        print(_summary(config, result, time.monotonic() - begin))
    print(shlex.join(["twofold", *command]), flush=True)
    if args.serve:
        # A new program in this process: the memory of training is free, and Ctrl-C reaches the server.
        os.execv(sys.executable, [sys.executable, "-m", "twofold.tools.cli", *command])  # noqa: S606
    return 0


def _serve_command(args: argparse.Namespace, config: FinetuneConfig) -> list[str]:
    """Arguments that serve base and adapter; the parser has accepted them."""
    from twofold.tools.cli.main import build_parser

    if args.rest and not args.serve:
        raise ConfigError(f"{args.rest[0]!r} after -- is for `twofold serve`; give --serve, too")
    command = ["serve", *([args.model] if args.model else [])]
    command += ["--lora-modules", f"{config.out.resolve().name}={config.out}"]
    if config.rank > EngineConfig.max_lora_rank:
        command += ["--max-lora-rank", str(config.rank)]
    for name in sorted(given_fields(DatabaseConfig, args, {})):
        command += [flag_name(name), str(getattr(args, name))]
    if config.cpu_threads:
        command += ["--cpu-threads", str(config.cpu_threads)]
    command += args.rest
    build_parser("serve").parse_args(command)
    return command


def _config(args: argparse.Namespace) -> FinetuneConfig:
    from twofold.models.bundled import bundled_model_path
    from twofold.training.finetune.run import FinetuneConfig
    from twofold.training.finetune.trainer import Schedule

    targets = tuple(word.strip() for word in args.targets.split(",") if word.strip())
    if not targets:
        raise ConfigError("--targets names no modules")
    model = str(bundled_model_path()) if args.model is None else args.model
    return FinetuneConfig(
        model=model_path(model),
        data=Path(args.data).expanduser(),
        out=Path(args.out or f"{served_name(model).rpartition('/')[2]}-lora").expanduser(),
        config=None if args.config is None else Path(args.config).expanduser(),
        eval_data=None if args.eval_data is None else Path(args.eval_data).expanduser(),
        eval_share=args.eval_share,
        max_length=args.max_length,
        truncate=args.truncate,
        batch_tokens=args.batch_tokens,
        padding=args.padding,
        rank=args.rank,
        alpha=2.0 * args.rank if args.alpha is None else args.alpha,
        targets=targets,
        dtype=args.dtype,
        accelerator=args.accelerator,
        activation_bytes=args.activation_bytes,
        cpu_threads=args.cpu_threads,
        num_checkpoints=args.num_checkpoints,
        schedule=Schedule(
            epochs=args.epochs,
            max_steps=args.max_steps or -1,
            learning_rate=args.learning_rate,
            schedule=args.schedule,
            warmup_share=args.warmup_share,
            weight_decay=args.weight_decay,
            max_grad_norm=args.max_grad_norm,
            gradient_accumulation=args.gradient_accumulation,
            save_steps=args.save_steps,
            eval_steps=args.eval_steps,
            early_stop=args.early_stop,
            seed=args.seed,
        ),
    )


def _summary(config: FinetuneConfig, result: Result, seconds: float) -> str:
    from twofold.training.finetune.run import duration

    losses = ""
    if result.loss_before is not None and result.loss_after is not None:
        losses = f"; held-out loss {result.loss_before:.4f} → {result.loss_after:.4f} nats"
    return f"{config.out}: adapter of step {result.best_step}, trained in {duration(seconds)}{losses}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _ProgressLine:
    """Progress on stderr: one line that is rewritten on a terminal, else a line every ten steps."""

    def __init__(self) -> None:
        self._rewrites = sys.stderr.isatty()
        self.sink: TelemetrySink | None = None
        """Also gets each step."""

    def show(self, progress: TrainingStep) -> None:
        from twofold.training.finetune.run import duration

        if self.sink is not None:
            self.sink.training_step(progress)
        step, last = progress.step, progress.num_steps
        if progress.eval_loss is not None:
            self.end()
            _say(f"step {step}/{last}  held-out loss {progress.eval_loss:.4f}")
            return
        line = (
            f"step {step}/{last}  loss {progress.loss:.4f}  learning rate {progress.learning_rate:.2e}  "
            f"{progress.tokens_per_s:,.0f} tokens/s  {duration(progress.remaining_s)} left"
        )
        if self._rewrites:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif step % 10 == 0 or step in (1, last):
            _say(line)

    def end(self) -> None:
        """Remove the line that is rewritten."""
        if self._rewrites:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
