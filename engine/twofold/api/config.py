"""Settings: frozen dataclasses whose fields carry their own help.

Command-line flags, environment names (`TWOFOLD_<FIELD>`) and the README's table all come from here; a test compares
them. A flag beats the environment, the environment beats the default. Knows nothing of what the settings do.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar, Union

from twofold.api.errors import ConfigError

T = TypeVar("T")

SINGLE_BATCHED_TOKENS: typing.Final = 2048
"""Of a step with `backend` "single", where nothing else is asked for."""
KV_CACHE_DTYPES: typing.Final = ("auto", "float32", "bfloat16", "q8", "fp8", "fp8_e4m3")


def setting(
    default: Any,
    help: str,
    *,
    positional: bool = False,
    empty_counts: bool = False,
) -> Any:
    """A dataclass field with a default and the help that every face of the setting shows.

    A field of type `tuple[str, ...]` collects what its flag is given each time; one of type `bool` has a flag with
    `no-` before its name, too. An empty environment variable means
    the default, unless `empty_counts`.
    """
    metadata = {"help": help, "positional": positional, "empty_counts": empty_counts}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class EngineConfig:
    """What to load, where its experts may live and how much may run at once.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    model: str = setting(
        "",
        "model directory or GGUF file, of a split one the first part (default: the bundled model)",
        positional=True,
    )
    tokenizer: str | None = setting(
        None,
        "directory with the tokenizer and chat template, or another GGUF file (default: those of the model)",
    )
    accelerator: str = setting(
        "auto",
        "auto (cuda if there is one, else none), cuda, none, or emulated:PROFILE for a GPU that is played by the CPU "
        "on a virtual clock",
    )
    gpu_experts_ratio: float | None = setting(
        None, "share of all experts that fit into VRAM slots, 0.0-1.0 (default: 0.25, or what VRAM allows)"
    )
    num_gpu_experts: int | None = setting(
        None, "expert slots per layer, on average; instead of --gpu-experts-ratio"
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the GPU's memory that dense weights, KV cache and expert slots may take together, 0.05-1.0",
    )
    machine_profile: str | None = setting(
        None,
        "figures of this machine, by which layer times are predicted (default: what `twofold calibrate` stored)",
    )
    policy: str = setting(
        "payback", "cache policy: which experts stay in VRAM (`twofold serve --help` explains each)"
    )
    prefetch: str = setting(
        "auto",
        "upload experts that the next layer's router foresees, while decoding: auto (under policies that can "
        "weigh it; not on a GPU), on, off; never changes an answer",
    )
    cache_state: str | None = setting(
        None,
        "file that keeps what the expert cache has learned: read at the start if it is there, written at the end",
    )
    packed_cache: str | None = setting(
        None,
        "directory that keeps the model packed, as it lies in memory: written before the first answer where it is "
        "missing, which takes as much disk as the model, and mapped from then on (default: off)",
    )
    cpu_threads: int = setting(0, "threads that compute on the CPU; 0: one per physical core")
    numa: str = setting(
        "auto",
        "memory nodes that threads and weights are spread over: auto (all that have cores), off (threads are bound to "
        "nothing), or nodes such as 0,1",
    )
    backend: str = setting(
        "balance",
        "balance (many requests, none of which waits for another's prompt), or single (least latency for one: requests "
        "run one after the other, prompts in steps of 2048 tokens)",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "who comes first, and is the last to be preempted: fcfs (who came first) or priority (whose request has the "
        "lower `priority`, then who came first)",
    )
    max_num_seqs: int = setting(32, "requests that run at the same time")
    max_waiting: int = setting(256, "requests that may wait for a place before new ones are refused")
    max_num_batched_tokens: int = setting(512, "tokens of one step; longer prompts are prefilled in chunks")
    max_itl_ms: float | None = setting(
        None,
        "milliseconds that running answers may pause while prompts are read, as far as chunks of 32 tokens allow "
        "(default: four steps without a prompt, at least 50)",
    )
    max_total_tokens: int | None = setting(
        None, "tokens the KV cache holds over all requests (default: 8 full contexts, bounded by memory)"
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus answer in tokens (default: the model's context)"
    )
    kv_cache_dtype: str = setting(
        "auto",
        "what the KV cache holds: auto (bfloat16 for a model in bfloat16, else float32), float32, bfloat16, "
        "q8 (8 bits, a scale for each row of a head), fp8 or fp8_e4m3; on a GPU bfloat16 only",
    )
    page_size: int = setting(16, "tokens of one KV cache page")
    enable_prefix_caching: bool = setting(
        True,
        "keep what was computed of a prompt, as long as the KV cache has room, for prompts that begin alike; "
        "never changes an answer",
    )
    snapshot_bytes: int | None = setting(
        None,
        "memory for snapshots of sequences' records in the prefix cache, for models whose layers keep records "
        "(default: an eighth of free memory, 64 snapshots at most)",
    )
    prefix_cache_dir: str | None = setting(
        None,
        "directory that keeps the prefix cache beyond memory and restarts; what lies there tells the prompts "
        "(default: off)",
    )
    prefix_cache_bytes: int = setting(8 * 1024**3, "largest size of that directory in bytes")
    seed: int | None = setting(None, "seed for requests that bring none; unset: drawn anew for each request")

    def __post_init__(self) -> None:
        _check(self.gpu_experts_ratio is None or 0.0 <= self.gpu_experts_ratio <= 1.0,
               "gpu_experts_ratio", self.gpu_experts_ratio, "a number from 0.0 to 1.0")  # fmt: skip
        _check(self.num_gpu_experts is None or self.num_gpu_experts >= 0,
               "num_gpu_experts", self.num_gpu_experts, "0 or more")  # fmt: skip
        _check(0.05 <= self.gpu_memory_utilization <= 1.0,
               "gpu_memory_utilization", self.gpu_memory_utilization, "a number from 0.05 to 1.0")  # fmt: skip
        if self.gpu_experts_ratio is not None and self.num_gpu_experts is not None:
            raise ConfigError("--gpu-experts-ratio and --num-gpu-experts were both given; give one of them")
        _check(
            re.fullmatch(r"off|auto|\d+([,-]\d+)*", self.numa) is not None,
            "numa",
            self.numa,
            "auto, off, or nodes such as 0,1",
        )
        _check(self.prefetch in ("auto", "on", "off"), "prefetch", self.prefetch, "auto, on or off")
        _check(self.backend in ("balance", "single"), "backend", self.backend, "balance or single")
        _check(self.scheduling_policy in ("fcfs", "priority"),
               "scheduling_policy", self.scheduling_policy, "fcfs or priority")  # fmt: skip
        if self.backend == "single":
            self._run_one_at_a_time()
        _check(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            "kv_cache_dtype",
            self.kv_cache_dtype,
            ", ".join(KV_CACHE_DTYPES),
        )
        for name, low, high in (
            ("cpu_threads", 0, 1024),
            ("max_num_seqs", 1, 4096),
            ("max_waiting", 0, 1_000_000),
            ("max_num_batched_tokens", 1, 65_536),
            ("page_size", 1, 1024),
        ):
            value = getattr(self, name)
            _check(low <= value <= high, name, value, f"a whole number from {low} to {high}")
        _check(
            self.max_itl_ms is None or 1.0 <= self.max_itl_ms <= 600_000.0,
            "max_itl_ms",
            self.max_itl_ms,
            "a number from 1 to 600000",
        )
        _check(
            self.prefix_cache_bytes >= 2**20, "prefix_cache_bytes", self.prefix_cache_bytes, "1048576 or more"
        )
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "--prefix-cache-dir and --no-enable-prefix-caching were both given; give one of them"
            )
        _check(
            self.snapshot_bytes is None or self.snapshot_bytes >= 0,
            "snapshot_bytes",
            self.snapshot_bytes,
            "0 or more",
        )
        for name in ("max_total_tokens", "max_model_len"):
            value = getattr(self, name)
            _check(value is None or value >= 1, name, value, "1 or more")
        _check(
            self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "a whole number from 0 to 2^63-1"
        )

    def _run_one_at_a_time(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        if self.max_num_seqs not in (1, defaults["max_num_seqs"]):
            raise ConfigError(
                f"--backend single and --max-num-seqs {self.max_num_seqs} were both given; single runs one request at "
                "a time, so leave one of them out"
            )
        object.__setattr__(self, "max_num_seqs", 1)
        if self.max_num_batched_tokens == defaults["max_num_batched_tokens"]:
            object.__setattr__(self, "max_num_batched_tokens", SINGLE_BATCHED_TOKENS)


@dataclass(frozen=True)
class ServerConfig:
    """Where the OpenAI server listens and who may call it.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = setting("127.0.0.1", "address to listen on; only loopback is safe without --api-key")
    port: int = setting(10002, "port to listen on")
    api_key: tuple[str, ...] = setting(
        (),
        "require this key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; given several times, any of the keys",
        empty_counts=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "without --api-key, a further name by which clients may call this server (their Host header); local names and "
        "--host always may",
    )
    admin_key: str | None = setting(
        None,
        "key of the routes under /admin, by which `twofold ctl` sees and changes what runs; another one than --api-key "
        "(default: there are no such routes)",
        empty_counts=True,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "name clients use for the model; given several times or with commas, any of the names (default: its "
        "directory's name)",
    )
    tool_call_parser: str | None = setting(
        None,
        "dialect of the model's calls of tools, by vLLM's name; none: no tools (default: what its template shows)",
    )
    reasoning_parser: str | None = setting(
        None,
        "dialect of its thinking, by vLLM's name; none: it stays in the text (default: what its template shows)",
    )
    max_body_bytes: int = setting(8 * 1024 * 1024, "largest request body accepted")
    max_connections: int | None = setting(
        None,
        "connections that may be open at once (default: what the limit of open files leaves, 4096 at most)",
    )
    drain_timeout_s: float = setting(30.0, "seconds that running requests get to finish after SIGTERM")
    slots_show_prompts: bool = setting(False, "GET /slots shows the prompts that are being answered, as text")

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65_535, "port", self.port, "0 (any free port) to 65535")
        for key in self.api_key:
            # The key itself is not repeated: messages end in logs.
            _check(re.fullmatch(r"[!-~]+", key) is not None,
                   "api_key", key and "***", "printable ASCII without spaces; to serve without a key, leave it out "
                   "and unset TWOFOLD_API_KEY")  # fmt: skip
        if self.admin_key is not None:
            _check(re.fullmatch(r"[!-~]+", self.admin_key) is not None,
                   "admin_key", self.admin_key and "***", "printable ASCII without spaces; for a server without admin "
                   "routes, leave it out and unset TWOFOLD_ADMIN_KEY")  # fmt: skip
            if self.admin_key in self.api_key:
                raise ConfigError(
                    "--admin-key and --api-key were given the same key; give them different ones"
                )
        names = ",".join(self.served_model_name).split(",") if self.served_model_name else []
        _check(isinstance(self.served_model_name, tuple) and all(name.strip() for name in names), "served_model_name",
               self.served_model_name, "a name, or several with commas between them")  # fmt: skip
        _check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "1024 or more")
        _check(self.max_connections is None or self.max_connections >= 1,
               "max_connections", self.max_connections, "1 or more")  # fmt: skip
        _check(self.drain_timeout_s >= 0, "drain_timeout_s", self.drain_timeout_s, "0 or more")


DEFAULT_URL: Final = f"http://{ServerConfig.host}:{ServerConfig.port}"
"""Of a server that was started without flags: where commands look for one."""


@dataclass(frozen=True)
class TelemetryConfig:
    """Where decisions are recorded."""

    telemetry_url: str | None = setting(
        None,
        "SQLite file that records every decision, sqlite:///file.db or sqlite:////absolute/file.db; unset: off",
    )
    record_routing: str | None = setting(
        None, "write every answer token's routed experts and gate weights to this .npz file at the end"
    )
    telemetry_max_bytes: int = setting(
        2 * 1024**3,
        "largest size of that database with its log in bytes; beyond, the oldest rows are removed",
    )

    def __post_init__(self) -> None:
        _check(
            self.telemetry_max_bytes >= 16 * 1024**2,
            "telemetry_max_bytes",
            self.telemetry_max_bytes,
            "16777216 (16 MiB) or more",
        )


_BOOLEANS: typing.Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def environment_name(field: str) -> str:
    return f"TWOFOLD_{field.upper()}"


def flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def add_arguments(
    parser: argparse.ArgumentParser, cls: type[Any], details: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add one flag per field of `cls` (positional where the field says so) with the field's own help.

    details: by field, what its help goes on to say that settings do not know.
    """
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).split("\n", 1)[0])
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        help_text = ": ".join(filter(None, (field.metadata["help"], details.get(field.name)))).replace(
            "%", "%%"
        )
        if field.default not in (None, "", ()) and "default" not in help_text:
            help_text += f" (default: {field.default})"
        common: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": help_text,
            "metavar": field.name.upper(),
        }
        if field.metadata["positional"]:
            group.add_argument(field.name, nargs="?", **common)
        elif hints[field.name] is bool:
            del common["metavar"]
            group.add_argument(
                flag_name(field.name), dest=field.name, action=argparse.BooleanOptionalAction, **common
            )
        else:
            action = "append" if typing.get_origin(hints[field.name]) is tuple else "store"
            group.add_argument(flag_name(field.name), dest=field.name, action=action, **common)


