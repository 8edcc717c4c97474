"""Other engines' flags on our command line: each is tried."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.models_config import ModelsConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import from_namespace
from twofold.api.speculative_config import SpeculativeConfig
from twofold.tools.cli.flag_aliases import ENGINE, SERVER, Alias, cpu_moe_ratio, gguf_model
from twofold.tools.cli.main import build_parser, main
from twofold.tools.cli.model_options import engine_config

from tests.tiny_models.writing import TinyModel, write_tiny_model

CONFIGS = (EngineConfig, ServerConfig, ModelsConfig, ParallelConfig, TelemetryConfig)
GIVEN = {
    "--schedule-policy": "fcfs", "-ctk": "q8_0", "-fa": "on", "--kt-expert-placement-strategy": "uniform",
    "--kt-gpu-prefill-token-threshold": "512", "--backend-type": "balance_serve", "--sched-strategy": "FCFS",
    "--otlp-traces-endpoint": "http://127.0.0.1:4318",
    "--speculative-algorithm": "NGRAM", "--spec-type": "ngram-simple",
    "--speculative-ngram-max-match-window-size": "8", "--pooling": "mean", "-sm": "layer",
    "--lora-scaled": "a.gguf:0.5", "--lora-eviction-policy": "lru",
}  # fmt: skip
"""Values given to them here, where not 1."""


parser_of = functools.cache(build_parser)


def parsed(*words: str) -> argparse.Namespace:
    return parser_of("serve").parse_args(["serve", *words])


def words_of(alias: Alias, name: str) -> list[str]:
    return [name] if alias.nargs == 0 else [name, GIVEN.get(alias.names[0], "1")]


def test_every_target_is_a_setting() -> None:
    settings = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
    targets = {target for alias in (*ENGINE, *SERVER) for target in alias.targets}
    assert targets <= settings, "an alias sets what no configuration has"


@pytest.mark.parametrize("alias", [*ENGINE, *SERVER], ids=lambda alias: alias.names[0])
def test_every_alias_sets_its_option_or_names_the_reason(
    alias: Alias, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in alias.names:
        if alias.note.startswith("is refused"):
            with pytest.raises(SystemExit):
                parsed(*words_of(alias, name))
            reported = capsys.readouterr().err
            assert name in reported
            assert "\n" not in reported.strip()
            continue
        args = parsed(*words_of(alias, name))
        assert getattr(args, "alias_notes", []) == ([] if alias.is_short else [f"{name} {alias.note}"])
        given = {*vars(args)} - {"alias_notes", "command", "debug", "n_cpu_moe", "gguf_path"}
        assert given <= set(alias.targets)
        for cls in CONFIGS:
            from_namespace(cls, args, {})  # the value is one that the setting takes


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--kt-num-gpu-experts=3 -t 8 -c 4096", {"num_gpu_experts": 3, "cpu_threads": 8, "max_model_len": 4096}),
        ("-t -1 -c 0 -ngl all", {"cpu_threads": 0, "max_model_len": None, "accelerator": "auto"}),
        ("-ngl 0 -ctk q8_0 -fa --jinja", {"accelerator": "none", "kv_cache_dtype": "q8"}),
        ("--kt-threadpool-count 2 --kt-cpuinfer 60", {"numa": "0,1", "cpu_threads": 60}),
        ("--kt-numa-nodes 0 2 --pp-size 1", {"numa": "0,2"}),
        ("--record-kt-gpu-expert-distribution", {"record_gpu_expert_distribution": True}),
        ("--disable-radix-cache --random-seed 7", {"enable_prefix_caching": False, "seed": 7}),
        ("--moe-cache-mib 512 -rtr -fmoe", {"moe_cache_mib": 512}),
        ("-m /model -b 2048 -ub 1024", {"model": "/model", "max_num_batched_tokens": 1024}),
        ("-mm /mmproj.gguf", {"mmproj": "/mmproj.gguf"}),
        ("--model_path /m --cpu_infer 33 --chunk_size=256", {"model": "/m", "cpu_threads": 33,
                                                              "max_num_batched_tokens": 256}),
        ("--max_batch_size 4 --cache_lens 32768 --backend_type balance_serve --page_size 256",
         {"max_num_seqs": 4, "max_total_tokens": 32768, "backend": "balance", "page_size": 256}),
        ("--backend_type ktransformers", {"backend": "single", "max_num_seqs": 1}),
        ("--spec-type ngram-simple --draft-max 5 --spec-ngram-size-n 2",
         {"speculation": SpeculativeConfig("ngram", num_speculative_tokens=5, prompt_lookup_min=2)}),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 6",
         {"speculation": SpeculativeConfig("ngram", num_speculative_tokens=6)}),
        ("--draft-max 5 -md /small", {"speculation": SpeculativeConfig("draft_model", "/small", 5)}),
        ("-md /small --draft-max 5", {"speculation": SpeculativeConfig("draft_model", "/small", 5)}),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path /head",
         {"speculation": SpeculativeConfig("eagle3", "/head")}),
        ("--pooling cls --embeddings --reranking", {"pooler_config": '{"pooling_type": "CLS"}'}),
        ("--lora /x/style.gguf,other --lora-scaled s.gguf 0.25 --lora-scaled p=q.gguf:-1,r:2",
         {"adapters": {"style": (Path("/x/style.gguf"), 1.0), "other": (Path("other"), 1.0),
                       "s": (Path("s.gguf"), 0.25), "p=q": (Path("p=q.gguf"), -1.0), "r": (Path("r"), 2.0)}}),
        ("""--lora-paths a=/x/y /z/w {"lora_name":"c","lora_path":"/v","pinned":true} --max-loras-per-batch 3""",
         {"adapters": {"a": (Path("/x/y"), 0.0), "w": (Path("/z/w"), 0.0), "c": (Path("/v"), 0.0)}, "max_loras": 3}),
        ("""--enable-lora --lora-modules a=/x b=/y --lora-modules {"name":"c","path":"/z","base_model_name":"m"}""",
         {"adapters": {"a": (Path("/x"), 0.0), "b": (Path("/y"), 0.0), "c": (Path("/z"), 0.0)}}),
        ("--kt_num_gpu_experts 3 --max_model_len=99", {"num_gpu_experts": 3, "max_model_len": 99}),
    ],
)  # fmt: skip
def test_values_are_converted_to_the_settings_type(words: str, expected: dict[str, Any]) -> None:
    config = from_namespace(EngineConfig, parsed(*words.split()), {})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        "--pp-size 2",
        "-ctk q4_0",
        "--kt-threadpool-count x",
        "-ncmoe x",
        "-fa maybe",
        "--schedule-policy lpm",
        "--speculative-algorithm EAGLE",
        "--draft-max x",
        "--pooling rank",
        "--lora-scaled a.gguf",
        "--lora-scaled a.gguf x",
        "--lora-scaled a.gguf 1 model",
        "--lora-paths {",
        "--lora-init-without-apply",
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words.split())
    reported = capsys.readouterr().err
    assert words.split()[0] in reported
    assert reported.count("\n") == 1


KT_ARGS = """--host 127.0.0.1 --port 10002 --api_key K --web False --model_name n --model_dir /m --model_path /m
    --device cuda:0 --architectures DeepseekV3ForCausalLM --gguf_path /g --optimize_config_path r.yaml --cpu_infer 33
    --backend_type balance_serve --type balance_serve --chunk_size 256 --chunk_prefill_size 8192 --tp 1 --paged False
    --total_context 1 --max_batch_size 4 --max_new_tokens 1024 --json_mode False --healing False --ban_strings x
    --length 1 --no_flash_attn False --low_mem False --load_q4 False --fast_safetensors False --no_draft_scale False
    --modes False --mode llama --username u --botname b --system_prompt s --temperature 0.6 --smoothing_factor 0
    --dynamic_temperature x --top_k 20 --top_p 0.95 --top_a 0 --skew 0 --typical 0 --repetition_penalty 1.01
    --frequency_penalty 0 --presence_penalty 0 --max_response_tokens 3 --response_chunk 250 --no_code_formatting False
    --cache_8bit False --cache_q4 True --ngram_decoding False --print_timings False --amnesia False --batch_size 1
    --cache_lens 32768 --kvc2_config_dir d --log_dir d --log_file f --log_level info --backup_count 1 --db_type sqlite
    --db_host h --db_port 1 --db_name n --db_pool_size 1 --db_database d --force_think --no-force_think
    --use_cuda_graph --no-use_cuda_graph --web_cross_domain True --file_upload_dir d --assistant_store_dir d
    --prompt_file f --sched_strategy FCFS --page_size 256 --memory_gpu_only true --utilization_percentage 1.0
    --cpu_memory_size_GB 500"""
KT_REFUSED = """--q4_gguf_path f --draft_model_path f --draft_gguf_path f
    --gpu_split auto --rope_scale 1 --rope_alpha 1 --experts_per_token 8 --draft_model_dir d --user_secret_key k
    --user_algorithm HS256"""


def test_every_argument_of_the_server_of_ktransformers_is_accepted() -> None:
    """All that its server/args.py has had, in one command; what cannot be is refused below."""
    args = parsed(*KT_ARGS.split())
    for cls in CONFIGS:
        from_namespace(cls, args, {})
    assert args.served_model_name == ["n"]
    assert (args.host, args.port, args.api_key) == ("127.0.0.1", "10002", ["K"])


@pytest.mark.parametrize("words", re.findall(r"--\S+ \S+", KT_REFUSED))
def test_arguments_of_ktransformers_that_cannot_be_are_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*words.split())
    reported = capsys.readouterr().err
    assert words.split()[0].replace("_", "-") in reported
    assert "unrecognized" not in reported
    assert reported.count("\n") == 1


def test_arguments_of_its_local_chat_are_accepted() -> None:
    words = """--model_path /m --gguf_path /g --optimize_config_path r.yaml --max_new_tokens 99 --cpu_infer 33
        --use_cuda_graph --prompt_file f --mode normal --force_think --chunk_prefill_size 8192"""
    args = parser_of("chat").parse_args(["chat", *words.split()])
    assert from_namespace(EngineConfig, args, {}).max_num_batched_tokens == 8192
    assert args.max_tokens == 99


@pytest.mark.parametrize("order", [1, -1])
def test_the_gguf_path_is_the_model_and_the_model_path_its_tokenizer(tmp_path: Path, order: int) -> None:
    """A directory is taken for the model in it; a name on a hub is no tokenizer."""
    files = tmp_path / "gguf"
    files.mkdir()
    for part in (2, 1):
        (files / f"m-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    first = str(files / "m-00001-of-00002.gguf")

    def config(model_path: str) -> EngineConfig:
        pairs = [("--gguf_path", str(files)), ("--model_path", model_path)]
        return engine_config(parsed(*[word for pair in pairs[::order] for word in pair]))

    assert (config(str(tmp_path)).model, config(str(tmp_path)).tokenizer) == (first, str(tmp_path))
    assert (config("org/name").model, config("org/name").tokenizer) == (first, None)
    (files / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"found m-00001-of-00002\.gguf, other\.gguf; give its path"):
        gguf_model(files)


def test_layers_on_the_cpu_become_the_share_of_the_others(tmp_path: Path) -> None:
    assert cpu_moe_ratio(30, range(48)) == 0.375
    assert [cpu_moe_ratio(n, range(3, 10)) for n in (0, 3, 4, 10, 99, None)] == [1, 1, 6 / 7, 0, 0, 0]
    model = str(write_tiny_model(tmp_path / "tiny", TinyModel(num_layers=4, mlp_only_layers=(0,))))

    def config(*words: str) -> EngineConfig:
        return engine_config(parsed(model, *words))

    assert config("-ncmoe", "2").gpu_experts_ratio == 2 / 3
    assert config("-cmoe").gpu_experts_ratio == 0
    both = config("-cmoe", "--moe-cache-mib", "9")
    assert (both.gpu_experts_ratio, both.moe_cache_mib) == (None, 9)
    with pytest.raises(ConfigError, match="--moe-cache-mib alone"):
        config("-ncmoe", "2", "--moe-cache-mib", "9")
    with pytest.raises(ConfigError, match="--num-gpu-experts and --moe-cache-mib"):
        config("--num-gpu-experts", "2", "--moe-cache-mib", "9")


def test_a_note_is_logged_once_and_help_stays_short(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert main(["doctor", "/nowhere", "--kt-method", "AMXINT4"]) != 0
    notes = [record.getMessage() for record in caplog.records if "--kt-method" in record.getMessage()]
    assert len(notes) == 1
    assert notes[0].startswith("--kt-method does nothing here: ")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    assert not [
        name
        for alias in (*ENGINE, *SERVER)
        for name in alias.names
        if re.search(rf"{name}\b[^-]", shown) and name.startswith("--kt")
    ]
