"""Prompts with pictures: the engine's answers are those of transformers' whole multimodal models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto import modeling_auto
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, RequestError
from twofold.api.media import PromptMedia
from twofold.api.types import GenerationRequest, SamplingParams, TokenLogprob
from twofold.blocks import ops
from twofold.engine import Engine
from twofold.models import open_model_files, registry
from twofold.models.registry import Family, family_named
from twofold.tools.cli.main import main
from twofold.vision import processor
from twofold.vision.processor import picture_processor

from tests.models.transformers_runs import lower_entries_first, one_torch_thread
from tests.tiny_models.picture_families import FAMILIES
from tests.tiny_models.pictures import encoder_of, picture, write_picture_model

__all__ = ["one_torch_thread"]  # a fixture

NUM_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    """A prompt, and transformers' greedy answer."""

    token_ids: list[int]
    media: PromptMedia | None
    answer: list[int]
    logprobs: list[float]


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


def registered(name: str) -> Family:
    """The registry's entry of a tiny model."""
    model_type = FAMILIES[name].model_type or name
    found = family_named(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])
    assert found is not None
    return found


def test_every_family_with_pictures_in_the_registry_has_a_tiny_model() -> None:
    tested = {registered(name).module for name in FAMILIES}
    assert tested == {family.module for family in registry.FAMILIES if family.pictures}


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder, family = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    if registered(request.param).pictures == "torchvision":
        pytest.importorskip("torchvision")
    model = write_picture_model(folder, request.param)
    model.generation_config.eos_token_id = None
    encoder, theirs = encoder_of(folder), picture_processor(folder)

    def asked(text: str, sizes: Sequence[tuple[int, int]], seed: int = 0) -> Asked:
        images = [picture(*size, seed + n) for n, size in enumerate(sizes)]
        given = theirs(
            text=text.replace(
                "[]", family.around[0] + (family.mark or theirs.image_token) + family.around[1]
            ),
            images=images or None,
            return_tensors="pt",
        )
        pictures = encoder.pictures([encoder.prepared(each) for each in images])
        for each in pictures:
            text = text.replace("[]", family.around[0] + each.text + family.around[1], 1)
        ids: list[int] = encoder.tokenizer(text)["input_ids"]
        media = None
        if pictures:
            placed = encoder.placed(ids, pictures)
            ids, media = list(placed.token_ids), placed.media
        assert ids == given["input_ids"][0].tolist()
        given = {name: each.float() if each.is_floating_point() else each for name, each in given.items()}
        with torch.inference_mode(), lower_entries_first():
            whole = model.generate(
                **given,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        answer = whole.sequences[0, len(ids) :].tolist()
        logits = torch.log_softmax(torch.cat(whole.logits), 1)
        return Asked(ids, media, answer, logits[range(NUM_TOKENS), answer].tolist())

    two = "a tale [] and [] of what?"
    return Seen(
        folder,
        asked(two, [(40, 33), (90, 20)]),
        asked(two, [(40, 33), (90, 20)], seed=5),
        asked("look: []", [(33, 70)]),
        asked("no picture here", []),
    )


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_picture_model(tmp_path, "llama4")

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(processor, "version", version)
    with pytest.raises(
        ConfigError, match="with torchvision, which is not installed; pip install torchvision"
    ):
        encoder_of(tmp_path)


def answers(engine: Engine, prompts: Sequence[Asked]) -> list[list[TokenLogprob]]:
    found: list[list[TokenLogprob]] = [[] for _ in prompts]
    for number, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
        engine.submit(
            GenerationRequest(
                tuple(prompt.token_ids),
                sampling,
                lambda chunk, tokens=tokens: tokens.extend(chunk.logprobs),  # type: ignore[misc]
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
    for prompt, *answered in zip(prompts, alone, together, strict=True):
        for tokens in answered:
            assert [token.token_id for token in tokens] == prompt.answer
            np.testing.assert_allclose([token.logprob for token in tokens], prompt.logprobs, atol=1e-4)


@pytest.mark.parametrize("seen", ["ernie4_5_vl_moe"], indirect=True)
def test_experts_of_pictures_stay_with_a_model_made_of_this_one(seen: Seen, tmp_path: Path) -> None:
    assert main(["pack", str(seen.folder), str(tmp_path / "packed")]) == 0
    engine = engine_of(tmp_path / "packed")
    try:
        assert engine.pictures is not None
        for prompt, tokens in zip((seen.two, seen.text), answers(engine, (seen.two, seen.text)), strict=True):
            assert [token.token_id for token in tokens] == prompt.answer
    finally:
        engine.close()
    made = tmp_path / "quantised"
    assert main(["quantize", str(seen.folder), str(made), "--format", "q8_0", "--max-tokens", "0"]) == 0
    pool = ops.ThreadPool(1)
    ours, theirs = map(open_model_files, (made, seen.folder))
    for layer in theirs.config.moe_layers:
        for expert, expected in zip(ours.expert_weights(layer), theirs.expert_weights(layer), strict=True):
            for matrix, known in zip(expert, expected, strict=True):
                values = ops.dequantise(pool, known)
                np.testing.assert_allclose(
                    ops.dequantise(pool, matrix), values, atol=np.abs(values).max() / 100
                )


def test_rows_and_positions_outside_the_prompt_are_refused(seen: Seen) -> None:
    media = seen.two.media
    assert media is not None
    first, *_ = media.spans
    late = replace(first, begin=len(seen.two.token_ids) - first.count + 1)
    wrong: list[tuple[str, PromptMedia]] = [
        ("not in order", replace(media, spans=media.spans[::-1])),
        ("not in order", replace(media, spans=(late,))),
        ("not in order", replace(media, spans=(replace(first, first_row=len(first.media.rows)),))),
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
