"""The `twofold` command's frame: help, exit codes, one-line errors, what it imports."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import twofold
from twofold.api.config import EngineConfig, ServerConfig, TelemetryConfig
from twofold.api.errors import CapacityError, ConfigError, KernelError, ModelLoadError, RequestError
from twofold.api.models_config import ModelsConfig
from twofold.api.settings import flag_name
from twofold.tools.cli import main as cli

COMMANDS = sorted(cli.COMMANDS)


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(twofold.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"    {name}" in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_explains(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert cli.COMMANDS[command][1:] in " ".join(capsys.readouterr().out.split())


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_without_a_command_the_help_is_printed(capsys):
    assert helped(capsys) == helped(capsys, "--help")


SHORT = ("serve", "generate", "chat", "bench", "doctor", "fit")
"""Commands whose help is short."""


@pytest.mark.parametrize("command", SHORT)
def test_the_help_of_a_command_with_many_flags_is_short(command, capsys):
    text = helped(capsys, command, "--help")
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: twofold {command} [FLAGS] [MODEL]")
    assert lines.index("arguments:") < 6  # the model first
    assert lines[lines.index("arguments:") + 1].split()[:2] == ["MODEL", "model"]
    flags = [line for line in lines if line.startswith("  --")]
    assert len(flags) == 12 + 1  # and --help-all
    examples = lines[lines.index("examples:") + 1 :]
    assert len(examples) == 3
    for example in examples:
        words = shlex.split(example, comments=True)[1:]
        words = words[: words.index("<")] if "<" in words else words
        assert cli.build_parser(command).parse_args(words).command == command


@pytest.mark.parametrize("command", SHORT)
def test_the_help_of_all_flags_explains_the_model_first(command, capsys):
    lines = helped(capsys, command, "--help-all").splitlines()
    assert lines[lines.index("arguments:") + 1].split()[:2] == ["MODEL", "model"]
    assert lines.index("arguments:") < 6 < lines.index("options:")
    assert len([line for line in lines if line.startswith("  --")]) > 50


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_points_at_itself(command, capsys):
    flag = "--help-all" if command in SHORT else "--help"
    assert f"twofold {command} --help" not in helped(capsys, command, flag)


@pytest.mark.parametrize("group", cli.GROUPS)
def test_every_command_group_has_its_own_help(group, capsys):
    shown = []
    for arguments in ([group], [group, "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].startswith(f"usage: twofold {group} ")
    actions = [name.removeprefix(f"{group} ") for name in COMMANDS if name.startswith(f"{group} ")]
    assert all(f"    {action}" in shown[0] for action in actions)


def test_first_words_of_commands_are_groups_or_commands():
    assert {name.split()[0] for name in COMMANDS} <= {*COMMANDS, *cli.GROUPS}


def test_a_wrong_command_of_a_group_names_those_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["ctl", "fly"])
    assert ended.value.code == 2
    reported = capsys.readouterr().err
    assert reported.startswith("twofold ctl: ")
    assert "'sleep', 'wake'" in reported


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["serv"], "twofold: there is no command 'serv'; did you mean serve? "),
        (["ctl", "statsu"], "twofold ctl: there is no command 'statsu'; did you mean status? "),
        (["telemetry", "exprot"], "twofold telemetry: there is no command 'exprot'; did you mean export? "),
        (["serve", "--prot", "1"], "twofold serve: unknown flag --prot; did you mean --port? "),
        (
            ["serve", "--max_modl_len=1"],
            "twofold serve: unknown flag --max_modl_len; did you mean --max-model-len? ",
        ),
        (["telemetry", "export", "--ulr", "u"], "twofold telemetry export: "),
    ],
)
def test_a_near_miss_is_answered_with_the_nearest_name(arguments, reported, capsys):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err.startswith(reported)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from twofold.tools.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'fastapi', 'pydantic', 'numpy', 'sqlalchemy', 'tokenizers')"
        " if name in sys.modules])"
    )
    assert run_module("-c", code).stdout.splitlines()[-1] == "[]"


def test_the_module_runs_as_a_program():
    ended = run_module("-m", "twofold.tools.cli", "--version")
    assert (ended.returncode, ended.stdout.strip()) == (0, f"twofold {twofold.__version__}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "'fly'"),
        (["serve", "--colour", "red"], "--colour"),
        (["chat", "a", "b"], "b"),
        (["bench", "--repeats", "many"], "many"),
        (["bench", "--prompt-tokens", "16,0"], "'0'"),
        (["bench", "--new-tokens", "1"], "--new-tokens"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    reported = capsys.readouterr().err
    assert reported.count("\n") == 1
    assert words in reported
    assert "--help" in reported


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad\nsetting"), 2),
        (ModelLoadError("bad model"), 2),
        (RequestError("bad prompt"), 2),
        (CapacityError("full"), 1),
        (KernelError("native"), 1),
        (ModuleNotFoundError("No module named 'fastapi'", name="fastapi"), 2),
        (ImportError("cannot import name '_core' from 'twofold'"), 2),
        (MemoryError(), 1),
        (OSError(28, "No space left on device"), 1),
        (ZeroDivisionError("division by zero"), 1),
    ],
)
def test_every_error_is_one_line_without_a_traceback(monkeypatch, capsys, error, code):
    def fail(args):
        raise error

    monkeypatch.setattr("twofold.tools.cli.doctor.version.run", fail)
    assert cli.main(["version"]) == code
    reported = capsys.readouterr().err
    assert reported.startswith("twofold version: ")
    assert reported.count("\n") == 1
    assert "Traceback" not in reported
    with pytest.raises(type(error)):
        cli.main(["version", "--debug"])


def test_a_missing_extra_is_named_with_its_remedy():
    reported, _ = cli.describe(ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn.config"))
    assert "pip install 'twofold[server]'" in reported


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("twofold.tools.cli.doctor.version.run", interrupt)
    assert cli.main(["version"]) == 130


def test_a_closed_pipe_ends_the_command_without_an_error():
    code = (
        "import sys, os, twofold.tools.cli.doctor.version as v\n"
        "v.run = lambda args: [print('x' * 9999, flush=True) for _ in range(99)] and 0\n"
        "from twofold.tools.cli.main import main; sys.exit(main(['version']))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(twofold.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("command", "configs"),
    [
        ("serve", (EngineConfig, ServerConfig, ModelsConfig, TelemetryConfig)),
        ("generate", (EngineConfig, TelemetryConfig)),
        ("chat", (EngineConfig, TelemetryConfig)),
        ("bench", (EngineConfig, TelemetryConfig)),
        ("doctor", (EngineConfig, ServerConfig, TelemetryConfig)),
    ],
)
def test_every_setting_is_a_flag(command, configs, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    text = capsys.readouterr().out
    for config in configs:
        for field in dataclasses.fields(config):
            name = field.name.upper() if field.metadata["positional"] else flag_name(field.name)
            assert name in text


def test_version_lists_what_is_installed(capsys):
    assert cli.main(["version"]) == 0
    assert f"twofold   {twofold.__version__}" in capsys.readouterr().out
