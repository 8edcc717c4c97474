"""`--accelerator cuda` with the project's own kernels in every layer, dense ones too, run by the SIMT machine.

Kernels run without access checks here (`tests/simt` has them). This is not a GPU run: torch's products are the CPU's.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.device.runner import DeviceRunner
from twofold.engine import Engine
from twofold.models.registry import FAMILIES
from twofold.tools.cli.main import main
from twofold.weights.weight_format import FORMATS as LAYOUTS

from tests.device.runner_runs import found_device, make_cpu_runner, make_runner, scripted
from tests.device.test_device_runner import Lost
from tests.engine.model_runs import random_prompt
from tests.models.drawn_described import EXAMPLES as DESCRIBED
from tests.tiny_models.deepseek import TinyDeepseek
from tests.tiny_models.families import (
    TinyErnie,
    TinyGlm4Moe,
    TinyGlm4MoeLite,
    TinyKimi,
    TinyMiniMaxM2,
    TinyOlmoe,
    TinyQwen2Moe,
)
from tests.tiny_models.gemma4 import TinyGemma4
from tests.tiny_models.gpt_oss import TinyGptOss
from tests.tiny_models.granite import TinyGranite
from tests.tiny_models.lfm2 import TinyLfm2
from tests.tiny_models.llama4 import TinyLlama4
from tests.tiny_models.qwen3_next import TinyQwen3Next, TinyQwen35Moe
from tests.tiny_models.writing import TinyModel, write_tiny_model

TOKENS = 6
QWEN = TinyModel(
    dtype="bfloat16", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=64, num_layers=3, mlp_only_layers=(1,),
    num_experts=10, moe_intermediate_size=32,
)  # fmt: skip
MODELS = {
    "qwen3_moe": QWEN,
    "qwen3_moe-f32-biases": TinyModel(
        dtype="float32", hidden_size=64, num_heads=3, num_kv_heads=1, head_dim=128, num_layers=2, attention_bias=True
    ),
    "mixtral-window": TinyModel(
        "MixtralForCausalLM", dtype="float16", hidden_size=64, num_heads=4, head_dim=64, num_layers=2, sliding_window=9
    ),
    "deepseek_v3": TinyDeepseek(dtype="bfloat16", num_experts=12, num_groups=4, top_groups=2, top_k=5),
    "qwen2_moe": TinyQwen2Moe(dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64),
    "gpt_oss": TinyGptOss(dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64, sliding_window=5),
    "gpt_oss-mxfp4": TinyGptOss(
        dtype="bfloat16", hidden_size=96, moe_intermediate_size=64, num_heads=4, head_dim=64, experts="mxfp4"
    ),
    "gemma4": TinyGemma4(
        dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64, global_head_dim=512, sliding_window=5, nested=True
    ),
    "gemma4-shared": TinyGemma4(
        dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64, global_head_dim=128, sliding_window=5, num_layers=4,
        full=(1, 3), num_shared=2, layer_input=24,
    ),
    "olmoe": TinyOlmoe(dtype="bfloat16", hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64),
    "glm4_moe": TinyGlm4Moe(dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=128),
    "glm4_moe_lite": TinyGlm4MoeLite(dtype="bfloat16"),
    "minimax_m2": TinyMiniMaxM2(dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=128, rotary_dim=64),
    "ernie4_5_moe": TinyErnie(dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64),
    "granitemoe": TinyGranite(
        "GraniteMoeSharedForCausalLM", dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64,
        shared_intermediate_size=40,
    ),
    "qwen3_next": TinyQwen3Next(
        dtype="bfloat16", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=256, num_layers=3, full_attention=(1,)
    ),
    "qwen3_5_moe": TinyQwen35Moe(
        dtype="bfloat16", hidden_size=64, num_heads=2, num_kv_heads=1, head_dim=256, num_layers=2, full_attention=(1,),
        nested=True, key_dim=130, value_dim=33,
    ),
    "lfm2_moe": TinyLfm2(dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64),
    "llama4": TinyLlama4(
        dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64, attention_chunk_size=8, floor_scale=4
    ),
    "kimi_k25": TinyKimi(dtype="bfloat16", nested=True),
    "deepseek_v2": TinyDeepseek("DeepseekV2ForCausalLM", dtype="bfloat16", q_lora_rank=None, num_shared_experts=2),
    **{
        name: model.resized(
            dtype="bfloat16", hidden_size=256 if name in ("granitemoe_swa", "ernie4_5_vl_moe") else 64, num_heads=4,
            head_dim=128 if name in ("glm4v_moe", "laguna", "step3p7") else 192 if name == "mimo_v2_flash" else 64,
        )
        for name, model in DESCRIBED.items()
    },
}  # fmt: skip
FORMATS = tuple(name for name, layout in LAYOUTS.items() if layout.quantised and layout.block_columns > 1)


def check_answers(simt: ModuleType, path: Path, graphs: bool, *, has_experts: bool = True) -> None:
    """Logits of two requests, decoded by table steps, are the CPU's but for what bf16 rounds."""
    runner = make_runner(simt, path, slots=9 if has_experts else 0, graphs=graphs)
    ours = scripted(runner, 2, TOKENS, QWEN.vocab_size)
    assert (runner.why_eager is None) == graphs
    assert runner.why_placed is None
    assert runner.num_table_steps > 0
    counts = runner.moe.counts()
    assert (counts.hits + counts.fetched > 0 < counts.cpu_misses) == has_experts
    expected = scripted(make_cpu_runner(path), 2, TOKENS, QWEN.vocab_size)
    errors = np.linalg.norm(ours - expected, axis=1) / np.linalg.norm(expected, axis=1)
    same = ours.argmax(1) == expected.argmax(1)
    # Measured: 0.7 to 3.2 % in the median (more where a rounding sends a token to another expert), and 10 of 12 tokens
    # at least; another token is one whose lead is less than that.
    assert np.median(errors) < 0.06
    assert same.mean() >= 0.75


