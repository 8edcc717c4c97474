"""Pooled prompts equal sentence-transformers' arithmetic on transformers' hidden states, bit for bit the same however
they are batched, cut into chunks, cached or preempted."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError, ModelLoadError, RequestError
from twofold.api.pooling import POOLING_KINDS, ModelPooling, Pooling, PoolingKind, parse_pooler_config
from twofold.api.request_record import RequestRecord
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.prefix import cache as prefix_cache
from twofold.models.model_files import open_model_files
from twofold.models.pooling import read_pooling
from twofold.telemetry.sink import TelemetrySink

from tests.engine.embedding_models import DENSE, F32, NOTHING, PROMPTS, pooled, submit, write_embedding_model
from tests.engine.model_runs import random_prompt
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import (
    TinyModel,
    write_tiny_model,
)

PROMPTS += [(*PROMPTS[2][:24], 9, 8), PROMPTS[2]]  # a common prefix, and a prompt that was there before
POOLINGS = (
    Pooling(), Pooling("last", normalise=False), Pooling("cls"), Pooling("mean", normalise=False),
    Pooling("mean", dimensions=10), Pooling(tokens=(5, 300, 5)),
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "moe": TinyModel(),
    "scaled logits": tiny("granitemoe"),  # not part of the hidden state
    "records": tiny("qwen3_next"),
}


@functools.cache
def reference_states(directory: Path, prompts: tuple[tuple[int, ...], ...]) -> list[tuple[Any, Any]]:
    """transformers' last hidden states [tokens, hidden] and last logits [vocabulary] of each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        found = [model(torch.tensor([prompt]), output_hidden_states=True) for prompt in prompts]
    return [(each.hidden_states[-1][0], each.logits[0, -1]) for each in found]


def reference(directory: Path, prompts: Sequence[tuple[int, ...]], pooling: Pooling) -> list[F32]:
    """sentence-transformers' Pooling, truncation and Normalize."""
    vectors = []
    for states, logits in reference_states(directory, tuple(prompts)):
        if pooling.tokens:
            vectors.append(logits[list(pooling.tokens)].numpy())
            continue
        pooled = {"last": states[-1], "cls": states[0], "mean": states.sum(0) / len(states)}[pooling.kind]
        pooled = pooled[: pooling.dimensions]
        vectors.append(
            (torch.nn.functional.normalize(pooled, dim=0) if pooling.normalise else pooled).numpy()
        )
    return vectors


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("pooled"), MODELS[request.param])


def test_vectors_are_transformers_in_any_batch_chunk_and_cache(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 16)
    monkeypatch.setattr(prefix_cache, "_MIN_TOKENS_PER_SPLIT", 8)
    config = EngineConfig(model=str(directory), page_size=4, accelerator="none")
    plain = Engine.load(replace(config, enable_prefix_caching=False))
    cached = Engine.load(config)
    chunked = Engine.load(replace(config, max_num_batched_tokens=5))
    crowded = Engine.load(replace(config, max_total_tokens=64, max_num_batched_tokens=16))
    for pooling in POOLINGS:
        alone = [pooled(plain, [prompt], pooling)[0] for prompt in PROMPTS]
        for vector, expected in zip(alone, reference(directory, PROMPTS, pooling), strict=True):
            np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-4)
        for engine in (plain, cached, chunked, crowded):
            for vector, expected in zip(pooled(engine, PROMPTS, pooling), alone, strict=True):
                assert vector.tobytes() == expected.tobytes()
    assert cached.stats().prefix_cache_hits > 0
    for engine in (plain, cached, chunked, crowded):
        assert engine.stats().num_free_pages == engine.stats().num_pages
        engine.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    loaded = Engine.load(EngineConfig(model=str(write_tiny_model(tmp_path)), page_size=4))
    yield loaded
    loaded.close()


