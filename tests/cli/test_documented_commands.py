"""Every command of the README and the guides is run or checked by a test, or its block has a mark that says why not.

`tests/e2e/test_guides_run.py` runs those of `twofold`, `test_documented_examples.py` those of curl.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib

import pytest
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.api.settings import from_namespace
from twofold.tools.cli.main import COMMANDS, build_parser

from tests.cli.documented import MARKS, PAGES, ROOT, Documented, documented

CONFIGS = (EngineConfig, ServerConfig, ModelsConfig, ParallelConfig, TelemetryConfig)
ALL = [command for page in PAGES for command in documented(page)]
TWOFOLD = [command for command in ALL if command.program == "twofold"]


@pytest.mark.parametrize("command", TWOFOLD, ids=str)
def test_a_documented_command_can_be_given(command: Documented) -> None:
    words = list(command.words[1 : command.words.index("--")] if "--" in command.words else command.words[1:])
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    args = build_parser(name).parse_args([name, *words[len(name.split()) :]])
    for cls in CONFIGS:
        from_namespace(cls, args, {})


def test_most_commands_are_documented() -> None:
    named = {" ".join(each.words[1:3]) for each in TWOFOLD} | {each.words[1] for each in TWOFOLD}
    assert {"serve", "quantize", "pack", "calibrate", "launch", "bench serve", "lab", "ctl status"} <= named


def test_marks_are_known() -> None:
    assert sorted({each.mark for each in ALL if each.mark} - set(MARKS)) == []
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert text.count("<!-- not run:") == len(re.findall(r"<!-- not run: [\w ]+ -->\n```(?:sh)?\n", text))


def test_a_command_without_a_mark_is_one_that_a_test_runs() -> None:
    known = {"twofold", "curl", "make", "pip", "python", "sqlite3"}
    assert sorted(str(each) for each in ALL if not each.mark and each.program not in known) == []


def test_make_takes_the_documented_variables() -> None:
    variables = set(re.findall(r"^([A-Z_]+) \?=", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    given = [each for each in ALL if each.program == "make"]
    assert given
    for command in given:
        assert {word.partition("=")[0] for word in command.words[2:]} <= variables, command
        shown = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, check=False)
        assert shown.returncode == 0, command


def test_pip_is_asked_for_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for command in ALL:
        for names in re.findall(r"twofold\[([\w,]+)\]", " ".join(command.words)):
            assert set(names.split(",")) <= set(extras), command


@pytest.mark.parametrize(
    "command", [each for each in ALL if each.words[:2] == ("python", "-m") and not each.mark], ids=str
)
def test_a_documented_module_exists(command: Documented) -> None:
    assert importlib.util.find_spec(command.words[2]) is not None
