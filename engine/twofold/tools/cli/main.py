"""The entry point: finds the subcommand, imports only its module, and turns errors into one line and an exit
code.

Exit codes: 0 done, 1 something failed while it ran, 2 a setting, a model or a prompt cannot be used, 130
Ctrl-C. Importing this module imports neither torch nor any server, so that `twofold --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from twofold import __version__
from twofold.api.errors import ConfigError, ModelLoadError, RequestError, TwofoldError
from twofold.tools.cli.parser import OneLineParser

COMMANDS: Final[dict[str, str]] = {
    "serve": "serve a model to OpenAI clients over HTTP",
    "launch": "run a coding agent on a model: claude, codex, opencode, qwen, cline, continue, aider or crush",
    "generate": "answer one prompt and exit",
    "chat": "talk with a model in the terminal",
    "bench": "measure prefill and decode speed, also against transformers",
    "bench serve": "measure a server under load: TTFT, TPOT, ITL, throughput, goodput",
    "loadtest": "run users against a server: chat, long prompts, bursts, agents; by stages or by arrivals",
    "loadtest capacity": "find the highest rate at which a server holds its objectives",
    "dashboard": "show a telemetry database on a web page, live or afterwards",
    "report": "write a run of a telemetry database as one HTML file",
    "ctl status": "show a running server's load, memory and speed",
    "ctl requests": "list a running server's requests, or cancel one",
    "ctl cache": "show a running server's expert cache and prefix cache, or clear the prefix cache",
    "ctl placement": "show which experts are in a running server's slots, and the value of each",
    "ctl experts": "record which experts a running server routes to: start, stop, dump",
    "placement show": "show the experts in slots, layer by layer, of a running server or a file",
    "placement export": "save to a file which experts are in a running server's slots",
    "placement import": "load other experts into a running server's slots",
    "ctl resize": "change how a running server splits memory between experts and KV cache",
    "ctl sleep": "free the expert slots and KV cache of a running server",
    "ctl wake": "allocate the expert slots and KV cache of a sleeping server again",
    "calibrate": "measure this machine for the cost model, and save the figures",
    "quantize": "convert a model to a smaller weight format, and measure the loss",
    "finetune": "train a LoRA adapter for a model on your data, to be served beside it",
    "merge": "write a model with a LoRA adapter merged into it, in any format",
    "convert": "write a LoRA adapter of any layout as PEFT or llama.cpp reads it",
    "pack": "save a model in its in-memory layout, so that it is memory-mapped instead of loaded",
    "rules explain": "show which rule places each module of a model",
    "pull": "download a model from a Hugging Face hub, or update it",
    "list": "list the models that were downloaded from a hub",
    "rm": "delete models that were downloaded from a hub",
    "models": "list supported model families and formats, or the memory that models on disk need",
    "doctor": "check this machine: CPU, memory, accelerator, and which models fit",
    "fit": "show the settings that serve would choose for a model on this machine, and the speed to expect",
    "version": "show the versions of Twofold and its dependencies",
    "telemetry": "summarise, export, check and prune the telemetry database",
    "lab": "replay, simulate and record expert routing",
}
"""Summary of each command. A command's module has add_arguments(parser) and run(args) -> exit code."""

_MODULES: Final = {
    "bench": "bench.model",
    "chat": "chat.command",
    "ctl wake": "ctl.sleep",
    "dashboard": "apps.dashboard",
    "report": "apps.report",
    "doctor": "doctor.command",
    "finetune": "finetune.command",
    "fit": "doctor.fit",
    "launch": "launch.command",
    "list": "hub.list",
    "loadtest capacity": "apps.capacity",
    "loadtest": "apps.loadtest",
    "models": "hub.models",
    "placement import": "placement.import_",
    "pull": "hub.pull",
    "rm": "hub.rm",
    "serve": "serve.command",
    "version": "doctor.version",
}
"""Modules below `twofold.tools.cli` named differently from their command; `ctl cache` is `ctl.cache`."""

GROUPS: Final[dict[str, str]] = {
    "ctl": "see and change what a running server does",
    "placement": "show, save and load which experts are in slots",
    "rules": "explain the rules that place modules",
    "telemetry": COMMANDS["telemetry"],
    "lab": COMMANDS["lab"],
}
"""First words of two-word commands; alone they show help. `telemetry` and `lab` declare their actions themselves."""

_PASSES_ARGUMENTS: Final = frozenset(("finetune", "launch"))
"""Commands that pass the arguments after -- to another program or command, as `args.rest`."""

_DEBUG_HELP: Final = "show tracebacks and debug messages"

