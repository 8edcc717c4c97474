"""Families composed of blocks that others have: drawn configurations against transformers, GGUF and themselves."""

from __future__ import annotations

import json
import logging
import random
import re
import sqlite3
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from twofold.api.config import EngineConfig
from twofold.api.errors import ModelLoadError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.blocks import ops
from twofold.device.decode_inputs import DecodeRow
from twofold.device.kernels import TorchKernels
from twofold.device.model import DeviceModel
from twofold.engine import Engine
from twofold.models.model_files import open_model_files
from twofold.models.picture_encoder import open_vision_source
from twofold.models.registry import read_config
from twofold.models.sizing import measure_files
from twofold.telemetry.writer import open_sink
from twofold.tools.cli.main import main

from tests.engine.device_model_runs import (
    PAGE,
    PAGES,
    chunk,
    close,
    cpu_logits,
    decode_graphs,
    device_model,
    held_by,
    layer_inputs,
    run,
)
from tests.engine.model_runs import load, random_prompt
from tests.models.drawn_families import drawn
from tests.models.transformers_runs import (
    PROMPT,
    equals_transformers_and_itself,
    logits_in_float64,
    one_torch_thread,
    reference_logits,
    reference_of,
    write_gguf,
)
from tests.tiny_models.table import EXAMPLES, FULL, YARN, linear_layers
from tests.tiny_models.writing import write_tiny_model

__all__ = ["one_torch_thread"]  # a fixture

IN_GGUF = [family for family, model in EXAMPLES.items() if model.gguf_architecture]
# Every kind of block and of state.
OFTEN = (
    "qwen3_next", "gemma4", "gpt_oss", "llama4", "deepseek_v3", "lfm2_moe", "granitemoe", "olmoe", "qwen3", "flex_olmo",
    "mimo_v2_flash", "laguna", "hunyuan_v1_moe", "mistral4", "step3p7", "gemma4-small", "glm_moe_dsa",
    "hy_v4", "qwen4_exp", "axk2", "mistral_large4",
)  # fmt: skip


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", list(EXAMPLES))
def test_drawn_configurations_equal_transformers_and_themselves(
    tmp_path_factory: pytest.TempPathFactory, family: str, count: int
) -> None:
    decided_by_float64: list[str] = []

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(seed=st.integers(0, 2**31))
    def equals(seed: int) -> None:
        model = drawn(family, random.Random(f"{family}/{seed}"))
        decided = equals_transformers_and_itself(model, tmp_path_factory.mktemp(family))
        if decided:
            decided_by_float64.append(f"seed {seed}: {decided}")

    equals()
    if decided_by_float64:
        warnings.warn(f"float64 decided: {'; '.join(decided_by_float64)}", stacklevel=1)
    assert len(decided_by_float64) <= max(1, count // 4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "gpt_oss"])
def test_float64_is_nearer_than_float32_rounds(tmp_path: Path, family: str) -> None:
    """The judge of drawn models: float64 in every operation of transformers, its casts to float32 included."""
    directory = write_tiny_model(tmp_path, EXAMPLES[family])
    theirs = reference_of(EXAMPLES[family], directory)
    rounded, exact = reference_logits(theirs, PROMPT), logits_in_float64(theirs, PROMPT)
    assert (rounded.dtype, exact.dtype) == (np.float32, np.float64)
    assert 1e-7 < np.abs(rounded - exact).max() < 1e-4
    ours = load(directory)
    assert np.abs(ours.logits(ours.prefill(PROMPT)[1]) - exact).max() < 1e-4
    once_more = logits_in_float64(theirs, PROMPT)
    np.testing.assert_array_equal(exact, once_more)
    assert np.abs(exact - exact.astype(np.float32)).max() > 0


@pytest.mark.parametrize("family", ["kimi_k25", "gemma4", "mistral_large4"])
def test_a_whole_model_that_sees_equals_transformers_and_what_it_saves_loads(
    tmp_path: Path, family: str
) -> None:
    """With published names and with transformers' own names."""
    directory = write_tiny_model(tmp_path / "hf", replace(EXAMPLES[family], nested=True))
    config = json.loads((directory / "config.json").read_text())
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config | {"vision_config": small}))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        ignore_mismatched_sizes=True,
    ).eval()
    theirs.save_pretrained(tmp_path / "saved", save_original_format=False)
    expected = reference_logits(theirs, PROMPT)
    for path in (directory, tmp_path / "saved"):
        ours = load(path)
        assert np.abs(ours.logits(ours.prefill(PROMPT)[1]) - expected).max() < 1e-4


