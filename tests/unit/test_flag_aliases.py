"""Other engines' flags on our command line, and the page that tells of them: each is tried, each command is parsed."""

from __future__ import annotations

import argparse
import functools
import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.errors import ConfigError
from twofold.api.settings import from_namespace
from twofold.cli.flag_aliases import ENGINE, SERVER, Alias, cpu_moe_ratio, missing_targets
from twofold.cli.main import COMMANDS, build_parser, main
from twofold.cli.model_options import engine_config
from twofold.models.testing import TinyModel, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
CONFIGS = (EngineConfig, ServerConfig, TelemetryConfig)
GIVEN = {
    "--schedule-policy": "fcfs", "-ctk": "q8_0", "-fa": "on", "--kt-expert-placement-strategy": "uniform",
    "--kt-gpu-prefill-token-threshold": "512",
}  # fmt: skip
"""What they are given here, where not 1."""


parser_of = functools.cache(build_parser)


def parsed(*words: str) -> argparse.Namespace:
    return parser_of("serve").parse_args(["serve", *words])


def words_of(alias: Alias, name: str) -> list[str]:
    return [name] if alias.nargs == 0 else [name, GIVEN.get(alias.names[0], "1")]


def test_every_target_is_a_setting() -> None:
    assert not list(missing_targets((*ENGINE, *SERVER), *CONFIGS)), "an alias sets what no configuration has"


@pytest.mark.parametrize("alias", [*ENGINE, *SERVER], ids=lambda alias: alias.names[0])
def test_every_alias_sets_what_it_says_or_tells_why_not(
    alias: Alias, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in alias.names:
        if alias.note.startswith("is refused"):
            with pytest.raises(SystemExit):
                parsed(*words_of(alias, name))
            told = capsys.readouterr().err
            assert name in told
            assert "\n" not in told.strip()
            continue
        args = parsed(*words_of(alias, name))
        assert args.alias_notes == [f"{name} {alias.note}"]
        given = {*vars(args)} - {"alias_notes", "command", "debug", "n_cpu_moe"}
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
        ("--kt-numa-nodes 0 2 --tp 1", {"numa": "0,2"}),
        ("--record-kt-gpu-expert-distribution", {"record_gpu_expert_distribution": True}),
        ("--disable-radix-cache --random-seed 7", {"enable_prefix_caching": False, "seed": 7}),
        ("--moe-cache-mib 512 -rtr -fmoe", {"moe_cache_mib": 512}),
        ("-m /model -b 2048 -ub 1024", {"model": "/model", "max_num_batched_tokens": 1024}),
    ],
)  # fmt: skip
def test_values_become_what_the_setting_takes(words: str, expected: dict[str, Any]) -> None:
    config = from_namespace(EngineConfig, parsed(*words.split()), {})
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    ["--tp 2", "-ctk q4_0", "--kt-threadpool-count x", "-ncmoe x", "-fa maybe", "--schedule-policy lpm"],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words.split())
    told = capsys.readouterr().err
    assert words.split()[0] in told
    assert told.count("\n") == 1


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
    assert not [name for alias in (*ENGINE, *SERVER) for name in alias.names if re.search(rf"{name}\b[^-]", shown)
                and name.startswith("--kt")]  # fmt: skip


def commands_of_the_page() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("twofold ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("words", commands_of_the_page(), ids=" ".join)
def test_commands_of_the_page_can_be_given(words: list[str]) -> None:
    command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    args = parser_of(command).parse_args([command, *words[len(command.split()) :]])
    for cls in CONFIGS:
        from_namespace(cls, args, {})
