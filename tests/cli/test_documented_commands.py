"""Every `twofold` command of the README and the guides can be given: known commands, flags and values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.settings import from_namespace
from twofold.tools.cli.main import COMMANDS, build_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
CONFIGS = (EngineConfig, ServerConfig, ModelsConfig, TelemetryConfig)


def documented() -> list[tuple[str, list[str]]]:
    """(page, words after `twofold`) of each line in a code block; placeholders such as MODEL stay words."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh)?\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in re.findall(r"^(?:[A-Z_]+=\S+ )*twofold (.*)$", block, re.MULTILINE):
                words = shlex.split(line.rstrip("&"), comments=True)
                found.append((page.stem, words[: words.index("--")] if "--" in words else words))
    return found


@pytest.mark.parametrize(("page", "words"), documented(), ids=[" ".join(words) for _, words in documented()])
def test_a_documented_command_can_be_given(page: str, words: list[str]) -> None:
    command = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    args = build_parser(command).parse_args([command, *words[len(command.split()) :]])
    for cls in CONFIGS:
        from_namespace(cls, args, {})


def test_most_commands_are_documented() -> None:
    named = {" ".join(words[:2]) for _, words in documented()} | {words[0] for _, words in documented()}
    assert {"serve", "quantize", "pack", "calibrate", "launch", "bench serve", "lab", "ctl status"} <= named
