"""Answers of engines with scripted drafters, and the state that speculation must not leave behind."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from twofold.api.config import EngineConfig
from twofold.api.constraints import Constraint
from twofold.api.speculative_config import SpeculativeConfig
from twofold.api.types import Chunk, FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from twofold.engine import Engine
from twofold.step.drafters.drafter import Drafter, ModelDrafter
from twofold.step.drafts import NOTHING, Draft
from twofold.step.sequences import Sequence

DEPTH = 8
NGRAM = '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "adaptive": false}'


class Asked(NamedTuple):
    prompt: tuple[int, ...]
    sampling: SamplingParams
    prediction: tuple[int, ...] = ()
    constraint: Constraint | None = None
    cache_salt: str = ""

    def choices(self, n: int) -> list[Asked]:
        """The requests that a server makes of one with `n` choices."""
        return [
            self._replace(sampling=replace(self.sampling, seed=(self.sampling.seed or 0) + index))
            for index in range(n)
        ]


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


def answers(engine: Engine, requested: Seq[Asked], steps_between: int = 0) -> list[Answered]:
    """Answers to all, run as one batch; each is submitted `steps_between` steps after the one before."""
    chunks: list[list[Chunk]] = []
    for number, one in enumerate(requested):
        chunks.append([])
        engine.submit(
            GenerationRequest(
                one.prompt,
                one.sampling,
                chunks[-1].append,
                f"r{number}",
                prediction=one.prediction,
                constraint=None if one.constraint is None else engine.compile(one.constraint),
                cache_salt=one.cache_salt,
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
    speculator = engine.speculator
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


@dataclass
class Corrected(ModelDrafter):
    """Runs the real MTP layer, then replaces its tokens by the answer's with a given probability: tiny random
    models predict nothing."""

    real: ModelDrafter
    known: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]]
    right: float
    random: random.Random = field(default_factory=lambda: random.Random(3))

    @property
    def unclocked_s(self) -> float:
        return self.real.unclocked_s

    def pass_s(self, num_sequences: int) -> float:
        return self.real.pass_s(num_sequences)

    def release(self, sequence: Sequence) -> None:
        self.real.release(sequence)

    def ending(self, sequence: Sequence) -> None:
        self.real.ending(sequence)

    def propose_all(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Draft]:
        drafts = self.real.propose_all(sequences, depths)
        self.spent_s = self.real.spent_s
        return [self._corrected(each, draft) for each, draft in zip(sequences, drafts, strict=True)]

    def _corrected(self, sequence: Sequence, draft: Draft) -> Draft:
        answer = self.known.get((sequence.request.prompt_token_ids, sequence.request.sampling), ())
        rest = answer[sequence.num_generated :]
        tokens = tuple(
            rest[at] if at < len(rest) and self.random.random() < self.right else token
            for at, token in enumerate(draft.tokens)
        )
        return Draft(tokens, (0.9,) * len(tokens))


def correct(
    engine: Engine, known: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]], right: float
) -> None:
    assert engine.speculator is not None
    model = engine.speculator._model
    assert model is not None
    real = model.drafter.real if isinstance(model.drafter, Corrected) else model.drafter
    model.drafter = Corrected(real, known, right)


def run_at_random(
    engine: Engine, requested: Seq[Asked], expected: Seq[Answered], num_steps: int, most_waiting: int = 6
) -> None:
    """Ask, cancel and step at random. Finished answers must be the expected ones; in the end nothing runs."""
    draw, waiting, num_done = random.Random(7), dict[str, tuple[int, list[Chunk]]](), 0
    for step in range(num_steps):
        if len(waiting) < most_waiting:
            number, chunks = draw.randrange(len(requested)), list[Chunk]()
            engine.submit(GenerationRequest(*requested[number][:2], chunks.append, f"r{step}"))
            waiting[f"r{step}"] = number, chunks
        if draw.random() < 0.05:
            engine.cancel(draw.choice(list(waiting)))
        engine.step()
        for name, (number, chunks) in list(waiting.items()):
            if chunks and chunks[-1].finish_reason is not None:
                if chunks[-1].finish_reason != "cancelled":
                    assert answered(chunks) == expected[number]
                    num_done += 1
                del waiting[name]
    for name in waiting:
        engine.cancel(name)
    engine.step()
    assert num_done > num_steps / 20
    assert engine.stats().num_preemptions > num_steps / 200
    counts = engine.stats().speculation
    assert counts is not None
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
