"""Settings: flags, environment and defaults, and refusals that name what was given."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.settings import add_arguments, environment_name, from_namespace

CLASSES = (EngineConfig, ServerConfig, TelemetryConfig)


def parse(cls, argv, environ=None):
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    return from_namespace(cls, parser.parse_args(argv), environ or {})


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_given_means_the_defaults(cls):
    assert parse(cls, []) == cls()


def test_a_flag_beats_the_environment_and_the_environment_the_default():
    environ = {"TWOFOLD_PORT": "1234", "TWOFOLD_HOST": "::1"}
    assert parse(ServerConfig, ["--port", "99"], environ) == dataclasses.replace(
        ServerConfig(), port=99, host="::1"
    )


def test_single_runs_one_request_and_reads_prompts_in_long_steps():
    single = parse(EngineConfig, ["--backend", "single"])
    assert (single.max_num_seqs, single.max_num_batched_tokens) == (1, 2048)
    assert dataclasses.replace(single, seed=1).max_num_seqs == 1
    assert (
        parse(EngineConfig, ["--backend", "single", "--max-num-batched-tokens", "64"]).max_num_batched_tokens
        == 64
    )


def test_positional_model_and_optional_number():
    config = parse(EngineConfig, ["some/model", "--gpu-experts-ratio", "0.5"])
    assert (config.model, config.gpu_experts_ratio) == ("some/model", 0.5)


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, True),
        (["--no-enable-prefix-caching"], {}, False),
        ([], {"TWOFOLD_ENABLE_PREFIX_CACHING": "0"}, False),
        (["--enable-prefix-caching"], {"TWOFOLD_ENABLE_PREFIX_CACHING": "off"}, True),
    ],
)
def test_a_switch_has_two_flags(argv, environ, expected):
    assert parse(EngineConfig, argv, environ).enable_prefix_caching == expected


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--gpu-experts-ratio", "1.5"], {}, ["--gpu-experts-ratio", "1.5", "0.0 to 1.0"]),
        (["--gpu-experts-ratio", "nan"], {}, ["--gpu-experts-ratio", "nan"]),
        (["--gpu-experts-ratio", "much"], {}, ["--gpu-experts-ratio", "'much'", "a number"]),
        (["--max-num-seqs", "0"], {}, ["--max-num-seqs", "0", "1 to 4096"]),
        (["--max-num-seqs", "2.5"], {}, ["'2.5'", "whole number"]),
        ([], {"TWOFOLD_SEED": "-3"}, ["--seed", "-3"]),
        ([], {"TWOFOLD_SEED": "x"}, ["TWOFOLD_SEED", "'x'"]),
        (
            ["--expert-placement-strategy", "best"],
            {},
            ["--expert-placement-strategy", "best", "front-loading"],
        ),
        (
            ["--gpu-prefill-token-threshold", "1"],
            {},
            ["--gpu-prefill-token-threshold was given 1", "2 or more"],
        ),
        (["--no-enable-prefix-caching", "--prefix-cache-dir", "x"], {}, ["both given"]),
        (["--backend", "single", "--max-num-seqs", "8"], {}, ["single", "--max-num-seqs 8", "both given"]),
        (["--backend", "ktransformers"], {}, ["--backend", "balance or single"]),
        (["--scheduling-policy", "lifo"], {}, ["--scheduling-policy", "fcfs or priority"]),
        (["--kv-cache-dtype", "float16"], {}, ["--kv-cache-dtype", "float16", "float32, bfloat16, q8, fp8"]),
        (["--lora-modules", "a=/x", "model"], {}, ["--lora-modules", "'model'", "NAME=PATH", "MODEL"]),
        (["--lora-modules", "a=/x", "a=/y"], {}, ["--lora-modules", "'a'", "twice"]),
        (["--lora-modules", '{"name": "a"'], {}, ["--lora-modules", "not JSON"]),
        (["--lora-modules", '{"name": "a", "path": 3}'], {}, ["--lora-modules", "NAME=PATH"]),
        (["--lora-modules", '{"name": "a", "path": "b", "scale": NaN}'], {}, ["--lora-modules", "scale"]),
        ([], {"TWOFOLD_LORA_MODULES": "=/x"}, ["--lora-modules", "'=/x'"]),
        (["--max-loras", "0"], {}, ["--max-loras", "1 to 1024"]),
        (
            [],
            {"TWOFOLD_ENABLE_PREFIX_CACHING": "maybe"},
            ["TWOFOLD_ENABLE_PREFIX_CACHING", "'maybe'", "on or off"],
        ),
    ],
)
def test_bad_values_are_refused_in_one_line_that_names_them(argv, environ, words):
    with pytest.raises(ConfigError) as caught:
        parse(EngineConfig, argv, environ)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_help_and_an_environment_name(cls):
    for field in dataclasses.fields(cls):
        assert len(field.metadata["help"]) > 15
        assert environment_name(field.name) == "TWOFOLD_" + field.name.upper()


@pytest.mark.parametrize(
    ("argv", "environ", "keys"),
    [
        ([], {}, ()),
        (["--api-key", "a", "--api-key", "b"], {}, ("a", "b")),
        ([], {"TWOFOLD_API_KEY": "a"}, ("a",)),
        (["--api-key", "b"], {"TWOFOLD_API_KEY": "a"}, ("b",)),
    ],
)
def test_api_keys_add_up(argv, environ, keys):
    assert parse(ServerConfig, argv, environ).api_key == keys


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ([], {"TWOFOLD_API_KEY": ""}),
        (["--api-key", ""], {}),
        (["--api-key", "a", "--api-key", " "], {}),
        (["--api-key", "schlüssel"], {}),
    ],
)
def test_an_empty_key_is_refused(argv, environ):
    with pytest.raises(ConfigError, match=r"--api-key was given .*unset TWOFOLD_API_KEY") as caught:
        parse(ServerConfig, argv, environ)
    assert "schlüssel" not in str(caught.value)