@pytest.mark.parametrize("kind", POOLING_KINDS)
def test_a_preempted_prompt_gives_the_same_vector(tmp_path: Path, kind: PoolingKind) -> None:
    path = write_tiny_model(tmp_path)
    engine = Engine.load(EngineConfig(model=str(path), page_size=4, max_num_batched_tokens=8))
    pooling = Pooling(kind)
    (expected,) = pooled(engine, PROMPTS[2:3], pooling)
    engine.control.drop_prefixes()
    answer = submit(engine, PROMPTS[2], pooling, "again")
    assert engine.step()
    assert engine.step()
    assert engine._scheduler.preempt_until(lambda: False) == 1
    while engine.step():
        pass
    assert answer[-1].pooled is not None
    assert answer[-1].pooled.tobytes() == expected.tobytes()
    engine.close()


def test_pooled_prompts_run_beside_answers_and_change_none(engine: Engine) -> None:
    """An answer decodes on in each step that computes pooled prompts, and is the answer it gets alone."""
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    alone: list[Chunk] = []
    engine.generate(PROMPTS[1], sampling, alone.append)
    beside: list[Chunk] = []
    engine.submit(GenerationRequest(PROMPTS[1], sampling, beside.append, "answer"))
    engine.step()
    answers = [submit(engine, prompt, Pooling("mean"), f"e{n}") for n, prompt in enumerate(PROMPTS)]
    while not all(answers):
        before = next(each.num_generated for each in engine.control.requests() if not each.request.pooling)
        engine.step()
        after = next(each.num_generated for each in engine.control.requests() if not each.request.pooling)
        assert after == before + 1
    while engine.step():
        pass
    assert [t for c in beside for t in c.token_ids] == [t for c in alone for t in c.token_ids]


def test_a_prompt_may_fill_the_whole_context(engine: Engine) -> None:
    full = random_prompt(engine.max_context)
    assert pooled(engine, [full], Pooling())[0].shape == (48,)
    with pytest.raises(
        RequestError, match=f"the input has 257 tokens; the context holds {engine.max_context}"
    ):
        submit(engine, [*full, 5], Pooling(), "long")


@pytest.mark.parametrize(
    ("prompt", "pooling", "sampling", "message"),
    [
        ((), Pooling(), NOTHING, "the prompt is empty"),
        ((5, 320), Pooling(), NOTHING, "token id 320 is outside the vocabulary of 320"),
        ((5,), Pooling(tokens=(320,)), NOTHING, "pooling names token 320"),
        ((5,), Pooling(), SamplingParams(), "a pooled prompt has no answer"),
    ],
)
def test_refused_requests(
    engine: Engine, prompt: tuple[int, ...], pooling: Pooling, sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(GenerationRequest(prompt, sampling, lambda chunk: None, "r", pooling=pooling))


class RecordingSink(TelemetrySink):
    """Keeps the newest record of each request."""

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}

    def request(self, record: RequestRecord) -> None:
        self.records[record.request_id] = record


def test_telemetry_has_a_prefill_and_no_token(tmp_path: Path) -> None:
    sink = RecordingSink()
    config = EngineConfig(model=str(write_tiny_model(tmp_path)), accelerator="emulated:rtx4090-pcie4")
    engine = Engine.load(config, telemetry=sink)
    pooled(engine, PROMPTS[2:3], Pooling())
    engine.close()
    record = sink.records["r0"]
    assert (record.finish_reason, record.completion_tokens, record.prompt_tokens) == ("stop", 0, 40)
    assert record.first_token_s is None
    assert record.finished_s is not None
    assert record.prefill_s > 0 == record.decode_s
    assert record.prefill_wall_s > 0 == record.decode_wall_s


