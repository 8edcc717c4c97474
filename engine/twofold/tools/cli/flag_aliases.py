"""Aliases for flags of KTransformers, SGLang, llama.cpp and ik_llama.cpp, in one table.

An alias acts as our flag, does nothing, or is refused; each prints one line that names our flag. Aliases are not in
--help; docs/reference/flags-of-other-engines.md lists them. Flags may be written with underscores (`main`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.api.pooling import POOLING_KINDS
from twofold.api.settings import flag_name
from twofold.api.speculative_config import MODEL_METHODS

Values = dict[str, Any]
N_CPU_MOE: Final = "n_cpu_moe"
"""Not a setting: `cpu_moe_ratio` converts it once the model's layers are known."""
GGUF_PATH: Final = "gguf_path"
"""Not a setting: it becomes MODEL, and a model path given with it becomes the tokenizer."""
_NOT_SETTINGS: Final = (N_CPU_MOE, GGUF_PATH)


@dataclass(frozen=True)
class Alias:
    """`names` of another program's flag, the settings it maps to, and the note to print."""

    names: tuple[str, ...]
    note: str
    targets: tuple[str, ...] = ()
    """Settings that it may set."""
    nargs: int | str | None = None
    """As in argparse: 0 takes nothing, None one value, "?" one or none."""
    values: Callable[[Any], Values] = lambda given: {}
    """Maps the given value to settings. ValueError: refused; the text says what to do."""
    is_short: bool = False  # documented beside the setting: no note is printed


def _to(target: str, *names: str, but: str = "") -> Alias:
    name = "the argument MODEL" if target == "model" else flag_name(target)
    note = f"is {name} here" + (f"; {but}" if but else "")
    return Alias(names, note, (target,), values=lambda given: {target: given})


def _switch(target: str, *names: str, on: object = True, but: str = "") -> Alias:
    shown = flag_name(target if on is not False else f"no_{target}")
    note = f"is {shown}{'' if isinstance(on, bool) else f' {on}'} here" + (f"; {but}" if but else "")
    return Alias(names, note, (target,), nargs=0, values=lambda given: {target: on})


def _ignored(why: str, *names: str, nargs: int | str | None = None) -> Alias:
    return Alias(names, f"does nothing here: {why}", nargs=nargs)


def _refused(why: str, *names: str, nargs: int | str | None = None) -> Alias:
    def refuse(given: Any) -> Values:
        raise ValueError(why)

    return Alias(names, f"is refused: {why}", nargs=nargs, values=refuse)


def _only(accepted: Sequence[str], why: str, *names: str) -> Alias:
    """An alias that refuses all values but these."""

    def check(given: str) -> Values:
        if given not in accepted:
            raise ValueError(why)
        return {}

    return Alias(names, f"does nothing here: {why}", values=check)


def _nodes(given: str) -> Values:
    if not given.isdigit() or not 1 <= int(given) <= 64:
        raise ValueError("it takes a whole number from 1 to 64")
    return {"numa": ",".join(map(str, range(int(given))))}


def _context(given: str) -> Values:
    return {} if given in ("0", "-1") else {"max_model_len": given}


def _threads(given: str) -> Values:
    return {"cpu_threads": "0" if given == "-1" else given}


def _layers(given: str) -> Values:
    return {"accelerator": "none"} if given == "0" else {}


_KV_TYPES: Final = {"f32": "float32", "f16": "bfloat16", "bf16": "bfloat16", "q8_0": "q8"}


def _kv_type(given: str) -> Values:
    if given not in _KV_TYPES:
        raise ValueError(f"it takes {', '.join(_KV_TYPES)}; --kv-cache-dtype has further types")
    return {"kv_cache_dtype": _KV_TYPES[given]}


def _on_or_off(given: str | None) -> Values:
    if given not in (None, "on", "off", "auto", "1", "0"):
        raise ValueError("it takes on, off or auto")
    return {}


def _n_cpu_moe(given: str) -> Values:
    if not given.isdigit():
        raise ValueError("it takes a whole number, of layers")
    return {N_CPU_MOE: int(given)}


SPECULATION: Final = "speculative_config"


def _drafting(key: str, *names: str) -> Alias:
    """An alias for one key of --speculative-config, which it switches on; its method is ngram if no other is given."""

    def value(given: str) -> Values:
        if not given.isdigit():
            raise ValueError("it takes a whole number")
        return {SPECULATION: json.dumps({key: int(given)})}

    return Alias(names, f"is {key} of --speculative-config here", (SPECULATION,), values=value)


