"""The compared engines. Each measures in its own process, which ends before the next one starts.

An engine's round is one process: it loads the model, warms up and measures the prompt and the tokens after it a few
times; the round's figure is the median of these.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from benchmarks.scenario import BenchmarkError, say

OURS: Final = "twofold"
TESTS: Final = ("pp", "tg")
WORKERS: Final = Path(__file__).resolve().parent / "workers"
_TIMEOUT_S: Final = 1800.0
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """Input of every engine: the same random token ids, followed by the same number of one-token steps. `depth` tokens
    are in the cache before them; which, is the engine's choice.
    """

    prompt_tokens: int = 512
    new_tokens: int = 32
    repeats: int = 3
    threads: int = 1
    seed: int = 0
    vocab: int = 32_000
    depth: int = 0

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
        """Run one round. Raises BenchmarkError."""
        ...


def json_lines(command: Sequence[str], what: str, missing: str) -> list[Any]:
    """Run `command` and return what it printed as JSON, line by line. Errors name `what`; code 3 adds `missing`."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise BenchmarkError(f"{what}: {command[0]} is not there; {missing}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{what} took longer than {_TIMEOUT_S:.0f} s and was ended") from error
    lines = []
    for line in done.stdout.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    if done.returncode != 0:
        printed = next((line["error"] for line in lines if isinstance(line, dict) and "error" in line), None)
        printed = printed or (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        advice = f"; {missing}" if done.returncode == 3 else ""
        raise BenchmarkError(f"{what} ended with code {done.returncode}: {printed}{advice}")
    return lines


def round_of(lines: Sequence[Any], work: Workload, what: str) -> Round:
    """The medians of a worker's repeats. BenchmarkError if it printed none."""
    repeats = [line for line in lines if isinstance(line, dict) and "prefill_s" in line]
    if not repeats:
        raise BenchmarkError(f"{what} printed no measurement")
    details = {key: value for line in lines if line not in repeats for key, value in line.items()}
    return Round(
        statistics.median(work.prompt_tokens / line["prefill_s"] for line in repeats),
        statistics.median(work.new_tokens / line["decode_s"] for line in repeats),
        details,
    )


class TwofoldEngine:
    """`twofold bench` on the file."""

    name = "twofold"

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def measure(self, model: Path, work: Workload) -> Round:
        command = [
            self._python, "-m", "twofold.tools.cli", "bench", str(model), "--json",
            "--prompt-tokens", str(work.prompt_tokens),
            # The first of the answer comes out of the prompt's own step.
            "--new-tokens", str(work.new_tokens + 1),
            "--repeats", str(work.repeats),
            "--random-prompt", str(work.seed),
            "--depth", str(work.depth),
            "--no-compare-transformers", "--no-ceilings", "--no-profile", "--accelerator", "none",
            "--cpu-threads", str(work.threads),
            "--max-num-batched-tokens", str(max(512, work.prompt_tokens)),
            "--max-model-len", str(work.depth + work.prompt_tokens + work.new_tokens + 64),
            "--max-num-seqs", "1",
        ]  # fmt: skip
        lines = json_lines(command, f"twofold bench {model.name}", "install it: make build")
        try:
            result = lines[-1]
            speed = result["twofold"]
            details = {key: result[key] for key in ("cpu_isa", "cpu_threads") if key in result}
            return Round(speed["prefill_tokens_per_s"], speed["decode_tokens_per_s"], details)
        except (IndexError, KeyError, TypeError) as error:
            raise BenchmarkError(f"twofold bench {model.name} printed no result") from error


class LlamaEngine:
    """llama.cpp by llama-cpp-python, in whichever settings were fastest on this machine for each test."""

    name = "llama.cpp"
    _SWITCHES: tuple[str, ...] = ("flash_attention", "mmap", "repack")
    _MISSING = (
        "install it: pip install 'twofold[peers]', or name an interpreter that has it: --llama-python PATH"
    )

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python
        self._settings: dict[Path, dict[str, dict[str, bool]]] = {}
        """Switches by model and test."""

    def choose(self, model: Path, work: Workload) -> None:
        """Turn each switch off in turn and keep for each test what helped it. One short process for every try; one
        that the library refuses (no repacking of this format) falls out. BenchmarkError if all do.
        """
        lengths = {"prompt_tokens": min(128, work.prompt_tokens), "new_tokens": min(16, work.new_tokens)}
        short = replace(work, **lengths, repeats=1, depth=0)
        defaults = dict.fromkeys(self._SWITCHES, True)
        tries = [defaults, *({**defaults, switch: False} for switch in self._SWITCHES)]
        rounds, refused = [], []
        for settings in tries:
            try:
                rounds.append((settings, self._run(model, short, settings)))
            except BenchmarkError as error:
                refused.append(error)
        if not rounds:
            raise refused[0]
        self._settings[model] = {
            test: max(rounds, key=lambda tried: getattr(tried[1], test))[0] for test in TESTS
        }

    def measure(self, model: Path, work: Workload) -> Round:
        if model not in self._settings:
            self.choose(model, work)
        wanted = self._settings[model]
        first = self._run(model, work, wanted["pp"])
        second = first if wanted["pp"] == wanted["tg"] else self._run(model, work, wanted["tg"])
        return Round(first.pp, second.tg, {**first.details, "settings": wanted})

    def _run(self, model: Path, work: Workload, settings: dict[str, bool]) -> Round:
        task = {
            "library": self.name,
            "model": str(model),
            "prompt": work.prompt,
            "new_tokens": work.new_tokens,
            "repeats": work.repeats,
            "threads": work.threads,
            "depth": work.depth,
            **settings,
        }
        command = [self._python, str(WORKERS / "llama_worker.py"), json.dumps(task)]
        what = f"{self.name} on {model.name}"
        return round_of(json_lines(command, what, self._MISSING), work, what)


class IkLlamaEngine(LlamaEngine):
    """ik_llama.cpp by ik-llama-cpp-python, in the same way."""

    name = "ik_llama.cpp"
    _SWITCHES = ("flash_attention", "repack", "fused_moe")
    _MISSING = (
        "install it: pip install ik-llama-cpp-python, or name an interpreter that has it: --ik-python PATH"
    )


ENGINES: Final[Mapping[str, Callable[[argparse.Namespace], Engine]]] = {
    OURS: lambda args: TwofoldEngine(args.twofold_python),
    LlamaEngine.name: lambda args: LlamaEngine(args.llama_python),
    IkLlamaEngine.name: lambda args: IkLlamaEngine(args.ik_python),
}
"""Engines by name, each made from the program's arguments."""


@dataclass(frozen=True)
class Outcome:
    """Rounds of each engine, and the engines left out, with reasons."""

    rounds: dict[str, list[Round]]
    left_out: dict[str, str]

    def samples(self, engine: str, test: str) -> list[float]:
        """tokens/s of every round; empty for an engine that was not measured."""
        return [getattr(one, test) for one in self.rounds.get(engine, [])]


def alternate(
    engines: Sequence[Engine], model: Path, work: Workload, format_name: str, num_rounds: int
) -> Outcome:
    """Rounds of all engines in turn."""

    def shown(one: Round) -> str:
        return f"pp{work.prompt_tokens} {one.pp:.1f}, tg{work.new_tokens} {one.tg:.1f} tokens/s"

    ways = {engine.name: partial(engine.measure, model, work) for engine in engines}
    return Outcome(*take_turns(ways, num_rounds, format_name, shown))


def take_turns(
    ways: Mapping[str, Callable[[], T]], num_rounds: int, what: str, shown: Callable[[T], str]
) -> tuple[dict[str, list[T]], dict[str, str]]:
    """Results of each way, and the ways that failed, with reasons. Ways take turns, A B A B …, so that what else the
    machine does hits all of them. One that fails is left out from then on, and named.
    """
    rounds: dict[str, list[T]] = {}
    left_out: dict[str, str] = {}
    for turn in range(num_rounds):
        for name, measure in ways.items():
            if name in left_out:
                continue
            try:
                measured = measure()
            except BenchmarkError as error:
                left_out[name] = str(error)
                say(f"{what}: {name} is left out: {error}")
                continue
            rounds.setdefault(name, []).append(measured)
            say(f"{what} round {turn + 1}/{num_rounds} {name}: {shown(measured)}")
    return rounds, left_out