def test_every_family_is_here() -> None:
    assert {family.module for family in FAMILIES} <= set(DESCRIBED) | {name.split("-")[0] for name in MODELS}


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_every_family_answers_as_on_the_cpu(
    simt: ModuleType, tmp_path: Path, model: str, graphs: bool
) -> None:
    path = write_tiny_model(tmp_path, MODELS[model])
    check_answers(simt, path, graphs, has_experts=MODELS[model].has_experts)


def test_a_lost_step_finds_the_states_of_sequences_as_they_were(
    simt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path, MODELS["qwen3_next"])
    whole = scripted(make_runner(simt, path, slots=9), 2, TOKENS, QWEN.vocab_size)
    runner = make_runner(simt, path, slots=9)
    Lost(runner, at=2).lose(monkeypatch, "aborted")
    lost = scripted(runner, 2, TOKENS, QWEN.vocab_size)
    assert runner.num_table_steps == 2
    errors = np.linalg.norm(lost - whole, axis=1) / np.linalg.norm(whole, axis=1)
    assert errors.max() < 0.02


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_experts_answer_as_on_the_cpu(simt: ModuleType, tmp_path: Path, format: str) -> None:
    size = max(64, LAYOUTS[format].block_columns)
    model = replace(QWEN, hidden_size=size, moe_intermediate_size=size)
    source = write_tiny_model(tmp_path / "source", model)
    assert (
        main(["quantize", str(source), str(tmp_path / "made"), "--format", format, "--max-tokens", "0"]) == 0
    )
    check_answers(simt, tmp_path / "made", graphs=True)


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
def test_the_bundled_model_answers_token_by_token_as_on_the_cpu(
    simt: ModuleType, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    monkeypatch.setattr("twofold.device.loading.DeviceRunner", functools.partial(DeviceRunner, graphs=graphs))
    answers = []
    for accelerator in ("none", "cuda"):
        with found_device(lambda: simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
            config = EngineConfig(
                accelerator=accelerator, gpu_experts_ratio=0.25, cpu_threads=2, max_total_tokens=512
            )
            engine = Engine.load(config)
        tokens: list[int] = []
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        engine.generate(
            engine.tokenizer.encode("Once upon a time"),
            sampling,
            lambda chunk, to=tokens: to.extend(chunk.token_ids),
        )
        answers.append(tokens)
        assert (engine.stats().placement.hits > 0) == (accelerator == "cuda")
        engine.close()
    assert len(answers[0]) == TOKENS
    assert answers[0] == answers[1]


def test_a_dense_model_answers_token_by_token_as_on_the_cpu(simt: ModuleType, tmp_path: Path) -> None:
    """A mixture of no experts: captured steps, chunks of prompts, several requests, and no slots."""
    # Of 24 seeds the one whose tokens lead by most, 0.18: rounding to bf16 changes none.
    model = replace(DESCRIBED["qwen3"], dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64, seed=9)
    path = str(write_tiny_model(tmp_path, model))
    answers = []
    for accelerator in ("none", "emulated:rtx4090-pcie4", "cuda"):
        config = EngineConfig(
            model=path,
            accelerator=accelerator,
            cpu_threads=1,
            max_total_tokens=512,
            max_num_batched_tokens=16,
        )
        with found_device(lambda: simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)):
            engine = Engine.load(config)
        tokens: list[int] = []
        for prompt in (random_prompt(40), random_prompt(7)):
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            engine.generate(prompt, sampling, lambda chunk, to=tokens: to.extend(chunk.token_ids))
        answers.append(tokens)
        assert engine.stats().placement.hits == engine.info.num_slots == 0
        engine.close()
    assert len(answers[0]) == 2 * TOKENS
    assert answers[0] == answers[1] == answers[2]