def _drafter(methods: Mapping[str, str], *names: str) -> Alias:
    """An alias for the method of --speculative-config. methods: its values and the method of each."""

    def value(given: str) -> Values:
        if given == "none":
            return {}
        if given not in methods:
            raise ValueError(f"it takes {', '.join(methods)} here")
        return {SPECULATION: json.dumps({"method": methods[given]})}

    return Alias(names, "is method of --speculative-config here", (SPECULATION,), values=value)


def _draft_model(*names: str) -> Alias:
    return Alias(
        names,
        "is model of --speculative-config here, with method draft_model if no other is given",
        (SPECULATION,),
        values=lambda given: {SPECULATION: json.dumps({"model": given})},
    )


def _speculation(before: str | None, given: str) -> str:
    """--speculative-config after one more alias."""
    merged = json.loads(before or "{}") | json.loads(given)
    if "model" in merged and merged.get("method") not in MODEL_METHODS:
        merged["method"] = "draft_model"
    return json.dumps({"method": "ngram"} | merged)


def _pooling(given: str) -> Values:
    if given not in POOLING_KINDS:
        raise ValueError(f"it takes {', '.join(POOLING_KINDS)} here; /v1/rerank needs no flag")
    return {"pooler_config": json.dumps({"pooling_type": given.upper()})}


_KT_BACKENDS: Final = {"balance_serve": "balance", "ktransformers": "single", "transformers": "single"}


def _kt_backend(given: str) -> Values:
    if given not in _KT_BACKENDS:
        raise ValueError(f"it takes {', '.join(_KT_BACKENDS)}")
    return {"backend": _KT_BACKENDS[given]}


LORA: Final = "lora_modules"


def _module(name: str, path: str, scale: float = 0.0) -> str:
    name = name or Path(path).name.removesuffix(".gguf")
    return json.dumps({"name": name, "path": path} | ({"scale": scale} if scale else {}))


def _lora_paths(given: Sequence[str]) -> Values:
    """SGLang's PATH, NAME=PATH, or an object with lora_name and lora_path."""
    modules = []
    for text in given:
        name, _, path = text.rpartition("=")
        if text.lstrip().startswith("{"):
            try:
                about = json.loads(text)
            except ValueError as error:
                raise ValueError(f"{text!r} is not JSON: {error}") from None
            name, path = about.get("lora_name"), about.get("lora_path")
            if not (isinstance(name, str) and isinstance(path, str)):
                raise ValueError(f"{text!r} has no lora_name and lora_path")
        modules.append(_module(name, path))
    return {LORA: modules}


def _lora(given: str) -> Values:
    return {LORA: [_module("", path, 1.0) for path in given.split(",")]}


def _lora_scaled(given: Sequence[str]) -> Values:
    """llama.cpp's FILE:SCALE with commas, or its older FILE SCALE."""
    pairs = [tuple(given)] if len(given) == 2 else [pair.rpartition(":")[::2] for pair in given[0].split(",")]
    try:
        scaled = [(path, float(scale)) for path, scale in pairs]
    except ValueError:
        scaled = []
    if not scaled or len(given) > 2 or not all(path for path, _ in scaled):
        raise ValueError("it takes FILE:SCALE, several with commas, or FILE SCALE")
    return {LORA: [_module("", path, scale) for path, scale in scaled]}


