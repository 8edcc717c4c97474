"""`twofold chat` in a terminal: a tmux window whose screen is read, with a server that runs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import twofold
from fake_engine import FakeEngine
from live_server import serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app

from tests.e2e.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux"),
    pytest.mark.skipif(importlib.util.find_spec("prompt_toolkit") is None, reason="no prompt_toolkit"),
]


class Terminal:
    """A window of 60 columns and 40 lines in a tmux server of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._socket = str(folder / "tmux")
        environment = {
            "PYTHONPATH": str(Path(twofold.__file__).parents[1]),
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder),
            "TERM": "screen-256color",
        }
        words = [*(f"{name}={value}" for name, value in environment.items()), sys.executable]
        command = ["env", *words, "-m", "twofold.tools.cli", "chat", *arguments]
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", "60", "-y", "40", *command)

    def tmux(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TMUX"}
        done = subprocess.run(
            ["tmux", "-S", self._socket, *arguments],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    @property
    def screen(self) -> str:
        """The lines of the screen, without spaces at their ends."""
        return "\n".join(line.rstrip() for line in self.tmux("capture-pane", "-p").splitlines()).rstrip()

    def wait(self, text: str) -> None:
        try:
            wait_until(lambda: text in self.screen, limit_s=30)
        except TimeoutError:
            raise AssertionError(f"no {text!r} in\n{self.screen}") from None

    def key(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def say(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)
        self.key("Enter")

    def paste(self, text: str) -> None:
        self.tmux("set-buffer", text)
        self.tmux("paste-buffer", "-p")  # marked as pasted


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeEngine, str]]:
    engine = FakeEngine(max_context=4096)
    with serving(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as url:
        yield engine, url
    engine.close()


@pytest.fixture(scope="module")
def window(served: tuple[FakeEngine, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("chat"), "--base-url", served[1])
    try:
        terminal.wait("Ctrl-D")
        yield terminal
    finally:
        terminal.tmux("kill-server")


@pytest.fixture
def terminal(window: Terminal, served: tuple[FakeEngine, str]) -> Terminal:
    """The window with an empty screen and a new conversation."""
    engine = served[0]
    engine.says = None
    engine.hold.set()
    window.key("C-u")
    window.say("/reset")
    window.wait("(forgotten)")
    window.key("C-l")
    wait_until(lambda: "forgotten" not in window.screen, limit_s=20)
    return window


def texts(engine: FakeEngine) -> list[str]:
    return [each["content"] for each in engine.tokenizer.rendered[0]]


def test_markdown_is_drawn_in_place_as_it_streams(terminal: Terminal, served: tuple[FakeEngine, str]) -> None:
    engine = served[0]
    engine.says = ["# Fo", "xes\n\nA **cle", "ver** fox\n\n| a | b", " |\n|---|---|\n", "| 1 | 2 |"]
    engine.hold.clear()
    terminal.say("tell me")
    terminal.wait("\nFo")
    engine.hold.set()
    terminal.wait("tokens/s")
    shown = terminal.screen.split("tell me\n", 1)[1]
    assert shown.split("\n(")[0] == "Foxes\n\nA clever fox\n\na │ b\n──┼──\n1 │ 2"


def test_thinking_is_folded_or_shown(terminal: Terminal, served: tuple[FakeEngine, str]) -> None:
    served[0].says = ["<think>", "why not", "</think>", "so"]
    terminal.say("tell me")
    terminal.wait("tokens")
    assert "s; /think on shows it)\nso\n" in terminal.screen
    assert "why not" not in terminal.screen
    terminal.say("/think on")
    terminal.say("tell me")
    terminal.wait("why not\n\nso\n")
    terminal.say("/think off")


def test_a_paste_of_several_lines_is_one_message(terminal: Terminal, served: tuple[FakeEngine, str]) -> None:
    terminal.paste("one\ntwo\n\nthree")
    terminal.key("Enter")
    terminal.wait("tokens")
    assert texts(served[0]) == ["one\ntwo\n\nthree"]


def test_the_up_key_recalls_earlier_messages(terminal: Terminal, served: tuple[FakeEngine, str]) -> None:
    terminal.say("remember this")
    terminal.wait("tokens")
    terminal.key("C-l")
    wait_until(lambda: "tokens" not in terminal.screen, limit_s=20)
    terminal.key("Up")
    terminal.key("Enter")
    terminal.wait("tokens")
    assert [text.strip() for text in texts(served[0])] == ["remember this"] * 3


def test_ctrl_c_stops_an_answer(terminal: Terminal, served: tuple[FakeEngine, str]) -> None:
    served[0].hold.clear()
    terminal.say("one two three")
    terminal.wait("\none")
    terminal.key("C-c")
    terminal.wait("(stopped)")
    served[0].hold.set()
    terminal.say("four")
    terminal.wait("tokens")
    assert texts(served[0])[:1] == ["one two three"]
    assert texts(served[0])[2:] == ["four"]


def test_commands_change_what_is_sent(
    terminal: Terminal, served: tuple[FakeEngine, str], tmp_path: Path
) -> None:
    for command, answer in (
        ("/system be brief", "(system message: be brief)"),
        ("/set temperature 0.7", "(sampling: temperature 0.7)"),
        ("/set top_p 9", "(top_p: "),
        ("/model other", "does not serve 'other'"),
        ("/image fox.png", "(fox.png cannot be read: No such file or directory)"),
        ("/dance", "(there is no /dance"),
    ):
        terminal.say(command)
        terminal.wait(answer)
    terminal.say("go on")
    terminal.wait("tokens")
    assert texts(served[0]) == ["be brief", "go on"]
    assert served[0].requests[-1].sampling.temperature == 0.7
    kept = tmp_path / "kept.json"
    terminal.say(f"/save {kept}")
    wait_until(kept.exists, limit_s=20)
    assert [each["role"] for each in json.loads(kept.read_text())["messages"]] == ["user", "assistant"]
    terminal.say("/reset")
    terminal.wait("(forgotten)")
    terminal.say(f"/load {kept}")
    terminal.wait("(loaded 2 messages")
    terminal.key("C-l")
    terminal.say("further")
    terminal.wait("tokens")
    assert [text.strip() for text in texts(served[0])] == ["be brief", "go on", "be brief go on", "further"]
    terminal.say("/system none")
