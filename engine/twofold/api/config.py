"""The settings: command-line flags, environment names (`TWOFOLD_<FIELD>`) and the README's table all come from here.

A test compares them. Knows nothing of what the settings do; `placement_config.py` has those of where experts run.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Final

from twofold.api.errors import ConfigError
from twofold.api.placement_config import PlacementConfig
from twofold.api.settings import check, setting

SINGLE_BATCHED_TOKENS: Final = 2048
"""Of a step with `backend` "single", where nothing else is asked for."""
KV_CACHE_DTYPES: Final = ("auto", "float32", "bfloat16", "q8", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class EngineConfig(PlacementConfig):
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
        super().__post_init__()
        check(
            re.fullmatch(r"off|auto|\d+([,-]\d+)*", self.numa) is not None,
            "numa",
            self.numa,
            "auto, off, or nodes such as 0,1",
        )
        check(self.backend in ("balance", "single"), "backend", self.backend, "balance or single")
        check(self.scheduling_policy in ("fcfs", "priority"),
               "scheduling_policy", self.scheduling_policy, "fcfs or priority")  # fmt: skip
        if self.backend == "single":
            self._run_one_at_a_time()
        check(
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
            check(low <= value <= high, name, value, f"a whole number from {low} to {high}")
        check(
            self.max_itl_ms is None or 1.0 <= self.max_itl_ms <= 600_000.0,
            "max_itl_ms",
            self.max_itl_ms,
            "a number from 1 to 600000",
        )
        check(
            self.prefix_cache_bytes >= 2**20, "prefix_cache_bytes", self.prefix_cache_bytes, "1048576 or more"
        )
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "--prefix-cache-dir and --no-enable-prefix-caching were both given; give one of them"
            )
        check(
            self.snapshot_bytes is None or self.snapshot_bytes >= 0,
            "snapshot_bytes",
            self.snapshot_bytes,
            "0 or more",
        )
        for name in ("max_total_tokens", "max_model_len"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, value, "1 or more")
        check(
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
        check(0 <= self.port <= 65_535, "port", self.port, "0 (any free port) to 65535")
        for key in self.api_key:
            # The key itself is not repeated: messages end in logs.
            check(re.fullmatch(r"[!-~]+", key) is not None,
                   "api_key", key and "***", "printable ASCII without spaces; to serve without a key, leave it out "
                   "and unset TWOFOLD_API_KEY")  # fmt: skip
        if self.admin_key is not None:
            check(re.fullmatch(r"[!-~]+", self.admin_key) is not None,
                   "admin_key", self.admin_key and "***", "printable ASCII without spaces; for a server without admin "
                   "routes, leave it out and unset TWOFOLD_ADMIN_KEY")  # fmt: skip
            if self.admin_key in self.api_key:
                raise ConfigError(
                    "--admin-key and --api-key were given the same key; give them different ones"
                )
        names = ",".join(self.served_model_name).split(",") if self.served_model_name else []
        check(isinstance(self.served_model_name, tuple) and all(name.strip() for name in names), "served_model_name",
               self.served_model_name, "a name, or several with commas between them")  # fmt: skip
        check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "1024 or more")
        check(self.max_connections is None or self.max_connections >= 1,
               "max_connections", self.max_connections, "1 or more")  # fmt: skip
        check(self.drain_timeout_s >= 0, "drain_timeout_s", self.drain_timeout_s, "0 or more")


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
        check(
            self.telemetry_max_bytes >= 16 * 1024**2,
            "telemetry_max_bytes",
            self.telemetry_max_bytes,
            "16777216 (16 MiB) or more",
        )
