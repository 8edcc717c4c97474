"""Where the time of an answer goes: native operations by kind, sampling, and Python between the native calls.

All of it is measured: the native side sums its operations' times, the engine its sampler's. The rest of the wall time
between two tokens is Python (and waiting, which an engine with one request does not do).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twofold.api.types import Chunk, SamplingParams
from twofold.blocks import ops

if TYPE_CHECKING:
    from twofold.engine import Engine


@dataclass(frozen=True)
class _Reading:
    wall_s: float
    native_s: dict[str, float]
    sampling_s: float
    num_tokens: int


@dataclass(frozen=True)
class Split:
    """Microseconds by kind over some steps; they sum to `wall_us`."""

    steps: int
    wall_us: float
    parts_us: dict[str, float]
    """Native kinds with non-zero time, then "sampler" and "python"."""

    @property
    def python_share(self) -> float:
        return self.parts_us["python"] / self.wall_us

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "step_us": self.wall_us / self.steps,
            "parts_us": {name: us / self.steps for name, us in self.parts_us.items()},
            "python_share": self.python_share,
        }


@dataclass(frozen=True)
class AnswerProfile:
    prefill: Split
    """The whole prompt, as one step."""
    decode: Split

    def as_json(self) -> dict[str, Any]:
        return {"prefill": self.prefill.as_json(), "decode": self.decode.as_json()}

    def table(self) -> str:
        """Both splits side by side as text, in microseconds and shares."""
        splits = (("prefill", self.prefill), ("decode step", self.decode))
        names = list(dict.fromkeys(name for _, split in splits for name in split.parts_us))
        lines = [f"  {'':<14}" + "".join(f"{name + ' us':>18}{'share':>9}" for name, _ in splits)]
        for name in [*names, "all"]:
            line = f"  {name:<14}"
            for _, split in splits:
                us = split.wall_us if name == "all" else split.parts_us.get(name, 0.0)
                line += f"{us / split.steps:>18.1f}{us / split.wall_us:>9.1%}"
            lines.append(line)
        return "\n".join(lines)


def profile_answer(engine: Engine, prompt: list[int], new_tokens: int) -> AnswerProfile:
    """Repeat the answer greedily and take readings at the first and the last token, on the engine's thread."""
    readings = [_read(engine, 0)]
    num_tokens = 0

    def on_chunk(chunk: Chunk) -> None:
        nonlocal num_tokens
        num_tokens += len(chunk.token_ids)
        # Only two readings: taking one costs Python time too.
        if (num_tokens and len(readings) == 1) or chunk.finish_reason is not None:
            readings.append(_read(engine, num_tokens))

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    engine.generate(tuple(prompt), sampling, on_chunk)
    begin, first, last = readings[0], readings[1], readings[-1]
    return AnswerProfile(_split(begin, first, 1), _split(first, last, last.num_tokens - first.num_tokens))


def _read(engine: Engine, num_tokens: int) -> _Reading:
    return _Reading(time.perf_counter(), ops.work_times(), engine.runner.sampling_s, num_tokens)


def _split(begin: _Reading, end: _Reading, steps: int) -> Split:
    parts = {name: 1e6 * (seconds - begin.native_s[name]) for name, seconds in end.native_s.items()}
    parts = {name: us for name, us in parts.items() if us > 0}
    parts["sampler"] = 1e6 * (end.sampling_s - begin.sampling_s)
    wall_us = 1e6 * (end.wall_s - begin.wall_s)
    parts["python"] = wall_us - sum(parts.values())
    return Split(max(1, steps), wall_us, parts)
