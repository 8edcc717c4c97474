"""Prediction layers of every family that has them: logits against transformers' layers, files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.engine import Engine
from twofold.models.model_files import open_model_files
from twofold.models.sizing import measure_files
from twofold.step.model import BatchMeta, LoadedModel
from twofold.tools.cli.main import main

from tests.engine.model_runs import Runner, random_prompt
from tests.models.mtp_reference import MODELS, MtpReference
from tests.models.transformers_runs import one_torch_thread
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.writing import F32, write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

PROMPT = random_prompt(30)


def load(path: Path) -> Runner:
    return Runner(LoadedModel(open_model_files(path, "need"), ops.ThreadPool(1)))


def predicted(ours: Runner, ids: list[int]) -> F32:
    """Logits of the MTP layer at every position of `ids` but the last."""
    layer = ours.model.mtp
    assert layer is not None
    sequence, hidden = ours.prefill(ids[:-1])
    previous = ours.model.states(hidden)
    count = len(ids) - 1
    batch = BatchMeta(
        positions=np.arange(count, dtype=np.int32),
        sequence_index=np.zeros(count, np.int32),
        page_tables=sequence.pages[None],
        prompt_lengths=np.array([sequence.prompt_length], np.int32),
        records=np.array([sequence.record], np.int32),
    )
    ours.moe.begin_step(9, [0] * count, [0] * count, is_recorded=False)
    found = layer.forward(
        np.array(ids[1:], np.int32),
        previous,
        ours.model.attention_batch(batch),
        ours.cache,
        ours.moe.executor,
    )
    logits = np.empty((count, ours.model.config.vocab_size), np.float32)
    layer.head.forward(found, logits)
    return logits


@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_transformers_layers(tmp_path: Path, family: str) -> None:
    model = MODELS[family]
    ours = load(write_tiny_model(tmp_path / "hf", model))
    expected = MtpReference.of(model, tmp_path).logits(PROMPT, 1)[0]
    assert np.abs(expected).max() > 1.0
    assert np.abs(predicted(ours, PROMPT) - expected).max() < 1e-4 * max(
        1.0, float(np.abs(expected).max()) / 16
    )


@pytest.mark.parametrize("family", [name for name, model in MODELS.items() if name != "ernie4_5_moe"])
def test_a_gguf_file_has_the_same_layer(tmp_path: Path, family: str) -> None:
    model = MODELS[family].twin
    directory, file = write_tiny_model(tmp_path / "hf", model), write_tiny_gguf(tmp_path / "m.gguf", model)
    expected, found = (predicted(load(path), PROMPT) for path in (directory, file))
    np.testing.assert_allclose(found, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("family", MODELS)
def test_the_layer_is_counted_only_where_it_is_run(tmp_path: Path, family: str) -> None:
    path = write_tiny_model(tmp_path, MODELS[family])
    without, whole = (measure_files(open_model_files(path, how)) for how in ("skip", "need"))
    assert whole.config.num_layers == without.config.num_layers + 1
    assert whole.config.num_target_layers == without.config.num_layers
    assert whole.kv_bytes_per_token > without.kv_bytes_per_token
    assert whole.bytes_per_sequence == without.bytes_per_sequence
    assert whole.dense_bytes > without.dense_bytes
    more = len(whole.config.moe_layers) - len(without.config.moe_layers)
    assert more == (family != "ernie4_5_moe")
    assert whole.num_experts_total == without.num_experts_total + more * whole.config.routed.num_experts


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_quantised_and_packed_models_keep_the_layer(tmp_path: Path, family: str) -> None:
    # Every token uses all experts, so that rounding cannot change the choice.
    source = write_tiny_model(tmp_path / "hf", MODELS[family].all_chosen())
    quantised, packed = tmp_path / "quantised", tmp_path / "packed"
    assert main(["quantize", str(source), str(quantised), "--format", "q8_0", "--max-tokens", "0"]) == 0
    assert main(["pack", str(source), str(packed)]) == 0
    expected = predicted(load(source), PROMPT)
    assert np.linalg.norm(predicted(load(quantised), PROMPT) - expected) < 0.05 * np.linalg.norm(expected)
    for path in (quantised, packed):
        for drafts in (None, '{"method": "mtp", "num_speculative_tokens": 2, "adaptive": false}'):
            engine = Engine.load(
                EngineConfig(model=str(path), accelerator="none", cpu_threads=1, speculative_config=drafts)
            )
            usage = engine.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
            assert usage.completion_tokens == 6
            drafted = engine.stats().speculation
            assert (drafted is not None) == (drafts is not None)
            engine.close()


def test_doctor_counts_the_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny_model(tmp_path, MODELS["glm4_moe"])
    reported = []
    for more in ([], ["--speculative-config", '{"method": "mtp"}']):
        main(["doctor", str(path), "--accelerator", "none", *more])
        reported.append(next(line for line in capsys.readouterr().out.splitlines() if " experts of " in line))
    model = MODELS["glm4_moe"]
    assert [
        f"{count * model.num_experts} experts" in line for count, line in zip((2, 3), reported, strict=True)
    ] == [
        True,
        True,
    ]
