"""The settings: source of the command-line flags, environment names (`TWOFOLD_<FIELD>`) and the reference page.

A test compares them. Settings of expert placement are in `placement_config.py`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Final

from twofold.api.adapter_config import AdapterConfig
from twofold.api.errors import ConfigError
from twofold.api.picture_config import (
    PictureConfig,
    parse_processor_settings,
    parse_vision_device,
)
from twofold.api.placement_config import PlacementConfig
from twofold.api.pooling import parse_pooler_config
from twofold.api.settings import Checked, check, setting
from twofold.api.speculative_config import SpeculativeConfig, parse_speculative_config

SINGLE_BATCHED_TOKENS: Final = 2048
"""Default of max_num_batched_tokens with `backend` "single"."""
KV_CACHE_DTYPES: Final = ("auto", "float32", "bfloat16", "q8", "fp8", "fp8_e4m3")


@dataclass(frozen=True)
class EngineConfig(PlacementConfig, AdapterConfig, PictureConfig):
    """Engine: model, memory and concurrency limits.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    model: str = setting(
        "",
        "model directory, GGUF file (the first part of a split one), or ORG/REPO[:QUANT][@REVISION] on a Hugging Face "
        "hub, downloaded if it is missing (default: the bundled model)",
        positional=True,
    )
    revision: str | None = setting(
        None,
        "branch, tag or commit of a MODEL that is a name on a hub (default: main, as first downloaded; `twofold pull` "
        "updates it)",
    )
    tokenizer: str | None = setting(
        None,
        "directory with tokenizer and chat template, another GGUF file, or ORG/REPO on a hub (default: those of the "
        "model)",
    )
    packed_cache: str | None = setting(
        None,
        "directory for the packed model: written before the first answer if it is missing (as much disk as the model), "
        "memory-mapped from then on (default: off)",
    )
    auto_fit: bool = setting(
        True,
        "let `twofold serve` choose context, KV cache, expert slots and threads for this machine where no flag does, "
        "and print them with the predicted speed; off: the defaults of each flag",
    )
    cpu_threads: int = setting(
        0,
        "threads that compute on the CPU; 0 = one per physical core (`twofold serve` measures instead)",
        low=0,
        high=1024,
    )
    numa: str = setting(
        "auto",
        "NUMA nodes that threads and weights are spread over: auto (all nodes with cores), off (no binding), or a list "
        "such as 0,1",
    )
    backend: str = setting(
        "balance",
        "balance (continuous batching; no request waits for another's prompt) or single (lowest latency for one "
        "request: requests run one after the other, prompts in steps of 2048 tokens)",
        choices=("balance", "single"),
    )
    scheduling_policy: str = setting(
        "fcfs",
        "order in which requests are scheduled, and reverse order of preemption: fcfs (first come, first served) or "
        "priority (lower `priority` first, then first come)",
        choices=("fcfs", "priority"),
    )
    max_num_seqs: int = setting(32, "requests that run at the same time", low=1, high=4096)
    max_waiting: int = setting(
        256, "requests that may wait before new ones are refused", low=0, high=1_000_000
    )
    max_num_batched_tokens: int = setting(
        512, "tokens per step; longer prompts are prefilled in chunks", low=1, high=65_536
    )
    max_itl_ms: float | None = setting(
        None,
        "longest pause of running answers in milliseconds while prompts are prefilled, in chunks of 32 tokens or more "
        "(default: four decode steps, at least 50)",
        low=1.0,
        high=600_000.0,
    )
    max_total_tokens: int | None = setting(
        None,
        "tokens the KV cache holds for all requests (default: 8 full contexts, limited by memory)",
        low=1,
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus answer in tokens (default: the model's context length)", low=1
    )
    kv_cache_dtype: str = setting(
        "auto",
        "data type of the KV cache: auto (bfloat16 for a bfloat16 model, else float32), float32, bfloat16, q8 (8 bits "
        "with one scale per row of a head), fp8 or fp8_e4m3; only bfloat16 on a GPU",
        choices=KV_CACHE_DTYPES,
    )
    page_size: int = setting(16, "tokens per KV cache page", low=1, high=1024)
    enable_prefix_caching: bool = setting(
        True,
        "reuse the KV cache of earlier prompts with a common prefix while there is room; never changes outputs",
    )
    snapshot_bytes: int | None = setting(
        None,
        "memory for snapshots of recurrent state in the prefix cache, for models with recurrent layers "
        "(default: an eighth of free memory, at most 64 snapshots)",
        low=0,
    )
    row_cache_bytes: int = setting(
        256 * 1024**2,
        "memory for rows of tables that are read from the model's files when tokens need them: n-gram embeddings and "
        "Gemma's inputs of layers; more saves reads of the disk",
        low=0,
    )
    prefix_cache_dir: str | None = setting(
        None,
        "directory that keeps the prefix cache beyond memory and restarts; its files reveal the prompts "
        "(default: off)",
    )
    prefix_cache_bytes: int = setting(8 * 1024**3, "largest size of --prefix-cache-dir in bytes", low=2**20)
    speculative_config: str | None = setting(
        None,
        'speculative decoding as a JSON object with vLLM\'s keys, such as {"method": "ngram", '
        '"num_speculative_tokens": 4}; never changes outputs (docs/explanation/speculation.md; default: only the '
        "`prediction` of requests)",
    )
    pooler_config: str | None = setting(
        None,
        'how /v1/embeddings and /v1/rerank pool, as a JSON object with vLLM\'s keys, such as {"pooling_type": "MEAN", '
        '"normalize": false, "is_matryoshka": true} or {"classifier_from_token": ["no", "yes"]} '
        "(docs/guides/embeddings.md; default: as the model's files say, else the last token, normalised)",
    )
    seed: int | None = setting(
        None, "seed of requests without one (default: a new seed per request)", low=0, high=2**63 - 1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        nodes = re.fullmatch(r"off|auto|\d+([,-]\d+)*", self.numa)
        check(nodes is not None, "numa", self.numa, "auto, off, or nodes such as 0,1")
        if self.backend == "single":
            self._run_one_at_a_time()
        if self.speculative_config is not None:
            self._check_speculation()
        parse_pooler_config(self.pooler_config)
        _ = self.adapters
        if not self.takes_pictures and self.load_vision:  # a bad limit is an error in any case
            raise ConfigError(
                "--load-vision and a --limit-mm-per-prompt of no image were both given; give one of them"
            )
        parse_vision_device(self.vision_device)
        parse_processor_settings(self.mm_processor_kwargs)
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "--prefix-cache-dir and --no-enable-prefix-caching were both given; give one of them"
            )

    @property
    def speculation(self) -> SpeculativeConfig:
        """`speculative_config`, or what holds without it."""
        return (
            parse_speculative_config(self.speculative_config)
            if self.speculative_config
            else SpeculativeConfig()
        )

    def _check_speculation(self) -> None:
        parse_speculative_config(self.speculative_config or "")
        changing = {
            "--num-deferred-experts": self.num_deferred_experts != "0",
            "--cache-prior": self.cache_prior > 0,
        }
        for flag, is_on in changing.items():
            if is_on:
                raise ConfigError(
                    f"--speculative-config and {flag} were both given; {flag} would make outputs depend on drafts, so "
                    "give one of them"
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
class ServerConfig(Checked):
    """Server: address, access and limits.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = setting("127.0.0.1", "address to listen on; only loopback is safe without --api-key")
    port: int = setting(10002, "port to listen on; 0 = any free port", low=0, high=65_535)
    api_key: tuple[str, ...] = setting(
        (),
        "require this key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; may be given several times",
        empty_counts=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "further Host header that is accepted without --api-key; local names and --host are always accepted",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "further origin whose web pages may call this server from a browser (CORS), such as https://chat.example; "
        "'*' = any (default: pages of this machine only)",
    )
    ssl_certfile: str | None = setting(
        None, "PEM file with the server's certificate chain; turns HTTPS on, needs --ssl-keyfile"
    )
    ssl_keyfile: str | None = setting(None, "PEM file with the private key of --ssl-certfile, not encrypted")
    admin_key: str | None = setting(
        None,
        "key of the /admin routes, which `twofold ctl` uses; must differ from --api-key (default: no admin routes)",
        empty_counts=True,
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "model name for clients; may be given several times or with commas; '*' accepts any name "
        "(default: the directory's name; other names are refused)",
    )
    tool_call_parser: str | None = setting(
        None,
        "format of the model's tool calls, by vLLM's name; none = no tools (default: detected from the chat template)",
    )
    reasoning_parser: str | None = setting(
        None,
        "format of the model's reasoning, by vLLM's name; none = it stays in the text (default: detected from the chat "
        "template)",
    )
    reasoning_field: str = setting(
        "auto",
        "field of chat answers that holds the model's thinking: reasoning (vLLM's name), reasoning_content (its older "
        "name, which DeepSeek's clients read) or both; auto = both in whole answers, and reasoning alone in "
        "streams, where some clients show both",
        choices=("auto", "reasoning", "reasoning_content", "both"),
    )
    max_stored_responses: int = setting(
        1024,
        "responses of /v1/responses kept in memory, for previous_response_id, item_reference and GET; lost at exit; "
        "requests with store: false are never kept; 0 = keep none",
        low=0,
        high=1_000_000,
    )
    max_stored_response_bytes: int = setting(
        64 * 1024 * 1024,
        "largest size of the kept responses in bytes; the least recently used ones make room",
        low=0,
    )
    max_body_bytes: int = setting(32 * 1024 * 1024, "largest accepted request body in bytes", low=1024)
    allowed_media_domains: tuple[str, ...] = setting(
        (),
        "host from which pictures are fetched that a request names by URL; may be given several times or with commas "
        "(default: none; pictures come in the request)",
    )
    allowed_local_media_path: str | None = setting(
        None, "directory below which requests may name pictures as file:///PATH (default: none)"
    )
    max_connections: int | None = setting(
        None, "open connections at the same time (default: from the limit of open files, at most 4096)", low=1
    )
    drain_timeout_s: float = setting(
        30.0, "seconds that running requests may take to finish after SIGTERM", low=0
    )
    otlp_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that takes a span per request by OTLP over HTTP, such as http://127.0.0.1:4318; "
        "spans hold sizes and times, no texts; needs twofold[otel] (default: off)",
    )
    dashboard_url: str | None = setting(
        None,
        "address of the dashboard, which the chat page links to (default: http://127.0.0.1:8501 with --telemetry-url)",
    )
    slots_show_prompts: bool = setting(False, "GET /slots shows the text of running prompts")
    log_requests: bool = setting(
        False,
        "log one line per request: tokens, cached tokens, time to first token, tokens/s, expert hit rate; never texts. "
        "Refused requests are always logged",
    )
    log_format: str = setting(
        "text",
        "form of the log on standard error: text, or json (one object per line, for log collectors)",
        choices=("text", "json"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in self.api_key:
            _check_key("api_key", key, "to serve without a key, leave it out and unset TWOFOLD_API_KEY")
        if self.admin_key is not None:
            remedy = "for a server without admin routes, leave it out and unset TWOFOLD_ADMIN_KEY"
            _check_key("admin_key", self.admin_key, remedy)
            if self.admin_key in self.api_key:
                raise ConfigError(
                    "--admin-key and --api-key were given the same key; give them different ones"
                )
        if self.otlp_endpoint is not None:
            is_url = re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", self.otlp_endpoint) is not None
            check(is_url, "otlp_endpoint", self.otlp_endpoint, "an address such as http://127.0.0.1:4318")
        if self.dashboard_url is not None:
            is_url = re.fullmatch(r"https?://[^\s\"'<>]+", self.dashboard_url) is not None
            check(is_url, "dashboard_url", self.dashboard_url, "an address such as http://127.0.0.1:8501")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given = "--ssl-certfile" if self.ssl_certfile else "--ssl-keyfile"
            raise ConfigError(f"{given} was given alone; HTTPS needs --ssl-certfile and --ssl-keyfile")
        if "*" in self.allowed_origins and not self.api_key:
            raise ConfigError(
                "--allowed-origins '*' was given without --api-key, so that any web page could use this server; "
                "name the origins, or require a key"
            )
        names = ",".join(self.served_model_name).split(",") if self.served_model_name else []
        are_names = isinstance(self.served_model_name, tuple) and all(name.strip() for name in names)
        check(
            are_names,
            "served_model_name",
            self.served_model_name,
            "a name, or several with commas between them",
        )


def _check_key(field: str, key: str, remedy: str) -> None:
    # The key itself is not repeated: messages end up in logs.
    is_key = re.fullmatch(r"[!-~]+", key) is not None
    check(is_key, field, key and "***", f"printable ASCII without spaces; {remedy}")


DEFAULT_URL: Final = f"http://{ServerConfig.host}:{ServerConfig.port}"
"""URL of a server started without flags; the default for commands that talk to a server."""
DASHBOARD_URL: Final = "http://127.0.0.1:8501"
"""URL of a dashboard started without flags."""


_MAX_LABEL: Final = 100
"""Most characters of a run's name, and of a tag."""


@dataclass(frozen=True)
class DatabaseConfig(Checked):
    """Telemetry: where it is recorded."""

    telemetry_url: str | None = setting(
        None,
        "database for every decision: sqlite:///file.db, sqlite:////absolute/file.db, or for several servers "
        "postgresql+psycopg://user@host/database (default: off)",
    )
    telemetry: str = setting(
        "expert",
        "what the database records. expert: every token's experts, every upload and decision of the expert cache. "
        "layer: sums by second and layer instead (heatmap, hit rate, PCIe). step: requests and steps alone. off: "
        "nothing. Lower it to save disk space or CPU time",
        choices=("off", "step", "layer", "expert"),
    )
    telemetry_max_bytes: int = setting(
        2 * 1024**3,
        "largest size of the database with its log; beyond it the oldest rows are removed",
        low=16 * 1024**2,
    )
    run_name: str = setting(
        "", "name of this run in the database; the dashboard shows it wherever runs are chosen"
    )
    run_tag: tuple[str, ...] = setting(
        (), "a tag of this run, shown beside its name, such as baseline; may be given several times"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_name = len(self.run_name) <= _MAX_LABEL and self.run_name.isprintable()
        check(is_name, "run_name", self.run_name, f"at most {_MAX_LABEL} printable characters")
        for tag in self.run_tag:
            is_tag = re.fullmatch(rf"[\w.:=+-]{{1,{_MAX_LABEL}}}", tag) is not None
            check(is_tag, "run_tag", tag, "letters, digits and . _ : = + - without spaces or commas")


@dataclass(frozen=True)
class TelemetryConfig(DatabaseConfig):
    """Telemetry of answers."""

    telemetry_text: bool = setting(
        False,
        "also record the text of every answer, so that the dashboard colours it by misses. The database then holds "
        "private data. At most the first 4,096 tokens of an answer. Leave it off unless you debug answers",
    )
    record_routing: str | None = setting(
        None, ".npz file for the routed experts and gate weights of every answer token; written at exit"
    )
