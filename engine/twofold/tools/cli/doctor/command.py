"""`twofold doctor`: checks what this machine has, lacks and can run. Only --gpu loads weights, of a few layers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Final

from twofold.api.config import ServerConfig, TelemetryConfig
from twofold.api.errors import ModelLoadError
from twofold.api.settings import add_arguments as add_config_arguments
from twofold.api.settings import from_namespace
from twofold.models.model_files import open_model_files
from twofold.tools.cli.doctor import gpu_report, machine_checks, memory_table
from twofold.tools.cli.doctor.drafter_check import check_drafter
from twofold.tools.cli.doctor.machine_checks import Check
from twofold.tools.cli.doctor.next_command import next_command
from twofold.tools.cli.model_options import add_model_arguments, engine_config
from twofold.tools.cli.parser import ShortHelp

_INDENT: Final = " " * 18
_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


SHORT_HELP: Final = ShortHelp(
    (
        *("--json", "--gpu", "--accelerator", "--devices", "--max-model-len", "--max-total-tokens"),
        *(
            "--kv-cache-dtype",
            "--speculative-config",
            "--tool-call-parser",
            "--host",
            "--port",
            "--telemetry-url",
        ),
    ),
    (
        ("doctor", "this machine and the bundled demonstration model"),
        ("doctor ~/models/Qwen3-30B-A3B", "whether a model fits, before anything is loaded"),
        ("doctor ~/models/model.gguf --gpu", "the GPU's kernels on the model's weights"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="compare the GPU with the CPU on the model's weights, measure its bandwidths and write "
        "twofold-gpu-report.json, to send where a check fails",
    )
    add_config_arguments(parser, ServerConfig)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 when everything that `twofold serve` needs is available, else 1; with --gpu, when no check failed."""
    if args.gpu:
        return gpu_report.run(engine_config(args), as_json=args.json)
    checks = examine(args)
    healthy = all(check.verdict != "bad" for check in checks)
    table = _memory_table(args)
    command = next_command(args, "serve" if healthy else "doctor")
    if healthy and (port := machine_checks.free_port(from_namespace(ServerConfig, args))) is not None:
        command += f" --port {port}"
    if args.json:
        report = {
            "healthy": healthy,
            "checks": list(map(dataclasses.asdict, checks)),
            "contexts": list(map(dataclasses.asdict, table)),
            "next": command,
        }
        print(json.dumps(report))
    else:
        for check in checks:
            print(*_lines(check), sep="\n")
        if table:
            print("", *memory_table.render(table), sep="\n")
        print(f"\n{'ready' if healthy else 'fix the checks marked BAD, then'}: {command}")
    return 0 if healthy else 1


def _lines(check: Check) -> Iterator[str]:
    """One line in a file or a pipe; in a terminal as many as its width needs."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for begin, text in (
        (f"{_MARKS[check.verdict]} {check.name:<12} ", check.found),
        (_INDENT + "→ ", check.remedy),
    ):
        if text:
            yield from textwrap.wrap(
                text,
                max(40, columns),
                initial_indent=begin,
                subsequent_indent=_INDENT,
                break_on_hyphens=False,
            )


def _memory_table(args: argparse.Namespace) -> list[memory_table.ContextNeeds]:
    """The memory table; empty if the model cannot be opened, which a check has reported."""
    try:
        engine = engine_config(args)
        return memory_table.memory_table(open_model_files(engine.model, engine.speculation.mtp_use), engine)
    except ModelLoadError:
        return []


def examine(args: argparse.Namespace) -> list[Check]:
    """All checks, with the settings that `twofold serve` would have with these flags. ConfigError for wrong flags."""
    server = from_namespace(ServerConfig, args)
    telemetry = from_namespace(TelemetryConfig, args)
    checks = [machine_checks.check_cpu(), machine_checks.check_memory()]
    try:
        engine = engine_config(args)
    except ModelLoadError as error:
        checks.append(Check.bad("model", str(error), machine_checks.OTHER_MODEL))
    else:
        checks += [machine_checks.check_accelerator(engine), machine_checks.check_model(engine)]
        chat = machine_checks.check_chat(engine, server)
        checks += [chat] if chat is not None else []
        pooling = machine_checks.check_pooling(engine)
        checks += [pooling] if pooling is not None else []
        drafter = check_drafter(engine)
        checks += [drafter] if drafter is not None else []
        device_memory = machine_checks.check_device_memory(engine)
        checks += [device_memory] if device_memory is not None else []
    database = machine_checks.check_telemetry(telemetry.telemetry_url)
    return [
        *checks,
        *([] if database is None else [database]),
        machine_checks.check_disk(telemetry.telemetry_url),
        machine_checks.check_port(server),
        machine_checks.check_sqlite(),
        machine_checks.check_packages(),
    ]
