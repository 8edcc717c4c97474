"""A short request beside prompts of 4,000 tokens, on the bundled model. `pytest -s` shows the times.

What is asserted is counted in steps: times of a shared machine say little.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path

LONG, SHORT = 4000, 10


@dataclass
class Asked:
    """A request, and when its tokens came: in steps of the engine and in seconds."""

    engine: Engine
    submitted_s: float
    submitted_step: int
    steps: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __call__(self, chunk: Chunk) -> None:
        self.steps.append(self.engine.stats().num_steps)
        self.times_s.append(time.perf_counter())
        self.tokens += chunk.token_ids

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.times_s[0] - self.submitted_s)


def ask(engine: Engine, name: str, prompt_tokens: int, answer_tokens: int) -> Asked:
    requested = Asked(engine, time.perf_counter(), engine.stats().num_steps)
    # No two names share a prefix: no prefix-cache hits.
    prompt = tuple(100 + (7 * i + sum(name.encode())) % 3000 for i in range(prompt_tokens))
    engine.submit(
        GenerationRequest(prompt, SamplingParams(max_tokens=answer_tokens, ignore_eos=True), requested, name)
    )
    return requested


@pytest.mark.parametrize("num_long", [1, 8])
def test_a_short_request_has_its_first_token_within_three_steps(num_long):
    engine = Engine.load(EngineConfig(model=str(bundled_model_path()), accelerator="none"))
    alone = ask(engine, "alone", SHORT, 12)
    while engine.step():
        pass
    stream = ask(engine, "stream", SHORT, 80)
    for _ in range(4):
        engine.step()
    longs = [ask(engine, f"long{number}", LONG, 1) for number in range(num_long)]
    for _ in range(2):
        engine.step()
    assert not longs[0].tokens, "the long prompt is not being read any more: nothing is tested"
    short = ask(engine, "alone", SHORT, 12)
    while len(short.tokens) < 12:
        engine.step()
    gaps_ms = [1e3 * (b - a) for a, b in zip(stream.times_s, stream.times_s[1:], strict=False)]
    print(
        f"\n{num_long} × {LONG} tokens: first token of {SHORT} after {short.ttft_ms:.0f} ms "
        f"({short.steps[0] - short.submitted_step + 1} steps; alone {alone.ttft_ms:.0f} ms); "
        f"longest pause of a stream {max(gaps_ms):.0f} ms"
    )
    assert short.steps[0] - short.submitted_step < 3
    assert short.tokens == alone.tokens, "what an answer says does not depend on its neighbours"
    assert not longs[-1].tokens or num_long == 1
    engine.close()
