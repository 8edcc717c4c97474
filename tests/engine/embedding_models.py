"""Tiny embedding models, and their pooled states by Engine and reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from twofold.api.pooling import Pooling
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine

from tests.engine.model_runs import random_prompt
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import (
    tiny_weights,
    write_safetensors,
    write_tiny_model,
)

F32 = npt.NDArray[np.float32]
NOTHING = SamplingParams(max_tokens=0)
PROMPTS = [tuple(random_prompt(length, length)) for length in (1, 7, 40, 33)]
DENSE = EXAMPLES["qwen3"]


def submit(engine: Engine, prompt: Sequence[int], pooling: Pooling, name: str) -> list[Chunk]:
    chunks: list[Chunk] = []
    engine.submit(GenerationRequest(tuple(prompt), NOTHING, chunks.append, name, pooling=pooling))
    return chunks


def pooled(engine: Engine, prompts: Sequence[Sequence[int]], pooling: Pooling) -> list[F32]:
    """The vectors of all prompts, run as one batch."""
    answers = [submit(engine, prompt, pooling, f"r{n}") for n, prompt in enumerate(prompts)]
    while engine.step():
        pass
    vectors = []
    for prompt, (last,) in zip(prompts, answers, strict=True):
        assert (last.finish_reason, last.text, last.token_ids) == ("stop", "", ())
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), 0)
        if pooling.kind != "last":
            assert last.usage.cached_tokens == 0  # hidden states of cached tokens are not kept
        assert last.pooled is not None
        vectors.append(last.pooled)
    return vectors


def write_embedding_model(directory: Path, *, tied: bool, architecture: str = "Qwen3ForCausalLM") -> Path:
    """A dense model as Qwen3-Embedding is published: names without "model.", no head, sentence-transformers' files."""
    model = replace(DENSE, tie_word_embeddings=tied)
    write_tiny_model(directory, model)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    weights = {
        name.removeprefix("model."): values
        for name, values in tiny_weights(model).items()
        if not name.startswith("lm_head")
    }
    write_safetensors(directory / "model.safetensors", weights, "float32")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": 48,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
    }
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": {"query": "Query:", "document": ""}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory
