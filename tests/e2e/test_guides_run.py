"""The commands of the README and the guides run, page by page and in order, with a small model for every one named.

A server runs until the page starts the next one. Loads and times are smaller than the page's.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import twofold
from twofold.tools.loadgen.server_process import serving

from tests.cli.documented import PAGES, Documented, documented
from tests.tiny_models.adapters import write_tiny_adapter
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import TinyModel, write_tiny_model

LIMIT_S = 240
TWOFOLD = [sys.executable, "-m", "twofold.tools.cli"]
SMALLER = {
    "--num-prompts": "4", "--output-len": "8", "--input-len": "16", "--max-concurrency": "2", "--users": "2",
    "--seconds": "2", "--duration": "2", "--num-turns": "2", "--turn-input-len": "8", "--cpu-threads": "2",
    "--run": "1", "--cpus-per-replica": "1", "--from": "0", "--to": "5",
    "--prompt-tokens": "16", "--new-tokens": "4", "--max-model-len": "512", "--numa": "off",
}  # fmt: skip
"""Values in place of the page's."""
SHORTER = {"loadtest capacity": ["--seconds", "2", "--repeats", "1", "--max-runs", "3"]}
"""Flags that a page leaves at longer defaults, by command."""
SERVER = ["--accelerator", "emulated:rtx3060-pcie3", "--gpu-experts-ratio", "0.25", "--admin-key", "KEY"]
"""Flags of the server for a page that needs one and starts none."""
TRACE = "TRACE.npz"
"""Recorded first where a page has it from another."""
URL_FLAGS = {"ctl": "--url", "placement": "--url", "bench serve": "--base-url", "loadtest": "--host"}
"""The flag that names a server, by command."""
RUN = [
    page for page in PAGES if any(each.program == "twofold" and not each.mark for each in documented(page))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "tiny", TinyModel(max_position_embeddings=4096, top_k=4))
    write_tiny_gguf(folder / "quantised.gguf")
    write_tiny_adapter(folder / "adapters" / "style", 0)
    write_tiny_adapter(folder / "adapters" / "terse", 1)
    return folder


def stand_in(word: str, models: Path) -> str:
    """A small model in place of one that a reader has; any other word as it is."""
    if word.endswith(".gguf"):
        return str(models / "quantised.gguf")
    if word == "/models":
        return str(models)
    word = re.sub(r'(^|[="] ?)adapters(?=/|$)', lambda found: f"{found[1]}{models / 'adapters'}", word)
    if word == "MODEL" or re.match(r"(~|)/models/", word):
        return str(models / "tiny")
    return word


def smaller(words: Sequence[str], models: Path) -> list[str]:
    given: list[str] = []
    for word in words:
        before = given[-1] if given else ""
        given.append(SMALLER.get(before, stand_in(word, models)))
    return given


class Reader:
    """Runs the commands of one page in a folder of its own."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models, self.url = folder, models, ""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("TWOFOLD_")}
        kept = {name: os.environ[name] for name in ("TWOFOLD_BUILD_DIR", "TWOFOLD_ISA") if name in os.environ}
        path = f"{Path(twofold.__file__).parents[1]}{os.pathsep}{Path(__file__).parents[2]}"
        self.environment = (
            plain
            | kept
            | {
                "TWOFOLD_ADMIN_KEY": "KEY",
                "PYTHONPATH": path,
                "HOME": str(folder),
                "XDG_CONFIG_HOME": str(folder),
            }
        )
        (folder / "TEXT").write_text("Once upon a time there was a clever fox. " * 40)
        self._server = contextlib.ExitStack()

    def run(self, command: Documented) -> None:
        environment = self.environment | dict(command.environment)
        words = [self._written(word) for word in smaller(command.words[1:], self.models)]
        if TRACE in words and "record" not in words and not (self.folder / TRACE).exists():
            self._twofold(["lab", "record", "TEXT", "--model", str(self.models / "tiny"), "--output", TRACE])
        for start, flags in SHORTER.items():
            words += flags if " ".join(words).startswith(start) else []
        if words[:2] == ["telemetry", "upgrade"]:
            self.stop()
        name = next((each for each in URL_FLAGS if " ".join(words).startswith(each)), None)
        if command.program == "sqlite3":
            database, query = words
            with sqlite3.connect(self.folder / database) as connection:
                connection.execute(query).fetchall()
        elif words[0] == "serve":
            self.serve(words, environment)
        elif words[0] != "dashboard":  # tests/e2e/test_wheel.py starts it
            if name is not None:
                if not self.url:
                    self.serve(["serve", *SERVER], environment)
                words += [URL_FLAGS[name], self.url]
            self._twofold(words, environment)

    def _twofold(self, words: list[str], environment: dict[str, str] | None = None) -> None:
        done = subprocess.run(
            [*TWOFOLD, *words],
            cwd=self.folder,
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            input="",
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    def serve(self, words: list[str], environment: dict[str, str]) -> None:
        self.stop()
        words = [word for i, word in enumerate(words) if "--port" not in (word, words[i - 1])]
        server = serving(
            [*TWOFOLD, *words, "--port", "0"],
            self.folder / "log",
            timeout_s=LIMIT_S,
            environment=environment,
            folder=self.folder,
        )
        self.url = self._server.enter_context(server).url

    def _written(self, word: str) -> str:
        """The file that an earlier command wrote, for a name with TIME in it; any other word as it is."""
        if "TIME" not in word:
            return word
        self.stop()  # a server writes it at its end
        (found,) = self.folder.glob(word.replace("TIME", "*"))
        return str(found)

    def stop(self) -> None:
        self._server.close()
        self._server = contextlib.ExitStack()


@pytest.fixture
def reader(tmp_path: Path, models: Path) -> Iterator[Reader]:
    made = Reader(tmp_path, models)
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, reader: Reader) -> None:
    for command in documented(page):
        if not command.mark and command.program in ("twofold", "sqlite3"):
            reader.run(command)