def test_the_encoders_tensors_keep_the_names_of_the_files(tmp_path: Path) -> None:
    """transformers knows published names; those of the text part are others."""
    row = EXAMPLES["mistral_large4"].row
    directory = write_tiny_model(tmp_path, EXAMPLES["mistral_large4"])
    assert open_vision_source(read_config(directory), directory)[1] == [row.vision_tensor]


def _full_rope(**changed: Any) -> dict[str, Any]:
    """Rotations of Gemma 4 with another one of layers with full attention."""
    ropes = EXAMPLES["gemma4"].settings["rope_parameters"]
    return ropes | {FULL: ropes[FULL] | changed}


STEP, M3, L4, QWEN4 = (
    EXAMPLES[family].text_config() for family in ("step3p7", "minimax_m3", "mistral_large4", "qwen4_exp")
)
FLIPPED: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe", {"partial_rotary_factor": 0.5}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1}),
    ("glm4_moe", {"routed_scaling_factor": 1.0}),
    ("dots1", {"norm_topk_prob": False}),
    ("dots1", {"sliding_window": 9, "max_window_layers": 1}),
    ("exaone_moe", {"sliding_window_pattern": 3}),
    ("flint", {"sliding_window": 20}),
    ("mimo_v2_flash", {"attention_value_scale": 1.0}),
    ("laguna", {"moe_router_logit_softcapping": 0.0}),
    ("afmoe", {"mup_enabled": False}),
    ("mistral4", {"rope_parameters": None}),
    ("gpt_oss", {"sliding_window": 20}),
    ("gpt_oss", {"attention_bias": False}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 9}),
    ("qwen3_next", {"norm_topk_prob": False}),
    ("qwen3_next", {"partial_rotary_factor": 0.5}),
    ("qwen3_next", {"layer_types": linear_layers(5, 2, 4)}),
    ("glm4_moe_lite", {"rope_interleave": False}),
    ("minimax_m2", {"rotary_dim": 24}),
    ("ernie4_5_moe", {"moe_layer_interval": 1}),
    ("granitemoe", {"embedding_multiplier": 1.0}),
    ("granitemoe", {"residual_multiplier": 1.0}),
    ("granitemoe", {"attention_multiplier": 0.25}),
    ("granitemoe", {"logits_scaling": 1.0}),
    ("llama4", {"use_qk_norm": False}),
    ("lfm2_moe", {"routed_scaling_factor": 1.7}),
    ("llama4", {"attention_chunk_size": 8192}),
    ("llama4", {"no_rope_layer_interval": 3}),
    ("llama4", {"floor_scale": 8192}),
    ("llama4", {"interleave_moe_layer_step": 1}),
    ("glm4_moe_lite", {"routed_scaling_factor": 1.0}),
    ("gemma4", {"sliding_window": 20}),
    ("gemma4", {"rope_parameters": _full_rope(partial_rotary_factor=0.5)}),
    ("gemma4", {"rope_parameters": _full_rope(rope_theta=100.0)}),
    ("gemma4", {"final_logit_softcapping": None}),
    ("gemma4-small", {"sliding_window": 20}),
    ("step3p7", {"swiglu_limits": None}),
    ("step3p7", {"swiglu_limits_shared": None}),
    ("dots3_note", {"sliding_window": 20}),
    ("dots3_note", {"swa_rope_theta": 1e6}),
    ("dots3_note", {"use_dsa": False}),
    ("minimax_m3", {"index_topk_blocks": 2}),
    ("minimax_m3", {"index_local_blocks": 0}),
    ("minimax_m3", {"swiglu_limit": 7.0}),
    ("deepseek_v32", {"index_topk": 11}),
    ("hy_v4", {"index_topk": 11}),
    ("qwen4_exp", {"indexer_budget": 12}),
    ("qwen4_exp", {"output_gate_type": "silu"}),
    ("hy_v4", {"hc_magnitude": 1.6}),
    ("hy_v4", {"swiglu_limit": 10.0}),
    ("glm_moe_dsa", {"index_topk_pattern": "FFF"}),
    ("axk2", {"index_topk": 11}),
    ("axk2", {"n_group": 1, "topk_group": 1}),
    ("mistral_large4", {"index_topk": 11}),
    ("mistral_large4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("mistral_large4", {"final_logit_softcapping": 5.0}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"rope_scaling": None}),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}),
]


