"""The compared engines. Each measures in its own process, which ends before the next one starts.

An engine's round is one process: it loads the model, warms up and measures the prompt and the tokens after it a few
times; the round's figure is the median of these.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

TESTS: Final = ("pp", "tg")
_WORKERS: Final = Path(__file__).resolve().parent / "workers"
_TIMEOUT_S: Final = 1800.0


class PeerError(Exception):
    """An engine cannot be measured. The message says why and what to do."""


@dataclass(frozen=True)
class Workload:
    """Input of every engine: the same random token ids, followed by the same number of one-token steps."""

    prompt_tokens: int = 512
    new_tokens: int = 32
    repeats: int = 3
    threads: int = 1
    seed: int = 0
    vocab: int = 32_000

    @property
    def prompt(self) -> list[int]:
        """The ids that `twofold bench --random-prompt SEED` takes, too."""
        draw = random.Random(self.seed)  # noqa: S311
        return [draw.randrange(self.vocab) for _ in range(self.prompt_tokens)]


@dataclass(frozen=True)
class Round:
    """One process of one engine. tokens/s of the prompt (pp) and of single tokens (tg)."""

    pp: float
    tg: float
    details: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Something that can run a model file."""

    name: str

    def measure(self, model: Path, work: Workload) -> Round:
        """Run one round. Raises PeerError."""
        ...


def last_json_lines(
    command: Sequence[str], what: str, missing: str, env: dict[str, str] | None = None
) -> list[Any]:
    """Run `command` and return what it printed as JSON, line by line. PeerError names `what`; code 3 adds `missing`."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except FileNotFoundError as error:
        raise PeerError(f"{what}: {command[0]} is not there; {missing}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"{what} took longer than {_TIMEOUT_S:.0f} s and was ended") from error
    lines = []
    for line in done.stdout.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    if done.returncode != 0:
        said = next((line["error"] for line in lines if isinstance(line, dict) and "error" in line), None)
        said = said or (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        advice = f"; {missing}" if done.returncode == 3 else ""
        raise PeerError(f"{what} ended with code {done.returncode}: {said}{advice}")
    return lines


def round_of(lines: Sequence[Any], work: Workload, what: str) -> Round:
    """The medians of a worker's repeats. PeerError if it printed none."""
    repeats = [line for line in lines if isinstance(line, dict) and "prefill_s" in line]
    if not repeats:
        raise PeerError(f"{what} printed no measurement")
    details = {key: value for line in lines for key, value in line.items() if not key.endswith("_s")}
    loads = [line["load_s"] for line in lines if "load_s" in line]
    if loads:
        details["load_s"] = loads[0]
    return Round(
        statistics.median(work.prompt_tokens / line["prefill_s"] for line in repeats),
        statistics.median(work.new_tokens / line["decode_s"] for line in repeats),
        details,
    )


class TwofoldEngine:
    """`twofold bench` on the file."""

    name = "twofold"

    def __init__(self, python: str = sys.executable, flags: Sequence[str] = ()) -> None:
        self._python, self._flags = python, list(flags)

    def measure(self, model: Path, work: Workload) -> Round:
        command = [
            self._python, "-m", "twofold.tools.cli", "bench", str(model), "--json",
            "--prompt-tokens", str(work.prompt_tokens),
            # The first of the answer comes out of the prompt's own step.
            "--new-tokens", str(work.new_tokens + 1),
            "--repeats", str(work.repeats),
            "--random-prompt", str(work.seed),
            "--no-compare-transformers", "--no-ceilings", "--no-profile", "--accelerator", "none",
            "--cpu-threads", str(work.threads),
            "--max-num-batched-tokens", str(max(512, work.prompt_tokens)),
            "--max-model-len", str(work.prompt_tokens + work.new_tokens + 64),
            "--max-num-seqs", "1",
            *self._flags,
        ]  # fmt: skip
        lines = last_json_lines(command, f"twofold bench {model.name}", "install it: make build")
        try:
            result = lines[-1]
            speed = result["twofold"]
            details = {key: result[key] for key in ("cpu_isa", "cpu_threads") if key in result}
            return Round(speed["prefill_tokens_per_s"], speed["decode_tokens_per_s"], details)
        except (IndexError, KeyError, TypeError) as error:
            raise PeerError(f"twofold bench {model.name} printed no result") from error


