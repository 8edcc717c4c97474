"""The entry point: finds the subcommand, imports its module alone, turns errors into one line and an exit
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
from typing import Final, NoReturn

from twofold import __version__
from twofold.api.errors import ConfigError, ModelLoadError, RequestError, TwofoldError

COMMANDS: Final[dict[str, str]] = {
    "serve": "serve a model to OpenAI clients over HTTP",
    "launch": "run a coding agent on a model: claude, codex, opencode or qwen",
    "generate": "answer one prompt and end",
    "chat": "talk with a model in the terminal",
    "bench": "measure prefill and decode speed, against transformers too",
    "bench serve": "measure what a server's clients see under load: TTFT, TPOT, ITL, throughput, goodput",
    "ctl status": "what a running server does, how much memory it has and how fast it is",
    "ctl requests": "list a running server's requests, or end one",
    "ctl cache": "what a running server has in expert slots and in the prefix cache; forget prefixes",
    "ctl placement": "which experts a running server has in slots, and what they are worth",
    "ctl experts": "record which experts a running server routes to: start, stop, dump",
    "placement show": "which experts are in slots, layer by layer: of a running server or of a file",
    "placement export": "write which experts a running server has in slots",
    "placement import": "have a running server put other experts into its slots",
    "ctl resize": "split a running server's memory otherwise between experts and KV cache",
    "ctl sleep": "have a running server give back expert slots and KV cache",
    "ctl wake": "have a sleeping server take them again",
    "calibrate": "measure this machine for predictions, and keep the figures",
    "quantize": "write a model again with smaller weights, and measure what that cost",
    "pack": "write a model as it lies in memory, which then starts at once",
    "rules explain": "say which rule places each module of a model, and what it asks for",
    "models": "say which families and formats load, and what models on disk take",
    "doctor": "say what this machine has, lacks and can run",
    "version": "versions of Twofold and of what it runs on",
    "telemetry": "what the telemetry database holds",
    "lab": "replay, simulate and record expert routing",
}
"""Each is a module of this package with add_arguments(parser) and run(args) -> exit code; of two words, joined by _."""

_TAKES_REST: Final = frozenset(("launch",))
"""Commands that give what stands behind -- to somebody else: `args.rest`."""

_EXTRA_OF: Final = {
    "fastapi": "server",
    "starlette": "server",
    "uvicorn": "server",
    "pydantic": "server",
    "sqlalchemy": "telemetry",
    "transformers": "dev",
}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of `command` alone; the others are known by name and help."""
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
        sub.add_argument("--debug", action="store_true", help="show tracebacks and what goes on inside")
        if name == command:
            _module_of(name).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `twofold` with `argv` (default: the process's arguments) and return the exit code."""
    arguments = _with_joined_command(list(sys.argv[1:] if argv is None else argv))
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    rest: list[str] = []
    if command in _TAKES_REST and "--" in arguments:
        place = arguments.index("--")
        arguments, rest = arguments[:place], arguments[place + 1 :]
    debug = "--debug" in arguments
    try:
        args = build_parser(command).parse_args(arguments)
        args.rest = rest
        level = logging.DEBUG if debug else logging.WARNING
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
        for note in getattr(args, "alias_notes", ()):
            logging.getLogger("twofold").warning("%s", note)
        code = int(_module_of(args.command).run(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (`head`, say) has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        message, code = describe(error)
        name = f"twofold {command}" if command in COMMANDS else "twofold"
        print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    return code


def _module_of(command: str) -> ModuleType:
    return importlib.import_module(f"twofold.cli.{command.replace(' ', '_')}")


def _with_joined_command(arguments: list[str]) -> list[str]:
    """`arguments` with two words that name a command together as one."""
    for place, pair in enumerate(itertools.pairwise(arguments)):
        if not pair[0].startswith("-"):
            joined = " ".join(pair)
            return [*arguments[:place], joined, *arguments[place + 2 :]] if joined in COMMANDS else arguments
    return arguments


def describe(error: Exception) -> tuple[str, int]:
    """What to tell about an error, and the exit code."""
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
            "the native module is not built or not for this Python; build it: make build (or pip install .)",
            2,
        )
    if isinstance(error, MemoryError):
        return "memory ran out; `twofold doctor MODEL` says what fits and what to lower", 1
    if isinstance(error, OSError):
        return f"{error} (--debug shows where)", 1
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1


def _is_native(error: ImportError) -> bool:
    return "_core" in f"{error.name} {error}"


if __name__ == "__main__":
    sys.exit(main())