def from_namespace(cls: type[T], namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> T:
    """Build `cls` from parsed flags, then the environment, then defaults.

    Raises:
        ConfigError: a text is not of the field's type, or out of range.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        given = getattr(namespace, field.name, None)
        if given is not None:
            source = field.name if field.metadata["positional"] else flag_name(field.name)
            values[field.name] = _parse(given, hints[field.name], source)
            continue
        name = environment_name(field.name)
        if environ.get(name) or (name in environ and field.metadata["empty_counts"]):
            values[field.name] = _parse(environ[name], hints[field.name], name)
    return cls(**values)


def _parse(given: Any, hint: Any, source: str) -> Any:
    if typing.get_origin(hint) is tuple:
        return tuple(given) if isinstance(given, list) else (given,)
    text = str(given)
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise ConfigError(f"{source} was given {text!r}; it takes 1 or 0, true or false, on or off")
        return _BOOLEANS[text.lower()]
    if typing.get_origin(hint) in (Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    try:
        return hint(text)
    except ValueError:
        kind = {"int": "a whole number", "float": "a number"}.get(hint.__name__, hint.__name__)
        raise ConfigError(f"{source} was given {text!r}; it takes {kind}") from None


def _check(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{flag_name(field)} was given {value!r}; it takes {expected}")