KTRANSFORMERS: Final = (    _to("num_gpu_experts", "--kt-num-gpu-experts"),
    _to("gpu_experts_ratio", "--kt-gpu-experts-ratio"),
    _to("expert_placement_strategy", "--kt-expert-placement-strategy", but="the default here, payback, moves experts"),
    _switch("enable_dynamic_expert_update", "--kt-enable-dynamic-expert-update"),
    _to("gpu_prefill_token_threshold", "--kt-gpu-prefill-token-threshold"),
    _to("num_deferred_experts", "--kt-max-deferred-experts-per-token", "--kt-num-deferred-experts"),
    _to("init_expert_location", "--kt-expert-frequency-file"),
    _switch("record_gpu_expert_distribution", "--record-kt-gpu-expert-distribution",
            but="it records from the start and writes at the end"),
    _to("cpu_threads", "--kt-cpuinfer", but="0 is one per physical core"),
    Alias(("--kt-threadpool-count",), "is --numa with the first N nodes here; auto takes all nodes", ("numa",),
          values=_nodes),
    Alias(("--kt-numa-nodes",), "is --numa with commas between the nodes here", ("numa",), nargs="+",
          values=lambda given: {"numa": ",".join(given)}),
    _ignored("all weights come from MODEL; `twofold quantize` writes smaller experts",
             "--kt-weight-path", "--kt-amx-weight-path"),
    _ignored("the format of MODEL's weights and the CPU decide how experts are computed", "--kt-method",
             "--kt-amx-method"),
    _ignored("a long prompt's experts pass through staging slots wherever that is quicker", "--kt-stream-prefill",
             nargs=0),
    _ignored("a long prompt's experts pass through staging slots wherever that is quicker",
             "--kt-prefill-stream-top-n", "--kt-stream-prefill-experts-per-chunk", "--kt-stream-prefill-ring-slots",
             "--kt-stream-prefill-safety-margin-mb"),
    _refused("whole layers cannot be chosen; give the share of layers as --gpu-experts-ratio",
             "--kt-num-gpu-layers", "--kt-num-gpu-full-layers"),
    Alias(("--kt-lora-path", "--kt-expert-lora-path"), "is --lora-modules NAME=PATH here, for all requests that name "
          "no adapter", (LORA,), values=_lora),
)  # fmt: skip
"""Flags of KTransformers' fork of SGLang."""

KTRANSFORMERS_MODEL: Final = (
    _to("model", "--model-dir"),
    Alias(("--gguf-path",), "is the argument MODEL here; a --model-path beside it is --tokenizer, if it is a directory",
          ("model", "tokenizer"), values=lambda given: {GGUF_PATH: given}),
    _to("cpu_threads", "--cpu-infer"),
    _to("max_num_batched_tokens", "--chunk-size", "--chunk-prefill-size"),
    _ignored("KTransformers' rule files choose its operators; --optimize-config takes rules of Twofold",
             "--optimize-config-path"),
    _ignored("architecture and chat template come from MODEL's files", "--architectures", "--mode"),
    _ignored("--accelerator chooses the device", "--device"),
    _ignored("CUDA graphs are used wherever they can be", "--use-cuda-graph", "--no-use-cuda-graph", nargs=0),
    _ignored("the chat template decides whether an answer begins with thinking", "--force-think", "--no-force-think",
             nargs=0),
    _ignored("`twofold generate --prompt -` reads a prompt from standard input", "--prompt-file"),
)  # fmt: skip
"""Flags of KTransformers' server/main.py and local_chat.py. Underscores and dashes are both accepted."""

KTRANSFORMERS_SERVER: Final = (
    _to("served_model_name", "--model-name"),
    Alias(("--backend-type", "--type"), "is --backend here; balance_serve is balance, ktransformers is single",
          ("backend",), values=_kt_backend),
    _to("max_num_seqs", "--max-batch-size"),
    _to("max_total_tokens", "--cache-lens"),
    _only(("FCFS", "fcfs"), "requests run first come, first served; --scheduling-policy also has priority",
          "--sched-strategy"),
    _ignored("requests set it; the default of `max_tokens` is the room left in the context", "--max-new-tokens",
             "--max-response-tokens"),
    _ignored("--max-model-len bounds prompt plus answer", "--length", "--total-context"),
    _ignored("requests set it; the defaults come from the model's generation_config.json", "--temperature", "--top-p",
             "--top-k", "--repetition-penalty", "--frequency-penalty", "--presence-penalty"),
    _ignored("this sampling method does not exist; requests set temperature, top_p, top_k and min_p",
             "--smoothing-factor", "--dynamic-temperature", "--top-a", "--skew", "--typical"),
    _ignored("requests contain messages, response_format and stop texts", "--system-prompt", "--username",
             "--botname", "--ban-strings"),
    _ignored("requests contain messages, response_format and stop texts", "--json-mode", "--amnesia", nargs="?"),
    _ignored("an option of ExLlamaV2, which the engine does not have", "--paged", "--healing", "--no-flash-attn",
             "--low-mem", "--load-q4", "--fast-safetensors", "--no-draft-scale", "--modes", "--no-code-formatting",
             "--ngram-decoding", "--print-timings", nargs="?"),
    _ignored("an answer is sent token by token", "--response-chunk"),
    _ignored("--kv-cache-dtype q8 makes the KV cache smaller", "--cache-8bit", "--cache-q4", nargs="?"),
    _ignored("the prefix cache is in the KV cache; --prefix-cache-dir keeps it on disk", "--kvc2-config-dir",
             "--memory-gpu-only", "--utilization-percentage", "--cpu-memory-size-GB"),
    _ignored("`make run` starts the dashboard", "--web", nargs="?"),
    _ignored("--allowed-origins names the origins whose pages may call the server", "--web-cross-domain", nargs="?"),
    _ignored("logs go to standard error", "--log-dir", "--log-file", "--backup-count"),
    _ignored("assistants, users and uploads are not stored", "--db-type", "--db-host", "--db-port", "--db-name",
             "--db-pool-size", "--db-database", "--file-upload-dir", "--assistant-store-dir"),
    _refused("there are no users; --api-key guards the server", "--user-secret-key", "--user-algorithm"),
    _refused("--devices names several GPUs, and --tensor-split their shares of the expert slots", "--gpu-split"),
    _refused("the model's files set it; another value would change its answers", "--rope-scale", "--rope-alpha",
             "--experts-per-token"),
    _refused("draft models are given as --speculative-config", "--draft-model-path", "--draft-gguf-path",
             "--draft-model-dir", "--q4-gguf-path"),
)  # fmt: skip
"""Flags of KTransformers' server/main.py alone."""

