"""Damaged files of every family and of every scheme that quantises: read, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from twofold.models.registry import FAMILIES
from twofold.tools.cli.main import main

from tests.models.fuzz_families import MODELS, NAMES, fuzz


def test_every_family_is_in_the_table() -> None:
    assert set(MODELS) == {family.module for family in FAMILIES}


@pytest.mark.parametrize("inputs", [60, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_read_or_refused_in_one_line(
    tmp_path: Path, name: str, inputs: int, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = fuzz(name, inputs, 0, tmp_path)
    assert not outcomes.faults
    assert outcomes.counts["read"] >= inputs // 20
    assert outcomes.counts["refused"] >= inputs // 2


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gptq"])
def test_the_command_refuses_in_one_line_with_exit_code_2(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    messages: dict[str, str] = {}

    def command(path: Path, text: str) -> None:
        if len(messages) < 4:
            capfd.readouterr()
            assert main(["generate", str(path), "--prompt", "x"]) == 2
            messages[text] = capfd.readouterr().err

    fuzz(name, 12, 1, tmp_path, on_refusal=command)
    assert len(messages) == 4
    for printed in messages.values():
        assert printed.startswith("twofold generate: ")
        assert str(tmp_path) in printed
        assert printed.count("\n") == 1
