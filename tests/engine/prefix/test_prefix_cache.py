"""Answers with the prefix cache are those without, bit for bit, whatever layers keep of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import Chunk, GenerationRequest, SamplingParams, TokenLogprob, Usage
from twofold.engine import Engine
from twofold.engine.prefix import cache as prefix_cache
from twofold.telemetry.routing import RoutingRecorder

from tests.engine.model_runs import random_prompt
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

FIRST = tuple(random_prompt(50, 1))
SAMPLING = SamplingParams(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprob]
    usage: Usage


def answers(
    engine: Engine, prompts: Iterable[tuple[int, ...]], sampling: SamplingParams = SAMPLING
) -> list[Answer]:
    """Answers to all prompts, run as one batch."""
    chunks: list[list[Chunk]] = []
    for number, prompt in enumerate(prompts):
        chunks.append([])
        engine.submit(
            GenerationRequest(
                prompt, sampling, chunks[-1].append, f"r{number}", turn_ends=(24, len(prompt) - 3)
            )
        )
    while engine.step():
        pass
    found = []
    for own in chunks:
        usage = own[-1].usage
        assert usage is not None
        assert own[-1].error is None
        tokens = [token for chunk in own for token in chunk.token_ids]
        found.append(Answer(tokens, [one for chunk in own for one in chunk.logprobs], usage))
    return found


def check(config: EngineConfig, expected_hits: bool = True) -> list[int]:
    """One after the other, all at once, and in memory that is too small for all: the answers of each alone without a
    cache. Returns how much of each prompt was found, one after the other."""
    plain = Engine.load(replace(config, enable_prefix_caching=False, accelerator="none"))
    spoken = tuple(answers(plain, [FIRST])[0].tokens)
    prompts = [
        FIRST,
        FIRST,
        (*FIRST, *spoken, 7, 8, 9),  # the next turn
        (*FIRST[:30], 5, *FIRST[31:]),  # an edit in the middle
        FIRST[:33],
        (*FIRST, *spoken[:4], 9, 9),
        tuple(random_prompt(40, 2)),
    ]
    expected = [answers(plain, [prompt])[0] for prompt in prompts]
    assert all(answer.usage.cached_tokens == 0 for answer in expected)
    plain.close()

    def same(found: list[Answer]) -> None:
        for answer, right in zip(found, expected, strict=True):
            assert answer.tokens == right.tokens
            assert answer.logprobs == right.logprobs

    engine = Engine.load(config)
    in_turn = [answers(engine, [prompt])[0] for prompt in prompts]
    same(in_turn)
    same(answers(engine, prompts))
    same(answers(engine, reversed(prompts))[::-1])
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_free_records == stats.num_records
    assert (stats.prefix_cache_hits > 0) == expected_hits
    engine.close()
    small = Engine.load(replace(config, max_total_tokens=112))  # three of them at most
    preempted = []
    preempt = small._scheduler._preempt
    small._scheduler._preempt = lambda s: (preempted.append(s.number), preempt(s))  # type: ignore[method-assign,assignment,func-returns-value]
    same(answers(small, prompts))
    same(answers(small, prompts))
    small.close()
    assert preempted
    return [answer.usage.cached_tokens for answer in in_turn]


@pytest.fixture(autouse=True)
def short_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 16)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SPLIT", 8)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SNAPSHOT", 2)


PAGES = [0, 48, 59, 28, 32, 52, 0]
"""Tokens found by pages of 4: whole ones but the last token's, up to an edit, and the tail where the first ended."""


@pytest.mark.parametrize(
    ("family", "dtype", "accelerator", "found"),
    [
        ("qwen3_moe", "q8", "none", PAGES),
        ("qwen3_moe", "bfloat16", "emulated:rtx4090-pcie4", PAGES),
        ("glm4_moe_lite", "fp8", "none", PAGES),  # latent pages
        ("gpt_oss", "bfloat16", "none", PAGES),  # windows
        ("llama4", "float32", "none", PAGES),  # attention within chunks
        ("qwen3_next", "float32", "none", None),
        ("qwen3_next", "bfloat16", "emulated:rtx4090-pcie4", None),
        ("lfm2_moe", "float32", "none", None),
    ],
)  # fmt: skip
def test_no_bit_of_an_answer_depends_on_the_cache(
    tmp_path: Path, family: str, dtype: str, accelerator: str, found: list[int] | None
) -> None:
    model = EXAMPLES.get(family, TinyModel(num_layers=3))
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path, model)),
        accelerator=accelerator,
        cpu_threads=1,
        page_size=4,
        max_num_batched_tokens=24,
        max_total_tokens=1024,
        kv_cache_dtype=dtype,
    )
    cached = check(config)
    if found is not None:
        assert cached == found
    else:  # as far as the last snapshot: a whole page before the last token, where the answer began, where it ended
        assert cached[0] == cached[6] == 0
        assert cached[1] >= 40
        assert cached[2] == 59
        assert cached[3] >= 16


