"""Prompts with pictures: the engine's answers are those of transformers' whole multimodal models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from twofold.api.config import EngineConfig
from twofold.api.errors import RequestError
from twofold.api.media import PromptMedia
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine

from tests.tiny_models.pictures import FAMILIES, encoder_of, picture, write_picture_model

NUM_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    """A prompt, and transformers' greedy answer."""

    token_ids: list[int]
    media: PromptMedia | None
    answer: list[int]


@dataclass(frozen=True)
class Seen:
    """A tiny model and what it was asked."""

    folder: Path
    two: Asked
    """Two pictures of odd sizes with text around them."""
    other: Asked
    """The same tokens with other pictures of the same sizes."""
    last: Asked
    """One picture at the prompt's end."""
    text: Asked
    """None."""


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, family = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    model = write_picture_model(folder, request.param)
    encoder = encoder_of(folder)

    def asked(text: str, sizes: Sequence[tuple[int, int]], seed: int = 0) -> Asked:
        pictures = [encoder.prepared(picture(*size, seed + n)) for n, size in enumerate(sizes)]
        for each in pictures:
            text = text.replace("[]", family.around(each.text), 1)
        ids: list[int] = encoder.tokenizer(text)["input_ids"]
        media = (
            encoder.placed(ids, pictures, [encoder.encoded(each) for each in pictures]) if pictures else None
        )
        given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
        if pictures:
            names = pictures[0].inputs
            given |= {name: torch.cat([each.inputs[name] for each in pictures]) for name in names}
            given["mm_token_type_ids"] = torch.isin(
                given["input_ids"], torch.tensor(encoder.row_tokens)
            ).long()
        with torch.inference_mode():
            whole = model.generate(
                **given, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        return Asked(ids, media, whole[0, len(ids) :].tolist())

    two = "a tale [] and [] of what?"
    return Seen(
        folder,
        asked(two, [(40, 33), (90, 20)]),
        asked(two, [(40, 33), (90, 20)], seed=5),
        asked("look: []", [(33, 70)]),
        asked("no picture here", []),
    )


def answers(engine: Engine, prompts: Sequence[Asked]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in prompts]
    for number, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.submit(
            GenerationRequest(
                tuple(prompt.token_ids),
                sampling,
                lambda chunk, tokens=tokens: tokens.extend(chunk.token_ids),  # type: ignore[misc]
                f"{number}",
                media=prompt.media,
            )
        )
    while engine.step():
        pass
    return found


def engine_of(folder: Path, **settings: Any) -> Engine:
    defaults: dict[str, Any] = {"accelerator": "none", "cpu_threads": 2, "max_total_tokens": 1024}
    return Engine.load(EngineConfig(model=str(folder), **defaults | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
        {"accelerator": "emulated:rtx4090-pcie4", "gpu_experts_ratio": 0.5},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        {"max_total_tokens": 256, "page_size": 4},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()) or "plain",
)
def test_answers_are_those_of_transformers(seen: Seen, settings: dict[str, Any]) -> None:
    prompts = (seen.two, seen.text, seen.last, seen.two, seen.other)
    assert seen.two.answer != seen.other.answer, "the tokens are the same, the pictures are not"
    engine = engine_of(seen.folder, **settings)
    try:
        alone = [answers(engine, [prompt])[0] for prompt in prompts]
        together = answers(engine, prompts)
        assert ("max_total_tokens" in settings) == (engine.stats().num_preemptions > 0)
    finally:
        engine.close()
    for prompt, one, among in zip(prompts, alone, together, strict=True):
        assert one == prompt.answer
        assert among == prompt.answer


def test_rows_and_positions_outside_the_prompt_are_refused(seen: Seen) -> None:
    media = seen.two.media
    assert media is not None
    first, *_ = media.spans
    late = replace(first, begin=len(seen.two.token_ids) - first.count + 1)
    wrong: list[tuple[str, PromptMedia]] = [
        ("not in order", replace(media, spans=media.spans[::-1])),
        ("not in order", replace(media, spans=(late,))),
        ("not in order", replace(media, spans=(replace(first, first_row=1),))),
    ]
    if (places := media.rotations) is not None:
        others = (places[:, 1:], places - 1, places + len(seen.two.token_ids))
        wrong += [("rotary positions", replace(media, rotations=each)) for each in others]
    engine = engine_of(seen.folder)
    try:
        for why, each in wrong:
            with pytest.raises(RequestError, match=why):
                answers(engine, [replace(seen.two, media=each)])
    finally:
        engine.close()