@pytest.mark.parametrize(("family", "change"), FLIPPED, ids=str)
def test_a_wrong_corner_shows(tmp_path: Path, family: str, change: dict[str, Any]) -> None:
    """The comparison can fail: each switch, flipped, moves the logits far beyond the tolerance."""
    base = EXAMPLES[family]
    runs = [
        load(write_tiny_model(tmp_path / name, model))
        for name, model in (("base", base), ("flipped", base.changed(**change)))
    ]
    logits, other = (runner.logits(runner.prefill(PROMPT)[1]) for runner in runs)
    assert np.abs(other - logits).max() > 0.01


@pytest.mark.parametrize(
    ("family", "gguf"),
    [
        pytest.param(family, gguf, id=f"{'gguf' if gguf else 'directory'}-{family}")
        for gguf in (False, True)
        for family in (IN_GGUF if gguf else EXAMPLES)
    ],
)
def test_a_device_computes_the_same_within_bf16_rounding(tmp_path: Path, family: str, gguf: bool) -> None:
    """With the kernels in plain torch: two chunks, then decode steps. All experts are chosen: no tie decides."""
    model = replace(EXAMPLES[family].all_chosen(), dtype="bfloat16")
    if gguf:
        path = write_gguf(tmp_path / "model.gguf", model, type_of=lambda name: "BF16")
    else:
        path = write_tiny_model(tmp_path / "directory", model)
    tokens = random_prompt(33)
    device, moe = device_model(path)
    kept = device.state(10, PAGE, 1)
    parts = [
        device.forward(chunk(tokens, *rows, layer_inputs(device, tokens, *rows)), kept, moe)
        for rows in ((0, 20), (20, 9))
    ]
    width = 0 if device.inputs is None else device.inputs.width
    graphs = decode_graphs(lambda batch: (device.forward(batch, kept, moe),), len(PAGES), width)
    for i in range(29, 33):
        inputs = layer_inputs(device, tokens, i, 1)
        row = [DecodeRow(tokens[i], i, PAGES, inputs=() if inputs is None else inputs[0])]
        step = run(graphs, row)
        # As after a step that was lost: what is kept of the sequence is the same, computed once or twice.
        parts.append(run(graphs, row))
        assert torch.equal(parts[-1], step)
    assert close(device.logits(torch.cat(parts)), cpu_logits(path, tokens))
    assert graphs.fall_back_reason is None
    files = open_model_files(path)
    held = DeviceModel(
        files, ops.ThreadPool(1), torch.device("cpu"), TorchKernels(), files.config.max_context
    )
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held_by(held, torch.Tensor))
    assert measure_files(files).device_dense_bytes == num_bytes


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in EXAMPLES]
)
def test_the_same_tokens_wherever_experts_run(tmp_path: Path, family: str) -> None:
    """Alone on `none` and `emulated`; and together on `emulated`, in chunks, preempted, from the prefix cache."""
    directory = write_tiny_model(tmp_path, EXAMPLES[family])
    prompts = (PROMPT, PROMPT[:20], PROMPT[:32] + PROMPT[:9])
    sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)

    def load_engine(accelerator: str, ratio: float, **small: int) -> Engine:
        return Engine.load(
            EngineConfig(
                model=str(directory),
                accelerator=accelerator,
                gpu_experts_ratio=ratio,
                cpu_threads=1,
                **small,
            )
        )

    def answers(engine: Engine, *, together: bool) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for number, (prompt, tokens) in enumerate(zip(prompts, found, strict=True)):

            def take(chunk: Chunk, tokens: list[int] = tokens) -> None:
                tokens.extend(chunk.token_ids)

            if together:
                engine.submit(GenerationRequest(tuple(prompt), sampling, take, f"r{number}"))
            else:
                engine.generate(prompt, sampling, take)
        while engine.step():
            pass
        return found

    plain = load_engine("none", 0.0, page_size=4)
    expected = answers(plain, together=False)
    assert list(map(len, expected)) == [24, 24, 24]
    plain.close()
    emulated = load_engine("emulated:rtx4090-pcie4", 0.4)
    assert answers(emulated, together=False) == expected
    assert (emulated.stats().placement.hits > 0) == EXAMPLES[family].has_experts
    emulated.close()
    small = load_engine(
        "emulated:rtx4090-pcie4", 1.0, page_size=4, max_total_tokens=112, max_num_batched_tokens=16
    )
    assert answers(small, together=True) == expected
    assert answers(small, together=True) == expected
    stats = small.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0 or stats.num_records > 0  # snapshots are further apart
    small.close()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in EXAMPLES]
)
def test_every_command_accepts_every_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """`models`, `doctor`, `rules explain`, `pack` and `quantize`; and telemetry of an answer."""
    path, packed = str(write_tiny_model(tmp_path / "model", EXAMPLES[family])), str(tmp_path / "packed")
    for command in (["models", path], ["doctor", path], ["rules", "explain", path], ["pack", path, packed]):
        assert main(command) == 0, command
    assert EXAMPLES[family].config()["architectures"][0] in capsys.readouterr().out
    assert main(["quantize", path, str(tmp_path / "q8"), "--format", "q8_0", "--max-tokens", "0"]) == 0
    load(tmp_path / "q8")
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    answers: list[list[int]] = []
    for directory, accelerator in ((packed, "none"), (path, "emulated:rtx4090-pcie4")):
        config = EngineConfig(model=directory, accelerator=accelerator, cpu_threads=1)
        engine = Engine.load(config, telemetry=sink if directory == path else None)
        tokens: list[int] = []
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.generate(PROMPT, sampling, lambda chunk, to=tokens: to.extend(chunk.token_ids))
        answers.append(tokens)
        engine.close()
    sink.close()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8
    with sqlite3.connect(tmp_path / "t.db") as database:
        ((architecture, layers),) = database.execute("select architecture, num_layers from run")
        ((steps, of_layers),) = database.execute(
            "select (select count(*) from step), (select count(distinct layer) from token_layer)"
        )
    assert (architecture, layers) == (engine.info.architecture, of_layers)
    assert steps >= 4