_EXTRA_OF: Final = {
    "fastapi": "server",
    "huggingface_hub": "hub",
    "httpx": "server",
    "peft": "training",
    "accelerate": "training",
    "markdown_it": "server",
    "locust": "loadtest",
    "streamlit": "dashboard",
    "plotly": "dashboard",
    "starlette": "server",
    "uvicorn": "server",
    "pydantic": "server",
    "sqlalchemy": "telemetry",
    "transformers": "training",
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of `command` alone; the other commands only have name and help."""
    parser = OneLineParser(
        prog="twofold",
        description="Runs large Mixture-of-Experts models on a machine whose GPU is too small for them.",
        epilog="twofold COMMAND --help explains a command. "
        "Every setting can also come from the environment as TWOFOLD_<NAME>.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"twofold {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        described = summary[:1].upper() + summary[1:] + "."
        sub = subparsers.add_parser(name, help=summary, description=described, allow_abbrev=False)
        sub.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
        if name == command:
            module = _module_of(name)
            module.add_arguments(sub)
            if hasattr(module, "SHORT_HELP"):
                sub.set_short_help(module.SHORT_HELP)
    if command in GROUPS.keys() - COMMANDS.keys():
        _add_group(subparsers, command)
    return parser


def _add_group(subparsers: Any, group: str) -> None:
    """The parser of `twofold GROUP`, which lists its commands and runs none."""
    described = GROUPS[group][:1].upper() + GROUPS[group][1:] + "."
    parser = subparsers.add_parser(group, description=described, allow_abbrev=False)
    parser.epilog = f"twofold {group} COMMAND --help explains a command."
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    actions = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        first, _, action = name.partition(" ")
        if first == group:
            actions.add_parser(action, help=summary)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `twofold` with `argv` (default: the process's arguments) and return the exit code."""
    _open_missing_streams()
    arguments = _with_joined_command(list(sys.argv[1:] if argv is None else argv))
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    rest: list[str] = []
    if not arguments or (arguments == [command] and command in GROUPS):
        arguments.append("--help")
    if command in _PASSES_ARGUMENTS and "--" in arguments:
        place = arguments.index("--")
        arguments, rest = arguments[:place], arguments[place + 1 :]
    debug = "--debug" in arguments
    try:
        args = build_parser(command).parse_args(arguments)
        args.rest = rest
        args.given_arguments = tuple(arguments)
        module = _module_of(args.command)
        getattr(module, "set_up_log", _set_up_log)(args)
        for note in getattr(args, "alias_notes", ()):
            logging.getLogger("twofold").warning("%s", note)
        code = int(module.run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`head`, say) has closed the pipe. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        message, code = describe(error)
        name = f"twofold {command}" if command in COMMANDS else "twofold"
        print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _set_up_log(args: argparse.Namespace) -> None:
    """Warnings of all modules on standard error, as text; with --debug everything."""
    level = logging.DEBUG if args.debug else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that is closed, as some service managers leave them.

    Otherwise a file or socket opened later gets number 1 or 2, and a library's message goes into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def _module_of(command: str) -> ModuleType:
    module = _MODULES.get(command, command.replace(" ", "."))
    return importlib.import_module(f"twofold.tools.cli.{module}")


def _with_joined_command(arguments: list[str]) -> list[str]:
    """`arguments` with the two words of a two-word command joined."""
    for place, pair in enumerate(itertools.pairwise(arguments)):
        if not pair[0].startswith("-"):
            joined = " ".join(pair)
            return [*arguments[:place], joined, *arguments[place + 2 :]] if joined in COMMANDS else arguments
    return arguments


def describe(error: Exception) -> tuple[str, int]:
    """The message for an error, and the exit code."""
    if isinstance(error, ConfigError | ModelLoadError | RequestError):
        return str(error), 2
    if isinstance(error, TwofoldError):
        return str(error), 1
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in _EXTRA_OF:
            return f"this needs {package}; install it with: pip install 'twofold[{_EXTRA_OF[package]}]'", 2
    if isinstance(error, ImportError) and _is_native(error):
        return (
            "the native module is not built for this Python; build it: make build (or pip install .)",
            2,
        )
    if isinstance(error, MemoryError):
        return "out of memory; `twofold doctor MODEL` shows what fits and which settings to lower", 1
    if isinstance(error, OSError):
        return f"{error} (--debug shows where)", 1
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1


def _is_native(error: ImportError) -> bool:
    return "_core" in f"{error.name} {error}"


if __name__ == "__main__":
    sys.exit(main())