GENERATION: Final = (_to("max_tokens", "--max-new-tokens"),)
"""KTransformers' local_chat.py: for commands that generate text themselves."""

_ONE_SIZE: Final = "--tensor-parallel-size of `twofold serve` sets the number of processes; leave it out"
SGLANG: Final = (
    _to("model", "--model-path", "--model"),
    _to("tokenizer", "--tokenizer-path"),
    _to("max_model_len", "--context-length"),
    _to("max_num_seqs", "--max-running-requests"),
    _to("max_waiting", "--max-queued-requests"),
    _to("max_num_batched_tokens", "--chunked-prefill-size", "--max-prefill-tokens"),
    _to("gpu_memory_utilization", "--mem-fraction-static", but="it also covers expert slots and the workspace"),
    _to("seed", "--random-seed"),
    _only(("fcfs",), "requests run first come, first served; --scheduling-policy also has priority",
          "--schedule-policy"),
    _switch("scheduling_policy", "--enable-priority-scheduling", on="priority"),
    _switch("enable_prefix_caching", "--disable-radix-cache", on=False),
    _only(("1",), _ONE_SIZE, "--pp-size", "--dp-size", "--ep-size", "--expert-parallel-size"),
    _ignored("models bring no code; unknown families are refused", "--trust-remote-code", nargs=0),
    _ignored("the machine and the model decide the kernels", "--attention-backend", "--sampling-backend",
             "--moe-runner-backend", "--grammar-backend", "--fp8-gemm-backend", "--quantization", "--dtype"),
    _ignored("the engine has nothing like it", "--disable-shared-experts-fusion", "--disable-cuda-graph",
             "--skip-server-warmup", "--disable-overlap-schedule", "--enable-p2p-check", "--disable-custom-all-reduce",
             nargs=0),
    _ignored("it is always on", "--enable-mixed-chunk", "--enable-metrics", "--enable-cache-report", nargs=0),
    _ignored("a watchdog always runs", "--watchdog-timeout"),
    _ignored("embeddings are served beside answers", "--is-embedding", nargs=0),
    _ignored("use --debug", "--log-level", "--log-level-http"),
    _drafter({"NGRAM": "ngram", "ngram": "ngram", "STANDALONE": "draft_model", "EAGLE3": "eagle3",
              "NEXTN": "mtp"},
             "--speculative-algorithm"),
    _drafting("num_speculative_tokens", "--speculative-num-draft-tokens", "--speculative-num-steps"),
    _drafting("prompt_lookup_min", "--speculative-ngram-min-match-window-size"),
    _drafting("prompt_lookup_max", "--speculative-ngram-max-match-window-size"),
    _draft_model("--speculative-draft-model-path"),
    Alias(("--lora-paths",), "is --lora-modules here; an adapter without a name has its file's", (LORA,), nargs="+",
          values=_lora_paths),
    _to("max_loras", "--max-loras-per-batch"),
    _to("max_cpu_loras", "--max-loaded-loras"),
    _ignored("an adapter's files say which matrices it changes, and how they are computed is chosen here",
             "--lora-backend", "--max-lora-chunk-size"),
    _ignored("an adapter's files say which matrices it changes", "--lora-target-modules", nargs="+"),
    _only(("lru",), "the least recently used adapter leaves memory first", "--lora-eviction-policy"),
)  # fmt: skip