@pytest.mark.parametrize("family", IN_GGUF)
def test_quantising_a_gguf_file_keeps_its_configuration_and_answers(tmp_path: Path, family: str) -> None:
    model = EXAMPLES[family].all_chosen()
    source = write_gguf(tmp_path / "model.gguf", model)
    written = tmp_path / "quantised"
    assert main(["quantize", str(source), str(written), "--format", "q8_0", "--max-tokens", "0"]) == 0
    ours, theirs = open_model_files(written).config, open_model_files(source).config
    assert (ours.layers, ours.rotations) == (theirs.layers, theirs.rotations)
    assert main(["doctor", str(written)]) == 0
    got, expected = (runner.logits(runner.prefill(PROMPT)[1]) for runner in map(load, (written, source)))
    assert np.linalg.norm(got - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("family", ["glm4_moe", "glm4_moe_lite", "minimax_m2"])
@pytest.mark.parametrize("gguf", [False, True], ids=["directory", "gguf"])
def test_mtp_layers_are_ignored_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, gguf: bool
) -> None:
    key = "num_mtp_modules" if family == "minimax_m2" else "num_nextn_predict_layers"
    model = EXAMPLES[family].changed(has_mtp=True, rope_scaling=None, **{key: 1})
    if gguf and model.num_gguf_layers == model.num_layers:
        pytest.skip("converters leave these layers out")
    path = write_gguf(tmp_path / "m.gguf", model) if gguf else write_tiny_model(tmp_path / "hf", model)
    with caplog.at_level(logging.INFO, logger="twofold"):
        config = open_model_files(path).config
    pattern = "blk" if gguf else "model.layers"
    assert re.search(rf"multi-token prediction is not run; left out: \d+ tensors {pattern}.3.\*", caplog.text)
    assert config.num_layers == 3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
    (
        "glm4_moe",
        {"partial_rotary_factor": 0.05},
        "partial_rotary_factor is 0.05, expected an even number of the 24",
    ),
    ("glm4_moe", {"n_group": 5}, "12 experts do not fill n_group 5"),
    ("glm4_moe", {"first_k_dense_replace": 3}, "mlp.gate_proj.weight is missing"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'noaux_tc'"),
    ("dots1", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is None"),
    ("dots1", {"layer_types": ["conv"] * 3}, "layer_types"),
    ("hy_v3", {"mlp_layer_types": ["dense", "conv", "sparse"]}, "mlp_layer_types"),
    ("hy_v3", {"mlp_layer_types": "sparse"}, "mlp_layer_types"),
    ("hy_v3", {"mlp_bias": True}, "mlp_bias is True"),
    ("mellum", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "factor"),
    ("glm4v_moe", {"text_config": None}, "text_config"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True, expected False"),
    ("mimo_v2_flash", {"v_head_dim": 14}, "v_head_dim 14 is more than head_dim 12"),
    ("step3p7", {"text_config": STEP | {"swiglu_limits": [0, 7]}}, "a number or null for each of 3 layers"),
    ("step3p7", {"text_config": STEP | {"swiglu_limits_shared": [0, -1, 0]}}, "swiglu_limits_shared is -1"),
    ("step3p7", {"text_config": STEP | {"layer_types": 3}}, "layer_types is 3, expected a kind for each"),
    ("laguna", {"gating": "per-layer"}, "gating is 'per-layer'"),
    ("laguna", {"num_attention_heads_per_layer": [4]}, "one number for each of 3 layers"),
    ("hunyuan_v1_moe", {"num_experts_per_tok": [4, 4, 3]}, "num_experts_per_tok is .*, expected one number"),
    ("minimax_m2", {"num_mtp_modules": 2**30}, "4096 at most"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "conv"]}, "mlp_layer_types"),
    ("glm4_moe_lite", {"mlp_layer_types": "dense"}, "mlp_layer_types"),
    ("qwen2_moe", {"num_experts_per_tok": 10}, "num_experts_per_tok 10"),
    ("qwen2_moe", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
    ("minimax_m2", {"rotary_dim": 26}, "rotary_dim"),
    ("lfm2_moe", {"conv_L_cache": 1}, "conv_L_cache is 1"),
    ("lfm2_moe", {"layer_types": ["conv"]}, "layer_types"),
    ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok 2 is not 1"),
    ("llama4", {"layer_types": ["chunked_attention"]}, "for each of 5 layers"),
    ("granitemoe", {"residual_multiplier": 0}, "residual_multiplier is 0"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is True, expected False"),
    ("ernie4_5_moe", {"moe_layer_start_index": 5}, "mlp.gate_proj.weight is missing"),
    ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0, expected a number above 0"),
    ("gpt_oss", {"layer_types": ["linear"] * 3}, "layer_types"),
    ("gpt_oss", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
    ("qwen3_next", {"layer_types": ["linear_attention"] * 5}, "no layer has full attention"),
    ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple"),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    ("qwen3_5_moe", {"text_config": None}, "text_config"),
    ("gemma4", {"num_kv_shared_layers": 2}, "so few that a layer of each kind is left"),
    ("gemma4", {"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9"),
    ("gemma4", {"hidden_size_per_layer_input": 4}, "embed_tokens_per_layer.weight is missing"),
    (
        "gemma4",
        {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 9},
        "vocab_size_per_layer_input 9 is less than vocab_size",
    ),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 24}}}, "one for all layers with full attention"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "axial"}}}, "rope_type is 'axial'"),
    ("deepseek_v3", {"topk_method": "random"}, "topk_method"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"mlp_bias": True}, "mlp_bias"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
    ("deepseek_v3", {"n_group": 5}, "12 experts"),
    ("deepseek_v3", {"topk_group": 9, "n_group": 4}, "topk_group"),
    ("dots3_note", {"layer_types": ["conv"] * 3}, "'indexed_attention' or 'sliding_attention' for each of 3"),
    ("dots3_note", {"swa_head_dim": 0}, "swa_head_dim is 0"),
    ("minimax_m3", {"text_config": M3 | {"swiglu_alpha": 1.5}}, "swiglu_alpha is 1.5, expected 1.702"),
    ("minimax_m3", {"text_config": M3 | {"index_n_heads": 1}}, "num_key_value_heads, which is 2"),
    ("minimax_m3", {"text_config": M3 | {"layer_types": ["full"] * 3}}, "layer_types"),
    ("hy_v4", {"hc_mult": 1}, "hc_mult is 1"),
    (
        "qwen4_exp",
        {"text_config": QWEN4 | {"indexer_budget": 10}},
        "a multiple of indexer_compress_ratio, which is 3",
    ),
    ("qwen4_exp", {"text_config": QWEN4 | {"output_gate_type": "tanh"}}, "'sigmoid' or 'silu'"),
    ("deepseek_v32", {"q_lora_rank": None}, "because the indexer reads low-rank queries"),
    ("axk2", {"gated_norm_rank": 0}, "gated_norm_rank is 0"),
    ("mistral_large4", {"text_config": L4 | {"kv_source_layers": [0, 0, 0, 1]}}, "with or without positions"),
    ("mistral_large4", {"text_config": L4 | {"no_rope_layers": [1]}}, "a number for each of 4 layers"),
    ("glm_moe_dsa", {"index_topk_pattern": "SFF"}, "for each of 3 layers, the first one full"),
    ("glm_moe_dsa", {"indexer_types": ["full", "half", "full"]}, "indexer_types"),
    ("kimi_k25", {"text_config": None}, "text_config"),
    ("kimi_k25", {"text_config": {"quantization_config": {"quant_method": "gguf?"}}}, "quantization_config"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any], message: str
) -> None:
    write_tiny_model(tmp_path, EXAMPLES[family])
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        open_model_files(tmp_path)
