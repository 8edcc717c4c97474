"""`twofold doctor`: a remedy for what is not ok, lines of a terminal's width, and the exact next command."""

from __future__ import annotations

import json
import socket

import pytest
from twofold.tools.cli.doctor.machine_checks import Check
from twofold.tools.cli.main import main

from tests.tiny_models.writing import write_tiny_model

NONE = ("--accelerator", "none", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(["doctor", *arguments])
    return capsys.readouterr().out.splitlines()


def test_lines_are_wrapped_in_a_terminal_alone(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    arguments = [tiny, *NONE, "--port", "0"]
    in_a_pipe = printed(capsys, *arguments)[0]
    assert len(in_a_pipe) > 60
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = printed(capsys, *arguments)
    checks = lines[: lines.index("")]
    assert max(map(len, checks)) <= 60
    assert " ".join(in_a_pipe.split()) in " ".join(" ".join(checks).split())


def test_the_next_command_has_a_port_that_is_free(tiny, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        *begin, flag, found = printed(capsys, tiny, *NONE, "--port", str(port))[-1].split()
    assert begin == ["ready:", "twofold", "serve", tiny, *NONE, "--port", str(port)]
    assert flag == "--port"
    assert int(found) > port


def test_what_is_bad_is_checked_again_with_the_same_arguments_but_no_keys(capsys):
    arguments = ["/no/such model", "--port", "0", "--api_key", "secret", "--admin-key=hidden", "--debug"]
    again = "twofold doctor '/no/such model' --port 0 --api-key KEY --admin-key=KEY"
    assert printed(capsys, *arguments)[-1] == f"fix the checks marked BAD, then: {again}"
    (report,) = printed(capsys, *arguments, "--json")
    assert json.loads(report)["next"] == again


def test_a_home_directory_stays_one_for_the_shell(capsys):
    assert "twofold doctor ~/'no such'" in printed(capsys, "~/no such", "--port", "0")[-1]


def test_a_check_that_is_not_ok_needs_a_remedy():
    with pytest.raises(AssertionError, match="no remedy"):
        Check("a", "note", "found")
    split = Check.bad("a", "x was given; y is expected; do z", "otherwise")
    assert (split.found, split.remedy) == ("x was given; y is expected", "do z")
    assert Check.bad("a", "broken", "otherwise").remedy == "otherwise"
