"""Random GGUF models: what the gguf package reads back, and what the weights are like."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from twofold.models.model_files import open_model_files

from benchmarks.models import gguf_model
from benchmarks.models.random_blocks import FORMATS, GGUF_FORMATS, random_rows
from benchmarks.models.shapes import FULL_SHAPES, DeltaShape, LatentShape

TINY = FULL_SHAPES["tiny"]


def values(name: str, rows: np.ndarray) -> np.ndarray:
    """float32 of rows of bytes, by the gguf package."""
    kind = gguf.GGMLQuantizationType[FORMATS[name].gguf_type]
    if name == "f32":
        return rows.view(np.float32)
    if name == "f16":
        return rows.view(np.float16).astype(np.float32)
    return gguf.quants.dequantize(rows, kind)


@pytest.mark.parametrize("name", GGUF_FORMATS)
@pytest.mark.parametrize("columns", [256, 2048])
def test_random_rows_are_blocks_of_the_size_and_spread_that_are_promised(name: str, columns: int) -> None:
    block_format = FORMATS[name]
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_format.gguf_type]]
    assert (block_format.columns, block_format.bytes) == (block, size)
    rows = random_rows(np.random.default_rng(1), block_format, 200, columns)
    assert rows.shape == (200, columns // block * size)
    found = values(name, rows)
    assert np.isfinite(found).all()
    spread = found.std() * columns**0.5
    # Sizes of plain float formats are powers of two.
    low, high = (0.6, 1.5) if block_format.scale_at < 0 else (0.9, 1.1)
    assert low < spread < high
    # Biased weights make all activations similar, and every token is routed to the same experts.
    assert abs(found.mean()) < 0.02 * found.std()
    assert len(np.unique(rows[:, 4])) > 40


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_the_gguf_package_reads_the_file_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / gguf_model.file_name(TINY, name, 3)
    gguf_model.write_model(path, TINY, name, 3)
    reader = gguf.GGUFReader(path)
    reported = {key: field.contents() for key, field in reader.fields.items()}
    assert reported["general.architecture"] == "qwen3moe"
    assert reported["qwen3moe.expert_count"] == TINY.experts
    assert reported["qwen3moe.expert_used_count"] == TINY.top_k
    assert reported["qwen3moe.attention.key_length"] == TINY.head_dim
    assert len(reported["tokenizer.ggml.tokens"]) == len(reported["tokenizer.ggml.token_type"]) == TINY.vocab
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {tensor.name for tensor in gguf_model.tensors_of(TINY, name)}
    requested = FORMATS[name].gguf_type
    for tensor in tensors.values():
        small = "norm" in tensor.name or "ffn_gate_inp" in tensor.name
        expected = (
            "F32" if small else "Q8_0" if requested == "MXFP4" and "_exps" not in tensor.name else requested
        )
        assert tensor.tensor_type.name == expected, tensor.name
    # ggml writes the fastest dimension first.
    assert list(tensors["blk.1.ffn_down_exps.weight"].shape) == [TINY.intermediate, TINY.hidden, TINY.experts]
    assert list(tensors["output.weight"].shape) == [TINY.hidden, TINY.vocab]
    assert (tensors["blk.0.ffn_norm.weight"].data == 1).all()
    assert sum(t.n_bytes for t in reader.tensors) == gguf_model.model_bytes(TINY, name)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_same_seed_writes_the_same_file(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        gguf_model.write_model(tmp_path / name, TINY, "q4_0", seed)
    a, b, c = (tmp_path / name for name in "abc")
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()


# Billions of weights, and of those that a token meets, as the models' names or cards say.
CARDS = {
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "gpt-oss-120b": (117, 5.1),
    "qwen3-next-80b": (80, 3),
    "qwen3.5-122b": (122, 10),
    "glm-4.5-air": (106, 12),
    "deepseek-v3": (671, 37),
}


@pytest.mark.parametrize("name", CARDS)
def test_shapes_have_the_weight_counts_of_the_model_cards(name: str) -> None:
    shape = FULL_SHAPES[name]
    billions, of_a_token = CARDS[name]
    tensors = gguf_model.tensors_of(shape, "f16")
    assert sum(tensor.all_rows * tensor.columns for tensor in tensors) == pytest.approx(
        1e9 * billions, rel=0.01
    )
    words = shape.vocab * shape.hidden  # cards count embedding and output, or neither
    weights = sum(
        tensor.all_rows * tensor.columns * (shape.top_k / shape.experts if "_exps" in tensor.name else 1)
        for tensor in tensors
    )
    assert 0.9 * (weights - 2 * words) < 1e9 * of_a_token < 1.05 * weights


FAMILIES_OF_SHAPES = {
    "GptOssForCausalLM": replace(TINY, architecture="gpt-oss", window=8),
    "Qwen3NextForCausalLM": replace(
        TINY, architecture="qwen3next", layers=4, rotary=16, shared=64, delta=DeltaShape(2, 4, 64)
    ),
    "Qwen3_5MoeForCausalLM": replace(
        TINY, architecture="qwen35moe", layers=4, rotary=16, shared=64, delta=DeltaShape(2, 4, 64)
    ),
    "Glm4MoeForCausalLM": replace(
        TINY, architecture="glm4moe", rotary=32, shared=256, dense_layers=1, dense=512
    ),
    "DeepseekV3ForCausalLM": replace(
        TINY, architecture="deepseek2", shared=256, dense_layers=1, dense=512, groups=4,
        latent=LatentShape(64, 64, 32, 32, 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES_OF_SHAPES)
def test_a_shape_of_a_family_is_a_whole_model_of_it(tmp_path: Path, name: str) -> None:
    shape = FAMILIES_OF_SHAPES[name]
    gguf_model.write_model(tmp_path / "m.gguf", shape, "mxfp4")
    files = open_model_files(tmp_path / "m.gguf")
    assert files.config.architecture == name
    assert set(files.expert_formats()) == {("mxfp4",) * 3}
    unused = {*files.tensors} - {tensor for _, weights in files.parts() for tensor in weights.names}
    assert not unused