LLAMA_CPP: Final = (
    _to("model", "-m"),
    _to("mmproj", "-mm"),
    Alias(("-c", "--ctx-size"), "is --max-model-len here, for one request; --max-total-tokens is for all requests",
          ("max_model_len",), values=_context),
    Alias(("-t", "--threads"), "is --cpu-threads here", ("cpu_threads",), values=_threads),
    _ignored("prompts and answers are computed by the same --cpu-threads", "-tb", "--threads-batch"),
    Alias(("-ngl", "--gpu-layers", "--n-gpu-layers"),
          "does nothing here, except 0, which is --accelerator none: dense weights are on the GPU, and "
          "--gpu-experts-ratio sets the share of experts there", ("accelerator",), values=_layers),
    Alias(("-ncmoe", "--n-cpu-moe"), "is --gpu-experts-ratio here, with the other layers' share; the cache policy "
          "picks the experts from any layer", ("gpu_experts_ratio",), values=_n_cpu_moe),
    Alias(("-cmoe", "--cpu-moe"), "is --num-gpu-experts 0 here", ("num_gpu_experts",), nargs=0,
          values=lambda given: {N_CPU_MOE: None}),
    _to("max_num_batched_tokens", "-ub", "--ubatch-size"),
    _ignored("--max-num-batched-tokens is the only step size", "-b", "--batch-size"),
    _to("max_num_seqs", "-np", "--parallel"),
    Alias(("-ctk", "--cache-type-k"), "is --kv-cache-dtype here, for keys and values; f16 is bfloat16",
          ("kv_cache_dtype",), values=_kv_type),
    _ignored("keys and values have one type, set by -ctk", "-ctv", "--cache-type-v"),
    _to("seed", "-s"),
    Alias(("-fa", "--flash-attn"), "does nothing here: attention never stores its scores", nargs="?",
          values=_on_or_off),
    _ignored("it is always on", "--jinja", "-cb", "--cont-batching", nargs=0),
    _ignored("packed weights (`twofold pack`) are memory-mapped, others are copied", "--mlock", "--no-mmap", nargs=0),
    _to("tensor_split", "-ts", but="it divides expert slots, not layers"),
    _to("devices", "-dev"),
    _to("split_mode", "-sm"),
    _to("main_gpu", "-mg", but="it counts the GPUs of --devices"),
    _refused("rules place tensors here, see --optimize-config", "-ot", "--override-tensor"),
    _refused("nothing is downloaded; give the path of a file or directory", "-hf", "--hf-repo", "-mu", "--model-url"),
    Alias(("--lora",), "is --lora-modules NAME=FILE here, for all requests that name no adapter", (LORA,),
          values=_lora),
    Alias(("--lora-scaled",), "is --lora-modules with a scale here, for all requests that name no adapter", (LORA,),
          nargs="+", values=_lora_scaled),
    _refused("--lora-modules NAME=FILE loads adapters without applying them", "--lora-init-without-apply", nargs=0),
    _drafter(dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "ngram")
             | {"draft-mtp": "mtp"}, "--spec-type"),
    _drafting("num_speculative_tokens", "--draft", "--draft-n", "--draft-max", "--spec-ngram-size-m"),
    _drafting("prompt_lookup_min", "--spec-ngram-size-n"),
    _ignored("each step's price decides how many tokens are drafted", "--draft-min", "--draft-n-min", "--draft-p-min"),
    _draft_model("-md", "--model-draft"),
    Alias(("--pooling",), "is pooling_type of --pooler-config here", ("pooler_config",), values=_pooling),
    _ignored("embeddings and reranking are served beside answers", "--embedding", "--embeddings", "--rerank",
             "--reranking", nargs=0),
    # ik_llama.cpp
    _ignored("weights are always packed for the CPU when they are loaded", "-rtr", "--run-time-repack", nargs=0),
    _ignored("gate, up and activation of an expert are always fused", "-fmoe", "--fused-moe", nargs=0),
    _ignored("latent attention has only one form", "-mla", "--mla-use", "-amb", "--attention-max-batch"),
    _refused("fewer experts than the model uses would change its answers", "-ser", "--smart-expert-reduction"),
)  # fmt: skip
"""Flags of llama.cpp and ik_llama.cpp. `--moe-cache-mib` is a setting here."""
RANKS: Final = (  # for all commands with ranks
    replace(_to("tensor_parallel_size", "-tp"), is_short=True),
    _to("tensor_parallel_size", "--tp", "--tp-size"),
    _to("distributed_timeout_s", "--dist-timeout", "--distributed-timeout-seconds"),
)
OTHER_SERVERS: Final = (
    _to("served_model_name", "-a", "--alias"),
    _to("admin_key", "--admin-api-key"),
    _ignored("answers, embeddings and reranking are all served", "--runner", "--convert", "--task"),
    _ignored("a request always loads its model; --models-dir names the folder", "--models-autoload", nargs=0),
    _refused("a request always loads its model", "--no-models-autoload", nargs=0),
    _refused("all flags apply to all models", "--models-preset"),
    _to("otlp_endpoint", "--otlp-traces-endpoint", but="OTLP over HTTP, not over gRPC"),
    _ignored(
        "adapters are served where --lora-modules or --lora-dir names them",
        "--enable-lora",
        "--no-enable-lora",
        nargs=0,
    ),
    _ignored("adapters have the type of their files and are computed in float32", "--lora-dtype"),
    _ignored("an adapter's rows of the vocabulary are those of the model", "--lora-extra-vocab-size"),
    _ignored("rank 0 computes adapters", "--fully-sharded-loras", nargs=0),
    *RANKS,
)
"""Flags of the servers of SGLang, vLLM and llama.cpp."""
SERVER: Final = (*KTRANSFORMERS_SERVER, *OTHER_SERVERS)
ENGINE: Final = (*KTRANSFORMERS, *KTRANSFORMERS_MODEL, *SGLANG, *LLAMA_CPP)


