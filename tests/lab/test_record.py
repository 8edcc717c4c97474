"""Recording a text: every token once, in order, the same experts as decoding it would have used."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import ConfigError
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.models import open_model_files
from twofold.models.sizing import trace_sizes
from twofold.tools.lab.record import record_text
from twofold.tools.lab.trace import load_trace

from tests.tiny_models.writing import TinyModel, write_tiny_model

TEXT = "Once upon a time there was a fox who could not count beyond four. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), TinyModel(num_layers=2)))


def test_every_token_is_recorded_once_with_its_own_experts(tmp_path, model):
    path = tmp_path / "text.npz"
    num_sequences, num_tokens = record_text(TEXT, path, model=model, sequence_tokens=50, cpu_threads=1)
    with np.load(path, allow_pickle=False) as file:
        ids, offsets = file["ids"], file["offsets"]
    assert num_sequences == len(offsets) - 1 == -(-num_tokens // 50)
    assert offsets[-1] == len(ids) == num_tokens
    assert load_trace(path).sizes == trace_sizes(open_model_files(model))
    engine = Engine.load(EngineConfig(model=model, accelerator="none", cpu_threads=1))
    tokens = engine.tokenizer.encode(TEXT)
    assert len(tokens) == num_tokens
    chunks = []
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.submit(
        GenerationRequest(tuple(tokens[50:100]), sampling, chunks.append, "x", return_routed_experts=True)
    )
    while engine.step():
        pass
    engine.close()
    assert np.array_equal(ids[50:100], chunks[-1].routed_experts)


def test_an_output_that_cannot_be_is_refused_by_its_own_flag(tmp_path, model):
    for path in (tmp_path / "t.txt", tmp_path / "no" / "t.npz"):
        with pytest.raises(ConfigError, match=r"^--output"):
            record_text(TEXT, path, model=model, sequence_tokens=50, cpu_threads=1)


@pytest.mark.parametrize(("text", "length"), [("", 50), (TEXT, 0), (TEXT, 10**6)])
def test_a_recording_that_cannot_be_made_leaves_no_file(tmp_path, model, text, length):
    with pytest.raises(ConfigError):
        record_text(text, tmp_path / "t.npz", model=model, sequence_tokens=length, cpu_threads=1)
    assert list(tmp_path.iterdir()) == []
