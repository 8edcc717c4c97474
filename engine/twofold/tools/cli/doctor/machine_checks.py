"""The single checks of `twofold doctor`. Each reports its finding and, if that is bad, a remedy; none raises."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sqlite3
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.errors import ConfigError, TwofoldError
from twofold.api.pooling import parse_pooler_config
from twofold.weights.host_memory import available_memory_bytes

OTHER_MODEL: Final = "give another MODEL: `twofold models` lists what is supported"
Verdict = Literal["ok", "note", "bad"]

_GIB: Final = 2**30
_LEAST_DISK_BYTES: Final = 2 * _GIB

_EXTRAS: Final = {
    "server": ("fastapi", "uvicorn", "pydantic", "httpx", "markdown_it"),
    "telemetry": ("sqlalchemy",),
    "chat": ("prompt_toolkit", "markdown_it"),
    "dashboard": ("streamlit", "plotly", "pandas"),
    "loadtest": ("locust",),
}


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report. A "note" does not keep anything from running; it and "bad" have a remedy."""

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert self.verdict == "ok" or self.remedy, f"{self.name} has no remedy"

    @classmethod
    def bad(cls, name: str, problem: str, otherwise: str) -> Check:
        """A failed check. Messages end with what to do, after the last semicolon; `otherwise`: of one that does not."""
        found, _, remedy = problem.rpartition("; ")
        return cls(name, "bad", found, remedy) if found else cls(name, "bad", problem, otherwise)


def check_cpu() -> Check:
    """The instruction set that the kernels selected on this CPU, and why."""
    try:
        from twofold.blocks import ops
    except ImportError as error:
        return Check("CPU", "bad", f"the native module cannot be imported ({error})", "build it: make build")
    try:
        isa, reason = ops.isa_choice()
    except TwofoldError as error:
        return Check("CPU", "bad", str(error), "unset TWOFOLD_ISA or set it to generic")
    features = (
        ", ".join(name for name, present in ops.cpu_features().items() if present) or "no vector extensions"
    )
    found = f"kernels {isa} ({reason}); {features}; {len(os.sched_getaffinity(0))} logical cores usable"
    if isa == "generic":
        return Check("CPU", "note", found, "this is slow: the fast kernels need AVX2 or AVX-512")
    if ops.left_out_levels():
        return Check("CPU", "note", found, "compile what is left out: TWOFOLD_LEVELS=all make quick-build")
    return Check("CPU", "ok", found)


def check_accelerator(config: EngineConfig) -> Check:
    """The accelerator that --accelerator resolves to on this machine."""
    try:
        from twofold.device.finding import choose_accelerator, cuda_indices

        choice, _ = choose_accelerator(config.accelerator, cuda_indices(config))
    except TwofoldError as error:
        return Check.bad("accelerator", str(error), "use the CPU alone: --accelerator none")
    except ImportError as error:
        return Check(
            "accelerator", "bad", f"the native module cannot be imported ({error})", "build it: make build"
        )
    found = f"{choice.label}: {choice.reason}"
    if choice.unused_gpu:
        return Check.bad("accelerator", found, "repair it, or use the CPU alone: --accelerator none")
    return Check("accelerator", "ok", found)


def check_memory() -> Check:
    available = available_memory_bytes()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Check("memory", "ok", f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB")


def check_model(config: EngineConfig) -> Check:
    """Whether the model fits, judged by its file headers: no weights are loaded."""
    from twofold.models.model_files import open_model_files
    from twofold.models.picture_encoder import encoder_bytes
    from twofold.models.sizing import check_host_memory, describe_tables, measure_files

    try:
        files = open_model_files(config.model, config.speculation.mtp_use)
        files = files.caching_rows(config.row_cache_bytes)
        size = measure_files(files, kv_cache_dtype=config.kv_cache_dtype)
        tokens = config.max_total_tokens or config.max_model_len or size.config.max_context
        fit = check_host_memory(size, available_memory_bytes(), tokens)
    except TwofoldError as error:
        return Check.bad("model", str(error), OTHER_MODEL)
    experts = "no experts (a dense model)"
    if size.num_experts_total:
        experts = f"{size.num_experts_total} experts of {size.one_expert_bytes / 1e6:.2f} MB"
    found = (
        f"{Path(config.model).name}: {size.config.architecture}, {experts}, {size.file_bytes / _GIB:.2f} GiB on disk; "
        f"with a KV cache of {tokens} tokens it needs {fit.needed_bytes / _GIB:.2f} GiB of memory"
    )
    if size.config.context_limit_reason:
        found += f"; {size.config.context_limit_reason}"
    if size.bytes_per_sequence:
        found += f", {size.bytes_per_sequence / 1e6:.1f} MB of it for each sequence's record"
    if encoder := encoder_bytes(size.encoder_elements, config, None):
        found += f"; its picture encoder takes {encoder / _GIB:.2f} GiB more"
    if tables := describe_tables(size):
        found += f"; {tables}"
    if files.mapped is not None:
        end = files.mapped.contents.panels_end
        cached = files.mapped.mapping.resident_bytes(0, end)
        found += f"; packed, {100 * cached / end:.0f} % of its panels are in the page cache"
    if fit.fits:
        return Check("model", "ok", found)
    return Check("model", "bad", found, fit.advice)


def check_pooling(config: EngineConfig) -> Check | None:
    """What /v1/embeddings and /v1/rerank give; None for a model that cannot be opened."""
    from twofold.models.model_files import open_model_files
    from twofold.models.pooling import read_pooling

    try:
        files = open_model_files(config.model)
        pooling = read_pooling(Path(config.model), files, parse_pooler_config(config.pooler_config))
    except TwofoldError:
        # The check of the model reports why.
        return None
    if not pooling.refusal:
        return Check("embeddings", "ok", pooling.describe())
    return Check(
        "embeddings",
        "note",
        pooling.describe(),
        "/v1/embeddings and /v1/rerank are refused; serve another model for them",
    )


def check_chat(config: EngineConfig, server: ServerConfig) -> Check | None:
    """Tool calling and reasoning support of the chat template; None for a model that cannot be opened."""
    from twofold.models.registry import chat_marks, read_config
    from twofold.text.chat.marks import chosen_marks
    from twofold.text.tokenizer import Tokenizer

    try:
        architecture = read_config(config.model).architecture
        tokenizer = Tokenizer.open(config.tokenizer or config.model)
    except TwofoldError:
        # The check of the model reports why.
        return None
    if not tokenizer.has_chat_template:
        return Check(
            "chat",
            "note",
            "the model has no chat template",
            "send plain prompts to /v1/completions; chat is refused",
        )
    marks = chosen_marks(
        chat_marks(architecture, tokenizer.chat_template), server.tool_call_parser, server.reasoning_parser
    )
    found = (
        f"calls of tools: {marks.tool_call_parser or 'none'}; thinking: {marks.reasoning_parser or 'none'}"
    )
    if marks.thinking is not None:
        found += " ({} … {})".format(*(mark.strip() for mark in marks.thinking))
    ends = [token for token in marks.end_of_turn if tokenizer.token_id(token) is not None]
    found += f"; end-of-turn tokens: {', '.join(ends)}" if ends else ""
    if marks.tool_call_parser is None:
        remedy = "requests with tools are refused; if the model's calls have a known form, give --tool-call-parser NAME"
        return Check("chat", "note", f"{found}: its template has no known form of tool calls", remedy)
    if tokenizer.tool_form is None:
        remedy = "send tool results as text"
        return Check("chat", "note", f"{found}; its template does not render calls of earlier turns", remedy)
    return Check("chat", "ok", found)


def check_device_memory(config: EngineConfig) -> Check | None:
    """The planned split of the GPU's memory; None if no GPU would be used."""
    from twofold.device.finding import choose_accelerator, cuda_indices, device_memories
    from twofold.device.memory.budget import device_cache_dtype
    from twofold.device.memory.pipeline import plan_machine
    from twofold.models.sizing import measure_model

    try:
        choice, devices = choose_accelerator(config.accelerator, cuda_indices(config))
        if not devices:
            return None
        size = measure_model(config.model, kv_cache_dtype=device_cache_dtype(config))
        _, budget = plan_machine(config, size, choice.devices, device_memories(devices))
    except TwofoldError as error:
        return Check.bad("GPU memory", str(error), "lower --gpu-experts-ratio or --max-total-tokens")
    return Check("GPU memory", "ok", budget.explain())


def check_disk(telemetry_url: str | None) -> Check:
    """Free space at the telemetry database (or here, if nothing is recorded)."""
    place = Path(".")
    if telemetry_url and telemetry_url.startswith("sqlite:///"):
        place = Path(telemetry_url.removeprefix("sqlite:///") or ".").absolute().parent
    if not place.is_dir():
        return Check("disk", "bad", f"{place} does not exist", "make the directory or change --telemetry-url")
    free = shutil.disk_usage(place).free
    found = f"{free / _GIB:.1f} GiB free in {place.resolve()}"
    if not os.access(place, os.W_OK):
        return Check("disk", "note", f"{found}, which is read-only", "record elsewhere: --telemetry-url")
    if free < _LEAST_DISK_BYTES:
        return Check(
            "disk", "note", found, "telemetry may fill it; free some or record elsewhere: --telemetry-url"
        )
    return Check("disk", "ok", found)


def check_telemetry(telemetry_url: str | None) -> Check | None:
    """The PostgreSQL server of the telemetry URL; None for a file, whose disk `check_disk` reports."""
    if not (telemetry_url or "").startswith("postgres") or find_spec("sqlalchemy") is None:
        return None
    from twofold.telemetry import postgres, schema

    try:
        return Check("telemetry", "ok", postgres.describe(schema.parse_url(telemetry_url or "")))
    except ConfigError as error:
        return Check("telemetry", "bad", str(error), "start the server, or change --telemetry-url")


def check_port(config: ServerConfig) -> Check:
    """Whether `twofold serve` could listen at its address."""
    address, error = f"{config.host}:{config.port}", _why_taken(config.host, config.port)
    if error is None:
        return Check("port", "ok", f"{address} is free")
    found = f"{address}: {error.strerror or error}"
    return Check("port", "note", found, "choose another --port for serve, or stop what runs there")


def free_port(config: ServerConfig) -> int | None:
    """The next port that is free, where the chosen one is in use; None otherwise."""
    error = _why_taken(config.host, config.port)
    if error is None or error.errno != errno.EADDRINUSE:
        return None
    following = range(config.port + 1, min(config.port + 100, 65_536))
    return next((port for port in following if _why_taken(config.host, port) is None), None)


def _why_taken(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def check_sqlite() -> Check:
    """SQLite's version: 3.7.0 to 3.51.2 may corrupt a WAL database written by two connections; Twofold uses one.

    Source: https://sqlite.org/releaselog/3_51_3.html (the WAL-reset bug).
    """
    version = sqlite3.sqlite_version_info
    if (3, 7, 0) <= version <= (3, 51, 2):
        return Check(
            "SQLite",
            "note",
            f"{sqlite3.sqlite_version} has the WAL-reset bug; Twofold writes over one connection and is not affected",
            "let no second program write to the telemetry database",
        )
    return Check("SQLite", "ok", sqlite3.sqlite_version)


def check_packages() -> Check:
    """Which optional packages are installed."""
    missing = [extra for extra, packages in _EXTRAS.items() if not all(map(find_spec, packages))]
    present = [extra for extra in _EXTRAS if extra not in missing]
    found = f"installed: {', '.join(present) or 'none'}"
    if missing:
        return Check("extras", "note", found, f"the rest: pip install 'twofold[{','.join(missing)}]'")
    return Check("extras", "ok", found)
