"""Pictures whose tokens attend to one another: what a prompt's steps and the prefix cache may not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import RequestError
from twofold.api.media import MediaRows, MediaSpan, PromptMedia
from twofold.api.types import GenerationRequest, SamplingParams, TokenLogprob
from twofold.engine import Engine

from tests.models.transformers_runs import one_torch_thread
from tests.tiny_models.pictures import write_picture_model

__all__ = ["one_torch_thread"]  # a fixture

PAGE = 4
ROW_TOKEN = 269


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    media: PromptMedia


def rows(seed: int, count: int = 11) -> MediaRows:
    values = np.random.default_rng(seed).normal(0, 3, (count, 64)).astype(np.float32)
    return MediaRows(values, bytes([seed]) * 32)


def prompt(*parts: int | MediaRows) -> Prompt:
    """Tokens of text, and pictures."""
    tokens: list[int] = []
    spans = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            spans.append(MediaSpan(len(tokens), len(part.rows), part))
            tokens += [ROW_TOKEN] * len(part.rows)
    return Prompt(tuple(tokens), PromptMedia(tuple(spans)))


A, B, C = rows(1), rows(2), rows(3)
PROMPTS = (
    prompt(5, 6, A, B, 7, 8),  # B's neighbour changes what A's first page holds
    prompt(5, 6, A, C, 7, 8),
    prompt(5, 6, A, 7, 8),
    prompt(5, 6, A),  # asked again, only the picture's last token is left to compute
    prompt(5, 6, A),
    prompt(5, 6, A, 9, B),
)


def answers(engine: Engine, prompts: Sequence[Prompt]) -> list[list[TokenLogprob]]:
    found: list[list[TokenLogprob]] = [[] for _ in prompts]
    for number, (each, tokens) in enumerate(zip(prompts, found, strict=True)):
        engine.submit(
            GenerationRequest(
                each.token_ids,
                SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0),
                lambda chunk, tokens=tokens: tokens.extend(chunk.logprobs),  # type: ignore[misc]
                f"{number}",
                media=each.media,
            )
        )
    while engine.step():
        pass
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma3")
    write_picture_model(path, "gemma3")
    return path


def engine_of(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"accelerator": "none", "max_total_tokens": 1024, "page_size": PAGE}
    return Engine.load(EngineConfig(model=str(folder), **defaults | settings))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 5}, {"max_total_tokens": 96, "cpu_threads": 2}],
    ids=["plain", "short steps", "little memory"],
)
def test_the_prefix_cache_changes_no_bit(folder: Path, settings: dict[str, Any]) -> None:
    plain = engine_of(folder, enable_prefix_caching=False)
    expected = [answers(plain, [each])[0] for each in PROMPTS]
    plain.close()
    assert len({str(tokens) for tokens in expected}) == len(PROMPTS) - 1, "two of them are equal"
    engine = engine_of(folder, **settings)
    try:
        alone = [answers(engine, [each])[0] for each in PROMPTS]
        together = answers(engine, PROMPTS)
        assert engine.stats().prefix_cache_hits > 0
    finally:
        engine.close()
    assert alone == expected
    assert together == expected


def test_a_device_refuses_pictures_that_are_longer_than_its_step(folder: Path) -> None:
    engine = engine_of(folder, max_num_batched_tokens=5)
    try:
        engine.info = replace(engine.info, accelerator="cuda")
        with pytest.raises(RequestError, match=r"of 11 tokens .* holds 5 \(--max-num-batched-tokens\)"):
            answers(engine, PROMPTS[2:3])
    finally:
        engine.close()