# ---- files of embedding models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "architecture"), [(True, "Qwen3ForCausalLM"), (False, "Qwen3ForCausalLM"), (False, "Qwen3Model")]
)
def test_an_embedding_model_without_a_head_loads(tmp_path: Path, tied: bool, architecture: str) -> None:
    path = write_embedding_model(tmp_path / "given", tied=tied, architecture=architecture)
    whole = write_tiny_model(tmp_path / "whole", replace(DENSE, tie_word_embeddings=tied))
    engine = Engine.load(EngineConfig(model=str(path)))
    assert engine.pooling == ModelPooling(
        origin="1_Pooling/config.json", size=48, prompts={"query": "Query:", "document": ""}, generates=tied
    )
    (vector,) = pooled(engine, PROMPTS[2:3], Pooling())
    np.testing.assert_allclose(vector, reference(whole, PROMPTS[2:3], Pooling())[0], rtol=1e-4, atol=1e-4)
    if not tied:
        with pytest.raises(RequestError, match="has no head, so it generates nothing"):
            engine.generate(PROMPTS[1], SamplingParams())
        with pytest.raises(RequestError, match="has no logits"):
            submit(engine, PROMPTS[1], Pooling(tokens=(1, 2)), "r")
    engine.close()


def found(path: Path, given: str | None = None) -> ModelPooling:
    return read_pooling(path, open_model_files(path), parse_pooler_config(given))


def test_pooling_follows_the_files_and_then_the_flag(tmp_path: Path) -> None:
    path = write_embedding_model(tmp_path / "Some-Reranker-x", tied=True)
    config = path / "1_Pooling" / "config.json"
    assert found(path).classifier == ("no", "yes")
    config.write_text('{"pooling_mode": "mean"}')
    assert found(path).kind == "mean"
    config.write_text('{"pooling_mode_max_tokens": true}')
    assert "pooling mode 'max', which is not computed" in found(path).refusal
    config.write_text('{"pooling_mode": "cls"}')
    (path / "modules.json").write_text('[{"type": "x.Pooling", "path": "1_Pooling"}]')
    assert (found(path).kind, found(path).normalise) == ("cls", False)
    given = '{"pooling_type": "MEAN", "normalize": true, "classifier_from_token": ["a", "b"], "is_matryoshka": true}'
    flagged = found(path, given)
    assert (flagged.kind, flagged.normalise, flagged.is_matryoshka) == ("mean", True, True)
    assert (flagged.classifier, flagged.origin) == (("a", "b"), "--pooler-config")
    (path / "modules.json").write_text('[{"type": "x.Dense", "path": "2_Dense"}]')
    assert "Dense" in found(path).refusal
    (path / "modules.json").write_text("[3]")
    with pytest.raises(ModelLoadError, match="a module is 3, expected an object"):
        found(path)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "is_causal",
            False,
            ("refusal", "config.json has is_causal: false; only causal attention is computed"),
        ),
        ("matryoshka_dimensions", [8, 16], ("dimensions", (8, 16))),
        ("is_matryoshka", True, ("is_matryoshka", True)),
        ("classifier_from_token", ["0", "1"], ("classifier", ("0", "1"))),
    ],
)
def test_keys_of_config_json(tmp_path: Path, key: str, value: object, expected: tuple[str, object]) -> None:
    path = write_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {key: value}))
    assert getattr(found(path), expected[0]) == expected[1]


def test_a_model_whose_embeddings_are_refused_still_answers(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"use_bidirectional_attention": True}))
    engine = Engine.load(EngineConfig(model=str(path)))
    with pytest.raises(RequestError, match=r"gives no embeddings: .* has use_bidirectional_attention: true"):
        submit(engine, PROMPTS[1], Pooling(), "r")
    assert engine.generate(PROMPTS[1], SamplingParams(max_tokens=2, ignore_eos=True)).completion_tokens == 2
    engine.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "it takes a JSON object"),
        ("{", "it takes a JSON object"),
        ('{"pooling": "mean"}', "'pooling' is no key; it takes pooling_type"),
        ('{"pooling_type": "MAX"}', "it takes LAST, MEAN or CLS"),
        ('{"normalize": 1}', "it takes true or false"),
        ('{"matryoshka_dimensions": [0]}', "whole numbers above 0"),
        ('{"classifier_from_token": ["yes"]}', "it takes two tokens"),
    ],
)
def test_refused_pooler_configs(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(pooler_config=text)