class LlamaEngine:
    """llama.cpp by llama-cpp-python, in whichever settings were fastest on this machine for each test."""

    name = "llama.cpp"
    _SWITCHES: tuple[str, ...] = ("flash_attention", "mmap", "repack")
    _WORKER = "llama_worker.py"
    _MISSING = (
        "install it: pip install 'twofold[peers]', or name an interpreter that has it: --llama-python PATH"
    )

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._env: dict[str, str] = {}
        self._settings: dict[tuple[str, str], dict[str, bool]] = {}

    def settings(self, model: Path) -> dict[str, dict[str, bool]]:
        """The switches that `choose` selected, by test."""
        return {test: self._settings.get((str(model), test), {}) for test in TESTS}

    def choose(self, model: Path, work: Workload) -> None:
        """Turn each switch off in turn and keep for each test what helped it. One short process for every try; one
        that the library refuses (no repacking of this format) falls out. PeerError if all do.
        """
        short = replace(
            work, prompt_tokens=min(128, work.prompt_tokens), new_tokens=min(16, work.new_tokens), repeats=1
        )
        defaults = dict.fromkeys(self._SWITCHES, True)
        tries = [defaults, *({**defaults, switch: False} for switch in self._SWITCHES)]
        rounds, refused = [], []
        for settings in tries:
            try:
                rounds.append((settings, self._run(model, short, settings)))
            except PeerError as error:
                refused.append(error)
        if not rounds:
            raise refused[0]
        for test in TESTS:
            best = max(rounds, key=lambda tried: getattr(tried[1], test))
            self._settings[str(model), test] = best[0]

    def measure(self, model: Path, work: Workload) -> Round:
        if (str(model), "pp") not in self._settings:
            self.choose(model, work)
        wanted = self.settings(model)
        first = self._run(model, work, wanted["pp"])
        second = first if wanted["pp"] == wanted["tg"] else self._run(model, work, wanted["tg"])
        return Round(first.pp, second.tg, {**first.details, "settings": wanted})

    def _run(self, model: Path, work: Workload, settings: dict[str, bool]) -> Round:
        task = {**_task(model, work), **settings}
        command = [self._python, str(_WORKERS / self._WORKER), json.dumps(task)]
        what = f"{self.name} on {model.name}"
        return round_of(last_json_lines(command, what, self._MISSING, self._env), work, what)


class IkLlamaEngine(LlamaEngine):
    """ik_llama.cpp by ik-llama-cpp-python. `path`: an interpreter that has it, or a libllama.so (or its directory)
    that this interpreter's package shall load.
    """

    name = "ik_llama.cpp"
    _SWITCHES = ("flash_attention", "repack", "fused_moe")
    _WORKER = "ik_worker.py"
    _MISSING = "install it: pip install ik-llama-cpp-python, and name the interpreter that has it: --ik PATH"

    def __init__(self, path: str) -> None:
        library = Path(path, "libllama.so") if Path(path).is_dir() else Path(path)
        is_library = ".so" in library.suffixes
        super().__init__(sys.executable if is_library else path)
        if is_library:
            self._env = {"IK_LLAMA_CPP_LIB_PATH": str(library)}


class TransformersEngine:
    """transformers on the same weights; `directories` gives the checkpoint directory of a GGUF file."""

    name = "transformers"

    def __init__(self, directories: dict[Path, Path], python: str = sys.executable) -> None:
        self._directories, self._python = directories, python

    def measure(self, model: Path, work: Workload) -> Round:
        task = _task(self._directories[model], work)
        command = [self._python, str(_WORKERS / "transformers_worker.py"), json.dumps(task)]
        what = f"transformers on {model.name}"
        lines = last_json_lines(command, what, "install it: pip install 'twofold[peers]'")
        return round_of(lines, work, what)


def _task(model: Path, work: Workload) -> dict[str, Any]:
    return {
        "model": str(model),
        "prompt": work.prompt,
        "new_tokens": work.new_tokens,
        "repeats": work.repeats,
        "threads": work.threads,
    }