def add_aliases(parser: argparse.ArgumentParser, aliases: Sequence[Alias] = ENGINE) -> None:
    """Make `parser` accept them, unlisted. Notes are collected in the namespace's `alias_notes`."""
    for alias in aliases:
        parser.add_argument(
            *alias.names,
            action=_AliasAction,
            nargs=alias.nargs,
            dest="alias_notes",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            alias=alias,
        )


class _AliasAction(argparse.Action):
    def __init__(self, *, alias: Alias, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._alias = alias

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        given: Any,
        option: str | None = None,
    ) -> None:
        alias, option = self._alias, option or self._alias.names[0]
        try:
            for name, value in alias.values(given).items():
                self._set(parser, namespace, name, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            given_text = "" if given in (None, []) else f" was given {_given_text(given)}"
            parser.error(f"{option}{given_text}: {error}")
        notes = getattr(namespace, "alias_notes", None) or []
        namespace.alias_notes = notes if alias.is_short else [*notes, f"{option} {alias.note}"]

    def _set(self, parser: argparse.ArgumentParser, namespace: Any, name: str, value: Any) -> None:
        """Give a setting its value, as its own flag would."""
        known = {action.dest: action for action in parser._actions if action is not self}
        if name not in known and name not in _NOT_SETTINGS:
            parser.error(
                f"{self._alias.names[0]} is {flag_name(name)} elsewhere; this command has no such flag"
            )
        flag = known.get(name)
        if flag is not None and callable(flag.type):
            value = flag.type(value)
        if name == SPECULATION:
            value = _speculation(getattr(namespace, name, None), value)
        if isinstance(flag, argparse._AppendAction):
            more = value if isinstance(value, list) else [value]
            value = [*(getattr(namespace, name, None) or []), *more]
        setattr(namespace, name, value)


def _given_text(given: Any) -> str:
    return repr(" ".join(given) if isinstance(given, list) else given)[:200]


def gguf_model(path: Path) -> Path:
    """The GGUF file at `path`, or the only one in a directory (of a split file, the first part).

    Raises:
        ConfigError: the directory holds several GGUF files, or neither a GGUF file nor a model.
    """
    if not path.is_dir() or (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    found = [file for file in files if "-of-" not in file.stem or "-00001-of-" in file.stem]
    if len(found) != 1:
        names = ", ".join(file.name for file in found)[:200] or "none"
        raise ConfigError(f"--gguf-path {path}: expected one GGUF file there, found {names}; give its path")
    return found[0]


def cpu_moe_ratio(n_cpu_moe: int | None, moe_layers: Sequence[int]) -> float:
    """Share of experts on the GPU if the experts of the first n layers are on the CPU; None: those of all layers.

    Raises:
        ConfigError: the model has no layers.
    """
    if not moe_layers:
        raise ConfigError("-ncmoe was given; the model has no layers with experts")
    if n_cpu_moe is None:
        return 0.0
    return sum(layer >= n_cpu_moe for layer in moe_layers) / len(moe_layers)
