"""Answers of engines with scripted drafters, and the state that speculation must not leave behind."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from twofold.api.config import EngineConfig
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import Chunk, FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from twofold.engine import Engine
from twofold.step.drafters.drafter import Drafter
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence

DEPTH = 8
NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "adaptive": false}'


class Asked(NamedTuple):
    prompt: tuple[int, ...]
    sampling: SamplingParams
    prediction: tuple[int, ...] = ()


class Answered(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stopped_by: str | None
    error: str | None


@dataclass
class ScriptedDrafter(Drafter):
    """Knows the answers and says a wrong token with a given probability; 0: a perfect oracle, 1: always wrong."""

    known: Mapping[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]]
    wrong: float
    depth: int = DEPTH
    chance: float = 0.9
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def propose(self, sequence: Sequence, depth: int) -> Draft:
        answer = self.known.get((sequence.request.prompt_token_ids, sequence.request.sampling), ())
        tokens = [
            token if self.random.random() >= self.wrong else (token + 1) % 300
            for token in answer[sequence.num_generated :][: min(depth, self.depth)]
        ]
        return Draft(tuple(tokens), (self.chance,) * len(tokens)) if tokens else NOTHING


def answers(engine: Engine, asked: Seq[Asked], steps_between: int = 0) -> list[Answered]:
    """Answers to all, run as one batch; each is submitted `steps_between` steps after the one before."""
    chunks: list[list[Chunk]] = []
    for number, one in enumerate(asked):
        chunks.append([])
        engine.submit(
            GenerationRequest(
                one.prompt, one.sampling, chunks[-1].append, f"r{number}", prediction=one.prediction
            )
        )
        for _ in range(steps_between):
            engine.step()
    while engine.step():
        pass
    return [answered(own) for own in chunks]


def answered(chunks: Seq[Chunk]) -> Answered:
    last = chunks[-1]
    return Answered(
        tuple(token for chunk in chunks for token in chunk.token_ids),
        "".join(chunk.text for chunk in chunks),
        tuple(one for chunk in chunks for one in chunk.logprobs),
        last.finish_reason,
        last.stopped_by,
        last.error,
    )


def use_drafter(engine: Engine, drafter: ScriptedDrafter, *, adaptive: bool = False) -> None:
    """Let `drafter` propose for all further requests."""
    speculator = engine._speculator
    assert speculator is not None
    speculator._drafters = {"ngram": drafter}
    speculator._config = SpeculativeConfig(
        "ngram", num_speculative_tokens=max(drafter.depth, 1), adaptive=adaptive
    )


def speculating(config: EngineConfig) -> Engine:
    return Engine.load(replace(config, speculative_config=NGRAM))


def all_records(engine: Engine) -> list[int]:
    """Free records of sequences and drafts; all of them while no request runs."""
    pool = engine._pool
    return sorted([*(pool._free_records or ()), *pool._free_draft_records])


def expect_nothing_held(engine: Engine, records: list[int]) -> None:
    """Every page is free once, and so is every one of `records`."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages == stats.num_pages
    engine._pool.drop_cached()
    assert sorted(engine._pool._free) == list(range(stats.num_pages))
    assert all_records(engine) == records
    assert len(set(records)) == len(records)
