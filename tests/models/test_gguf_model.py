"""A GGUF file and a Hugging Face directory of the same weights are the same model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from twofold._testing import kernels
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.rope import inverse_frequencies
from twofold.models import read_config
from twofold.models.model_files import ModelFiles, open_model_files, part_specs
from twofold.models.registry import read_gguf_config
from twofold.weights.gguf_file import GgufFile
from twofold.weights.gguf_source import GgufSource
from twofold.weights.weight_format import FORMATS, WeightMatrix

from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import tiny
from tests.tiny_models.writing import TinyModel, tiny_config, write_tiny_model

QWEN = TinyModel(hidden_size=64, moe_intermediate_size=32, num_layers=2, num_experts=4)
MIXTRAL = replace(QWEN, architecture="MixtralForCausalLM", num_heads=8)
MODELS = [
    QWEN,
    MIXTRAL,
    replace(QWEN, tie_word_embeddings=True, norm_topk_prob=False),
    replace(QWEN, attention_bias=True, mlp_only_layers=(1,), num_layers=3),
    replace(MIXTRAL, sliding_window=16, rope_theta=1e6),
]


def all_weights(files: ModelFiles) -> list[Any]:
    """Every array of a model, experts last."""
    found: list[Any] = [
        weights.vector(name) if len(spec.shape) == 1 else weights.matrix(name)
        for part, weights in files.parts()
        for name, spec in weights.specs.items()
        if not isinstance(part, ExpertBlock)
    ]
    for layer_index in files.config.moe_layers:
        found += [matrix for expert in files.expert_weights(layer_index) for matrix in expert]
    pool = ops.ThreadPool(1)
    return [ops.dequantise(pool, item) if isinstance(item, WeightMatrix) else item for item in found]


@pytest.mark.parametrize("model", MODELS)
def test_the_same_configuration_and_weights(tmp_path: Path, model: TinyModel) -> None:
    ours = open_model_files(write_tiny_gguf(tmp_path / "tiny.gguf", model))
    theirs = open_model_files(write_tiny_model(tmp_path / "hf", model))
    kept = {"architecture": ours.config.architecture, "generation": ours.config.generation}
    assert replace(theirs.config, eos_token_ids=(2,), pad_token_id=0, **kept) == ours.config
    assert ours.config.architecture == model.architecture
    for a, b in zip(all_weights(ours), all_weights(theirs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_older_files_have_one_tensor_per_expert(tmp_path: Path) -> None:
    older = open_model_files(write_tiny_gguf(tmp_path / "old.gguf", MIXTRAL, one_tensor_per_expert=True))
    newer = open_model_files(write_tiny_gguf(tmp_path / "new.gguf", MIXTRAL))
    for a, b in zip(all_weights(older), all_weights(newer), strict=True):
        np.testing.assert_array_equal(a, b)


def test_joined_q_k_v(tmp_path: Path) -> None:
    plain = open_model_files(write_tiny_gguf(tmp_path / "plain.gguf", MIXTRAL))
    file = GgufFile.open(write_tiny_gguf(tmp_path / "tiny.gguf", MIXTRAL))
    tensors = dict(file.tensors)
    for layer in range(2):
        q, k, v = (tensors.pop(f"blk.{layer}.attn_{name}.weight") for name in "qkv")
        rows = np.concatenate([_raw(part) for part in (q, k, v)])
        joined = tmp_path / f"joined{layer}"
        joined.write_bytes(rows.tobytes())
        shape = (q.shape[0] + k.shape[0] + v.shape[0], q.shape[1])
        name = f"blk.{layer}.attn_qkv.weight"
        tensors[name] = replace(q, name=name, file=joined, offset=0, shape=shape, num_bytes=rows.nbytes)
    config = read_gguf_config(file)
    specs = part_specs(config, lambda spec: spec.gguf in tensors)
    source = GgufSource(replace(file, tensors=tensors), chain.from_iterable(map(dict.values, specs)))
    for name in plain.tensors:
        shape = plain.tensors.entry(name).shape
        if len(shape) > 1:
            for a, b in zip(source.stack(name, shape), plain.tensors.stack(name, shape), strict=True):
                np.testing.assert_array_equal(a.data, b.data)


def _raw(tensor: Any) -> Any:
    return np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.offset)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_rows_are_those_of_the_file(tmp_path: Path, kind: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", QWEN, type_of=lambda name: kind)
    files, reader = open_model_files(path), gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    gate = np.array(theirs["blk.1.ffn_gate_exps.weight"].data)
    for expert, (matrix, _, _) in enumerate(files.expert_weights(1)):
        assert matrix.format == kind.lower()
        assert not matrix.data.flags.owndata
        assert matrix.data.tobytes() == gate[expert].tobytes()
    assert files.embedding.matrix("table").data.tobytes() == theirs["token_embd.weight"].data.tobytes()
    assert files.config.dtype == {"F16": "float16"}.get(kind, "bfloat16")


@pytest.mark.parametrize(
    "format", [name for name, layout in FORMATS.items() if layout.gguf and not layout.quantised]
)
def test_values_are_those_of_the_gguf_package(tmp_path: Path, format: str) -> None:
    layout, kind = FORMATS[format], FORMATS[format].gguf
    rng = np.random.default_rng(0)

    def encode(values: Any, requested: str) -> Any:
        if requested != kind:
            return gguf.quantize(values, gguf.GGMLQuantizationType[requested])
        rows = int(np.prod(values.shape[:-1]))
        per_row = values.shape[-1] // layout.block_columns
        blocks = rng.integers(0, 256, (rows * per_row, layout.block_bytes), dtype=np.uint8)
        scales = rng.normal(0, 0.01, (len(blocks), 2)).astype(np.float16)
        kernels.put_scales(blocks, format, scales.view(np.uint16))
        return blocks.reshape(*values.shape[:-1], -1)

    model = replace(QWEN, hidden_size=256, moe_intermediate_size=256)
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", model, type_of=lambda name: kind if "embd" in name else "Q8_0", encode=encode
    )
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["token_embd.weight"]
    expected = gguf.dequantize(np.array(theirs.data), gguf.GGMLQuantizationType[kind])
    table = open_model_files(path).embedding.matrix("table")
    assert table.format == kind.lower()
    np.testing.assert_array_equal(ops.dequantise(ops.ThreadPool(1), table), expected)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        scaling |= {"original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0}
    model = replace(QWEN, rope_scaling=scaling)

    def edit(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(64)
            writer.add_rope_scaling_yarn_beta_fast(16.0)
            writer.add_rope_scaling_yarn_beta_slow(2.0)

    ours = read_config(write_tiny_gguf(tmp_path / "tiny.gguf", model, edit=edit))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model)))
    assert ours.rope == read_config(tmp_path).rope


def test_frequency_factors_divide_the_frequencies(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 2.0, 8.0, 8.0, 8.0, 8.0, 8.0], np.float32)
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", QWEN, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    rope = read_config(path).rope
    assert rope.frequency_factors == tuple(factors)
    plain = inverse_frequencies(replace(rope, frequency_factors=()), 16)
    np.testing.assert_allclose(inverse_frequencies(rope, 16), plain / factors, rtol=1e-6)
    open_model_files(path)


def changed(key: str, value: Any, kind: str = "uint32") -> Any:
    def edit(writer: Any) -> None:
        writer.kv_data[0].pop(key, None)
        if value is not None:
            getattr(writer, f"add_{kind}")(key, value)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (changed("general.architecture", "bert", "string"), "general.architecture is 'bert', which is not supported"),
        (changed("general.architecture", None), "general.architecture is None"),
        (changed("qwen3moe.block_count", None), "qwen3moe: block_count is missing"),
        (changed("qwen3moe.block_count", 2**31), "qwen3moe: block_count is 2147483648, expected an integer"),
        (changed("qwen3moe.block_count", 1), "blk.1.attn_norm.weight (12 such in all) is not part of"),
        (changed("qwen3moe.block_count", 3), "tensor blk.2.attn_norm.weight is missing"),
        (changed("qwen3moe.embedding_length", "64", "string"), "embedding_length is '64'"),
        (changed("qwen3moe.embedding_length", 96), "has shape [320, 64], expected [320, 96]"),
        (changed("qwen3moe.attention.head_count", 3), "num_attention_heads 3 is not a multiple"),
        (changed("qwen3moe.attention.head_count", [4, 2], "array"), "head_count is [4, 2]"),
        (changed("qwen3moe.attention.value_length", 32), "value_length is 32, expected 16"),
        (changed("qwen3moe.expert_count", 0), "expert_count is 0"),
        (changed("qwen3moe.expert_count", 5), "has shape [4, 64], expected [5, 64]"),
        (changed("qwen3moe.expert_used_count", 9), "num_experts_per_tok 9 is more than the 4 experts"),
        (changed("qwen3moe.expert_gating_func", 2), "expert_gating_func is 2, expected 1 (softmax)"),
        (changed("qwen3moe.attention.layer_norm_rms_epsilon", float("nan"), "float32"), "rms_epsilon is nan"),
        (changed("qwen3moe.rope.scaling.type", "longrope", "string"), "rope.scaling.type is 'longrope'"),
        (changed("qwen3moe.rope.scaling.type", "yarn", "string"), "rope.scaling.factor is missing, expected"),
        (changed("general.sampling.top_p", 7.0, "float32"), "general.sampling.top_p is 7.0"),
    ],
)  # fmt: skip
def test_metadata_that_is_no_model(tmp_path: Path, edit: Any, message: str) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", QWEN, edit=edit)
    with pytest.raises(ModelLoadError) as refused:
        open_model_files(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_type_that_is_not_run(tmp_path: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf",
        replace(QWEN, hidden_size=256),
        type_of=lambda name: "Q1_0" if name == "blk.0.attn_q.weight" else "F32",
        encode=lambda values, kind: np.zeros((values.shape[0], 36), np.uint8),
    )
    with pytest.raises(ModelLoadError, match=r"q_proj\.weight has dtype Q1_0, expected one of the formats"):
        open_model_files(path)


def test_positions_with_axes(tmp_path: Path) -> None:
    """GLM-4.5V's files have GLM-4.5's architecture; positions with axes tell them apart."""
    model, pairs = tiny("glm4_moe"), (1, 2, 0)

    def with_axes(writer: Any) -> None:
        writer.add_rope_dimension_sections([*pairs, 0])

    config = read_config(write_tiny_gguf(tmp_path / "axes.gguf", model, edit=with_axes))
    assert config.architecture == "Glm4vMoeForConditionalGeneration"
    assert config.rope.sections == pairs
    assert not read_config(write_tiny_gguf(tmp_path / "plain.gguf", model)).rope.sections

    def wrong(writer: Any) -> None:
        writer.add_rope_dimension_sections([1, 1, 1, 1])

    with pytest.raises(
        ModelLoadError, match=r"rope\.dimension_sections is \[1, 1, 1, 1\], expected numbers of pairs"
    ):
        read_config(write_tiny_gguf(tmp_path / "wrong.gguf", model, edit=wrong))
