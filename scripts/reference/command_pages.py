"""Reference pages of what is given on the command line: settings, commands, variables, other engines' flags."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import environment_name, fields_by_class, flag_name
from twofold.experts.policies import POLICIES
from twofold.tools.cli import flag_aliases
from twofold.tools.cli.main import COMMANDS, build_parser

from scripts.reference.tables import anchor, cell, table

ROOT: Final = Path(__file__).resolve().parents[2]
CONFIGS: Final = (EngineConfig, ServerConfig, ModelsConfig, ParallelConfig, TelemetryConfig)

VARIABLES: Final = {
    "TWOFOLD_ISA": ("run", "CPU kernel level: generic, avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx"),
    "TWOFOLD_PLACEMENT_SWEEP": ("run", "CSV file of `benchmarks placement` that the dashboard shows"),
    "OPENAI_API_KEY": ("run", "key that `twofold bench serve` sends, before TWOFOLD_API_KEY"),
    "XDG_CONFIG_HOME": ("run", "folder for `twofold/machine.json` and `twofold/threads.json` (default: ~/.config)"),
    "XDG_CACHE_HOME": ("run", "folder for `huggingface/hub`, the cache of models by name (default: ~/.cache)"),
    "HF_HUB_CACHE": ("run", "the cache of models by name (default: `hub` in HF_HOME)"),
    "HUGGINGFACE_HUB_CACHE": ("run", "the same; read after HF_HUB_CACHE"),
    "HF_HOME": ("run", "folder for `hub` (default: `huggingface` in XDG_CACHE_HOME)"),
    "HF_HUB_OFFLINE": ("run", "1: download nothing"),
    "HF_TOKEN": ("run", "token for gated and private models of a hub"),
    "XDG_STATE_HOME": ("run", "folder for the files of `twofold launch` (default: ~/.local/state)"),
    "RANK": ("run", "this rank's number, as torchrun sets it with WORLD_SIZE, LOCAL_RANK and others"),
    "MASTER_ADDR": ("run", "address of rank 0, as torchrun sets it"),
    "TORCHELASTIC_USE_AGENT_STORE": ("run", "True: torchrun listens where ranks meet, not rank 0"),
    "TWOFOLD_VENV": ("build", "virtual environment (default: .venv)"),
    "TWOFOLD_BUILD_DIR": ("build", "build folder (default: build)"),
    "TWOFOLD_BUILD_TYPE": ("build", "CMake's build type; Debug keeps symbols"),
    "TWOFOLD_LEVELS": ("build", "levels of CPU kernels: native, all or names (default: native; wheels: all)"),
    "TWOFOLD_WERROR": ("build", "ON: warnings of the compiler are errors (default: OFF; CI: ON)"),
    "TWOFOLD_CUDA": ("build", "ON, OFF or AUTO: compile CUDA code (default: AUTO)"),
    "TWOFOLD_TORCH_INDEX": ("build", "package index for PyTorch"),
    "TORCH_CUDA_ARCH_LIST": ("build", "GPU architectures to compile for"),
    "CUDA_HOME": ("build", "CUDA toolkit to compile with"),
    "CUDA_PATH": ("build", "the same; read after CUDA_HOME"),
    "CUDAHOSTCXX": ("build", "C++ compiler that nvcc calls (default: CXX)"),
    "CUDA_VISIBLE_DEVICES": ("run", "GPUs that CUDA programs may use; empty or -1: none"),
    "PYTHON": ("build", "interpreter of a new virtual environment"),
    "CXX": ("build", "C++ compiler"),
    "CMAKE_BUILD_PARALLEL_LEVEL": ("build", "compilers at the same time (default: one per core)"),
    "PIP_CERT": ("build", "certificates for downloads"),
    "TWOFOLD_TESTS_NEED_ALL": ("test", "1: a test whose tool is missing fails instead of being skipped"),
    "TWOFOLD_LITELLM_PYTHON": ("test", "interpreter with litellm, for its test"),
    "TWOFOLD_GUIDELLM": ("test", "program of GuideLLM, for its test"),
    "TWOFOLD_AIPERF": ("test", "program of AIPerf, likewise"),
}  # fmt: skip
"""(when it is read, what it does) of variables that are not settings."""

_READ_VARIABLE: Final = re.compile(
    r"(?:environ(?:\.get)?[\[(]|getenv\()\s*\"([A-Z][A-Z0-9_]+)\"|\$\{([A-Z][A-Z0-9_]+):-|\$ENV\{([A-Z][A-Z0-9_]+)\}"
)
_NOT_OURS: Final = {
    "BASE_PYTHON",
    "PATH",
    "PYTHONPATH",
    "HOME",
    "TERM",
    "TMPDIR",
    "USER",
    "SHELL",
    "NO_COLOR",
}


def settings() -> str:
    """Settings page: one row per field of every configuration class, in the order of the code."""
    parts = [
        "A flag overrides the environment; the environment overrides the default. "
        "[Commands](commands.md) says which command takes which group."
    ]
    for config in CONFIGS:
        for made_of, fields in fields_by_class(config):
            rows = [_setting(field) for field in fields]
            if rows:
                title = _title_of(made_of)
                parts += [f"## {title}", table(("flag", "environment", "default", "meaning"), rows)]
    policies = [
        (f"`{name}`", cell(policy.help), "lab only" if policy.offline else "")
        for name, policy in POLICIES.items()
    ]
    parts += ["## Cache policies", "Values of `--policy`.", table(("policy", "rule", ""), policies)]
    return "\n\n".join(parts)


def _title_of(config: type[Any]) -> str:
    return (config.__doc__ or config.__name__).split("\n", 1)[0].rstrip(".")


def _setting(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    name = field.name.upper() if field.metadata["positional"] else f"`{flag_name(field.name)}`"
    if isinstance(field.default, bool):
        name += f", `{flag_name('no_' + field.name)}`"
    default = "" if field.default in (None, "", ()) else f"`{field.default}`"
    return name, f"`{environment_name(field.name)}`", default, cell(field.metadata["help"])


def commands() -> str:
    """Page of every command with its own options and the groups of settings that it takes."""
    parts = [
        "`twofold COMMAND --help` prints the same, for commands with many flags `--help-all`. "
        "Exit codes: 0 done, 1 failed, 2 unusable setting, 130 Ctrl-C."
    ]
    for name in COMMANDS:
        parser = _subparsers(build_parser(name))[name]
        parts += _command(name, parser)
        for action, sub in _subparsers(parser).items():
            parts += _command(f"{name} {action}", sub)
    return "\n\n".join(parts)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    titles = {_title_of(made_of) for config in CONFIGS for made_of, _ in fields_by_class(config)}
    groups = [
        group.title for group in parser._action_groups if group.title in titles and group._group_actions
    ]
    inherited = {id(a) for g in parser._action_groups if g.title in titles for a in g._group_actions}
    own = [
        action
        for action in parser._actions
        if id(action) not in inherited
        and action.help != argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        and action.dest != "debug"
    ]
    yield f"## `twofold {name}`"
    yield parser.description or ""
    if own:
        yield table(("option", "meaning"), [(_option(action), _help(parser, action)) for action in own])
    if groups:
        links = [f"[{title.split(':')[0]}](settings.md#{anchor(title)})" for title in groups]
        yield f"Settings: {', '.join(links)}."


def _option(action: argparse.Action) -> str:
    shown = action.metavar or (action.dest.upper() if action.nargs != 0 else None)
    value = "" if shown is None or not action.option_strings else f" {shown}"
    names = ", ".join(action.option_strings) or str(shown)
    return f"`{cell(names + value)}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return cell(text + (f" (one of: {', '.join(map(str, action.choices))})" if action.choices else ""))


def environment() -> str:
    """Page of all environment variables that the code reads."""
    setting_names = {environment_name(f.name): f for c in CONFIGS for f in dataclasses.fields(c)}
    also = {f.metadata["also"]: f for f in setting_names.values() if f.metadata["also"]}
    unexplained = read_variables() - setting_names.keys() - also.keys() - VARIABLES.keys() - _NOT_OURS
    if unexplained:
        raise SystemExit(f"VARIABLES does not explain: {', '.join(sorted(unexplained))}")
    other = [(f"`{name}`", *about) for name, about in VARIABLES.items()]
    rows = [(f"`{name}`", f"`{flag_name(f.name)}`") for name, f in sorted({**setting_names, **also}.items())]
    return "\n\n".join(
        (
            "Every setting can come from the environment. [Settings](settings.md) explains each.",
            table(("variable", "setting"), rows),
            "## Variables that are not settings",
            table(("variable", "read by", "what it does"), other),
        )
    )


def read_variables() -> set[str]:
    """Names of the environment variables that Python, C++ and CMake sources read."""
    tops = ("engine", "kernels", "dashboard", "loadtest", "scripts", "cmake", "benchmarks")
    suffixes = {".py", ".cpp", ".h", ".cmake", ".sh"}
    files = [
        p
        for top in tops
        for p in (ROOT / top).rglob("*")
        if p.suffix in suffixes and p.parent != Path(__file__).parent
    ]
    found = (_READ_VARIABLE.findall(path.read_text(encoding="utf-8")) for path in files)
    return {name for match in found for names in match for name in names if name}


def flags_of_other_engines() -> str:
    """Page of the aliases of other engines' flags."""
    tables = {
        "KTransformers": flag_aliases.KTRANSFORMERS,
        "KTransformers' main.py": (*flag_aliases.KTRANSFORMERS_MODEL, *flag_aliases.KTRANSFORMERS_SERVER),
        "KTransformers' local_chat.py": flag_aliases.GENERATION,
        "SGLang": flag_aliases.SGLANG,
        "llama.cpp, ik_llama.cpp": flag_aliases.LLAMA_CPP,
        "servers": flag_aliases.OTHER_SERVERS,
    }
    rows = [
        (engine, ", ".join(f"`{name}`" for name in alias.names), _with_flags_as_code(alias.note))
        for engine, aliases in tables.items()
        for alias in aliases
    ]
    return "\n\n".join(
        (
            "Flags of other engines that Twofold accepts, or refuses by name. "
            "[Coming from another engine](../guides/migrate.md) "
            "has whole commands.",
            table(("engine", "flag", "here"), rows),
        )
    )


def _with_flags_as_code(note: str) -> str:
    return re.sub(r"(?<!`)(?<![\w-])(--[a-z][a-z-]*[a-z]|-ctk)(?![\w`])", r"`\1`", note)