def test_keys_that_depend_on_the_prompts_length_are_for_prompts_of_that_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    model = TinyModel(num_layers=2, max_position_embeddings=32, rope_scaling=scaling)
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path, model)),
        accelerator="none",
        cpu_threads=1,
        page_size=4,
        max_total_tokens=1024,
    )
    assert check(config) == [0, 48, 0, 28, 0, 0, 0]


def test_prompt_logprobs_cover_every_prompt_token(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_tiny_model(tmp_path, TinyModel(num_layers=2))), accelerator="none", page_size=4
    )
    engine = Engine.load(config)
    asking = replace(SAMPLING, prompt_logprobs=1)
    first, second, third = (answers(engine, [FIRST], sampling)[0] for sampling in (asking, asking, SAMPLING))
    assert first.tokens == second.tokens == third.tokens
    assert (second.usage.cached_tokens, third.usage.cached_tokens) == (0, 48)
    engine.close()


def test_partial_results_of_a_failed_step_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tmp_path, EXAMPLES["qwen3_next"])
    engine = Engine.load(
        EngineConfig(
            model=str(directory), accelerator="none", cpu_threads=1, page_size=4, max_num_batched_tokens=16
        )
    )
    forward, steps = engine.runner.forward, []

    def fail_late(*args: object) -> list[int]:
        steps.append(0)
        if len(steps) == 3:
            raise RuntimeError("the kernel broke")
        return forward(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "forward", fail_late)
    chunks: list[Chunk] = []
    engine.submit(GenerationRequest(FIRST, SAMPLING, chunks.append, "fails"))
    while engine.step():
        pass
    assert chunks[-1].finish_reason == "error"
    again = answers(engine, [FIRST])[0]
    engine.close()
    assert 0 < again.usage.cached_tokens <= 32
    plain = Engine.load(
        EngineConfig(model=str(directory), accelerator="none", cpu_threads=1, enable_prefix_caching=False)
    )
    assert again[:2] == answers(plain, [FIRST])[0][:2]
    plain.close()


@pytest.mark.parametrize(("family", "dtype"), [("glm4_moe_lite", "q8"), ("qwen3_next", "bfloat16")])
def test_a_restart_reuses_prefixes_on_disk(tmp_path: Path, family: str, dtype: str) -> None:
    def config(model: Path, cache: Path) -> EngineConfig:
        return EngineConfig(
            model=str(model),
            accelerator="none",
            cpu_threads=1,
            page_size=4,
            max_num_batched_tokens=24,
            max_total_tokens=256,
            kv_cache_dtype=dtype,
            prefix_cache_dir=str(cache),
        )

    def ask(model: Path, prompt: tuple[int, ...], cache: Path) -> Answer:
        engine = Engine.load(config(model, cache))
        found = answers(engine, [prompt])[0]
        engine.close()
        return found

    directory, kept, fresh = (
        write_tiny_model(tmp_path / "a", EXAMPLES[family]),
        tmp_path / "kept",
        tmp_path / "fresh",
    )
    first = ask(directory, FIRST, kept)
    turn = (*FIRST, *first.tokens, 7, 8)
    second = ask(directory, turn, kept)
    assert second.usage.cached_tokens == len(FIRST) + 9
    assert second[:2] == ask(directory, turn, fresh)[:2]
    other = write_tiny_model(tmp_path / "b", replace(EXAMPLES[family], seed=99))
    assert ask(other, turn, kept).usage.cached_tokens == 0, "another model's"


def test_recorded_routing_is_the_answers_though_its_prompt_was_found(tmp_path: Path) -> None:
    recorder = RoutingRecorder(tmp_path / "routing.npz")
    model = write_tiny_model(tmp_path / "model", TinyModel(num_layers=2))
    engine = Engine.load(
        EngineConfig(model=str(model), accelerator="none", cpu_threads=1, page_size=4), telemetry=recorder
    )
    assert [answers(engine, [FIRST])[0].usage.cached_tokens for _ in range(2)] == [0, 48]
    engine.close()
    recorder.close()
    with np.load(tmp_path / "routing.npz") as recorded:
        # An answer's last token is not computed.
        assert recorded["offsets"].tolist() == [0, 9, 18]
        np.testing.assert_array_equal(recorded["ids"][:9], recorded["ids"][9:])
