"""llama.cpp's GGUF adapters: the changes that are read are those that llama.cpp adds to a model's GGUF file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from twofold.adapters.base_shapes import BaseExperts, BaseShapes, GgufMatrix
from twofold.adapters.reading import read_adapter
from twofold.api.errors import ModelLoadError
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.step.adapters import shapes_of
from twofold.weights.gguf_file import GgufFile

from tests.adapters.adapter_files import (
    COUNT,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYER,
    MATRICES,
    TOKENS,
    changes,
    numbers,
)
from tests.adapters.gguf_files import write_gguf_adapter
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel

Q = f"{LAYER}.self_attn.q_proj"
BASE = BaseShapes(
    MATRICES,
    {EXPERTS: BaseExperts(COUNT, HIDDEN, INNER)},
    gguf={
        "blk.0.attn_q.weight": (GgufMatrix(Q),),
        "token_embd.weight": (GgufMatrix("model.embed_tokens"),),
        "output.weight": (GgufMatrix("lm_head"),),
    },
    architecture="qwen3moe",
)
MODELS = {
    "qwen3moe": TinyModel(),
    "llama": TinyModel(architecture="MixtralForCausalLM"),
    "qwen2moe": EXAMPLES["qwen2_moe"],
    "deepseek2": EXAMPLES["deepseek_v3"],
    "gpt-oss": EXAMPLES["gpt_oss"],
    "qwen3next": EXAMPLES["qwen3_next"],
}


def pair(name: str, rows: int, columns: int, *stack: int) -> dict[str, npt.NDArray[np.float32]]:
    return {f"{name}.lora_a": numbers(*stack, 2, columns), f"{name}.lora_b": numbers(*stack, rows, 2, seed=1)}


def merge(path: Path, adapter: dict[str, npt.NDArray[np.float32]], scale: float) -> None:
    """Add B A to each tensor of a GGUF file in place, as llama.cpp computes it."""
    for name, tensor in GgufFile.open(path).tensors.items():
        if f"{name}.lora_a" not in adapter:
            continue
        a, b = adapter[f"{name}.lora_a"], adapter[f"{name}.lora_b"]
        change = (b @ a.T).T if name == "token_embd.weight" else b @ a
        values = np.memmap(path, np.float32, "r+", tensor.offset, tensor.shape)
        values += (np.float32(scale) * change).reshape(values.shape)
        values.flush()


@pytest.mark.parametrize("architecture", MODELS)
def test_changes_are_those_of_the_model_s_file(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_gguf(tmp_path / "base.gguf", MODELS[architecture])
    files = open_model_files(path)
    base = replace(shapes_of(files), architecture=architecture)
    adapter: dict[str, npt.NDArray[np.float32]] = {}
    random = np.random.default_rng(5)
    for name, tensor in GgufFile.open(path).tensors.items():
        routed = "_exps.weight" in name and base.experts_of_layer(
            int(name.split(".")[1])
        )  # not in the MTP layer
        if name not in base.gguf and not routed:
            continue
        *stack, rows, columns = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        adapter[f"{name}.lora_a"] = random.standard_normal((*stack, 3, columns), np.float32)
        adapter[f"{name}.lora_b"] = random.standard_normal((*stack, rows, 3), np.float32)
        if name == "token_embd.weight":
            adapter[f"{name}.lora_a"] = random.standard_normal((rows, 3), np.float32)
            adapter[f"{name}.lora_b"] = random.standard_normal((columns, 3), np.float32)
    found = read_adapter(
        write_gguf_adapter(tmp_path / "style.gguf", adapter, architecture=architecture, alpha=6), base
    )
    assert found.name == "style"
    assert len(found.products) >= len(base.gguf)
    merged_path = Path(shutil.copy(path, tmp_path / "merged.gguf"))
    merge(merged_path, adapter, scale=2.0)
    merged = open_model_files(merged_path)
    for name, product in found.products.items():
        change = product.b @ product.a
        before, after = (stored(model, name, base) for model in (files, merged))
        np.testing.assert_allclose(before + change, after, atol=1e-4, err_msg=name)


def stored(files: ModelFiles, name: str, base: BaseShapes) -> npt.NDArray[np.float32]:
    """Weights of a matrix as the model's reader gives them."""
    if name in base.matrices:
        return files.tensors.vector(f"{name}.weight", base.matrices[name])
    module, number, part = name.rsplit(".", 2)
    facts = base.experts[module]
    stack = files.tensors.vector(f"{module}.{part}", (facts.num_experts, *facts.shape(part)))
    values: npt.NDArray[np.float32] = stack[int(number)]
    return values


def test_every_kind_of_matrix(tmp_path: Path) -> None:
    embedding = {
        f"token_embd.weight.lora_{side}": numbers(size, 2) for side, size in (("a", TOKENS), ("b", HIDDEN))
    }
    tensors = embedding | pair("blk.0.attn_q.weight", 8, HIDDEN) | pair("output.weight", TOKENS, HIDDEN)
    tensors |= pair("blk.0.ffn_down_exps.weight", HIDDEN, INNER, COUNT)
    tensors |= pair("blk.0.ffn_gate.1.weight", INNER, HIDDEN)
    found = changes(read_adapter(write_gguf_adapter(tmp_path / "a.gguf", tensors), BASE))
    expected = {
        Q: "blk.0.attn_q.weight",
        "lm_head": "output.weight",
        f"{EXPERTS}.1.gate_proj": "blk.0.ffn_gate.1.weight",
    }
    for key, name in expected.items():
        np.testing.assert_array_equal(found[key], 2 * (tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]))
    both = embedding["token_embd.weight.lora_a"] @ embedding["token_embd.weight.lora_b"].T
    np.testing.assert_array_equal(found["model.embed_tokens"], 2 * both)
    down = tensors["blk.0.ffn_down_exps.weight.lora_b"] @ tensors["blk.0.ffn_down_exps.weight.lora_a"]
    for number in range(COUNT):
        np.testing.assert_array_equal(found[f"{EXPERTS}.{number}.down_proj"], 2 * down[number])


def test_several_matrices_in_one_tensor(tmp_path: Path) -> None:
    k, name = Q.replace("q_proj", "k_proj"), "blk.0.attn_qkv.weight"
    parts = (GgufMatrix(Q, (0, 12), 2), GgufMatrix(k, (8, 12), 1))
    tensors = pair(name, 12, HIDDEN)
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors)
    found = changes(read_adapter(path, BaseShapes({Q: (8, HIDDEN), k: (4, HIDDEN)}, gguf={name: parts})))
    change = 2 * (tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"])
    np.testing.assert_array_equal(
        found[Q], change[[0, 2, 1, 3, 4, 6, 5, 7]]
    )  # adjacent rows were a pair of halves
    np.testing.assert_array_equal(found[k], change[[8, 10, 9, 11]])
    model = BaseShapes({Q: (8, HIDDEN)}, gguf={name: (GgufMatrix(Q, (0, 16), 2),)})
    with pytest.raises(ModelLoadError, match="has 12 rows, expected 16"):
        read_adapter(path, model)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_scale_of_one_without_alpha(tmp_path: Path, alpha: float | None) -> None:
    tensors = pair("blk.0.attn_q.weight", 8, HIDDEN)
    found = changes(read_adapter(write_gguf_adapter(tmp_path / "a.gguf", tensors, alpha=alpha), BASE))
    np.testing.assert_array_equal(found[Q], numbers(8, 2, seed=1) @ numbers(2, HIDDEN))


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0"])
def test_element_types(tmp_path: Path, type_name: str) -> None:
    base = BaseShapes({Q: (64, 96)}, gguf={"blk.0.attn_q.weight": (GgufMatrix(Q),)})
    a, b = numbers(32, 96), numbers(64, 32, seed=1)
    tensors = {"blk.0.attn_q.weight.lora_a": a, "blk.0.attn_q.weight.lora_b": b}
    path = write_gguf_adapter(tmp_path / "a.gguf", tensors, alpha=32, type_name=type_name)
    found = read_adapter(path, base).products[Q]
    kind = gguf.GGMLQuantizationType[type_name]
    for read, written in ((found.a, a), (found.b, b)):
        np.testing.assert_array_equal(read, gguf.dequantize(gguf.quantize(written, kind), kind))


NAME = "blk.0.attn_q.weight"
ONE = pair(NAME, 8, HIDDEN)
STACK = "blk.0.ffn_up_exps.weight"


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ({}, {}, "holds no tensors"),
        (ONE, {"architecture": "llama"}, "general.architecture is 'llama', expected 'qwen3moe'"),
        (ONE, {"type_name": "Q4_0"}, "is Q4_0, expected one of F32"),
        (ONE, {"alpha": -1.0}, "adapter.lora.alpha is -1.0"),
        (ONE, {"alpha": float("nan")}, "adapter.lora.alpha is nan"),
        (ONE, {"edit": lambda writer: writer.add_array("adapter.alora.invocation_tokens", [1])}, "alora"),
        (pair(NAME, 9, HIDDEN), {}, "[9, 6], but the model has [8, 6]"),
        (pair("blk.1.attn_q.weight", 8, HIDDEN), {}, "no matrix blk.1.attn_q.weight"),
        (pair("blk.1.ffn_up_exps.weight", INNER, HIDDEN, COUNT), {}, "layer 1 has no routed experts"),
        (pair(STACK, INNER, HIDDEN, 2), {}, "has shape [2, 2, 6], expected [3 or 1"),
        (
            pair(STACK, INNER, HIDDEN, COUNT) | pair(STACK.replace("0", "00"), INNER, HIDDEN, COUNT),
            {},
            "is also there as",
        ),
        ({"blk.0.attn_norm.weight": numbers(HIDDEN)}, {}, "is unknown; expected factors lora_a"),
        ({f"{NAME}.lora_a": numbers(2, HIDDEN)}, {}, "has no partner: factor B"),
        (ONE | {f"{NAME}.lora_b": np.full((8, 2), np.nan, np.float32)}, {}, "holds a NaN"),
    ],
)
def test_refused(tmp_path: Path, tensors: dict[str, Any], options: dict[str, Any], words: str) -> None:
    if options.get("type_name"):
        tensors = {name: np.zeros((32, 32), np.float32) for name in tensors}
    with pytest.raises(ModelLoadError, match=r"^[ -~]+$") as error:
        read_adapter(write_gguf_adapter(tmp_path / "a.gguf", tensors, **options), BASE)
    assert words in str(error.value)


def test_a_model_in_place_of_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"general\.type is 'None', expected 'adapter'"):
        read_adapter(write_tiny_gguf(tmp_path / "base.gguf"), BASE)


def test_rows_in_an_order_that_is_not_known(tmp_path: Path) -> None:
    files = open_model_files(write_tiny_gguf(tmp_path / "base.gguf", EXAMPLES["qwen3_next"]))
    base = replace(shapes_of(files), architecture="qwen3next")
    rows, columns = base.matrices["model.layers.0.linear_attn.out_proj"]
    path = write_gguf_adapter(
        tmp_path / "a.gguf", pair("blk.0.ssm_out.weight", rows, columns), architecture="qwen3next"
    )
    with pytest.raises(ModelLoadError, match=r"no matrix blk\.0\.ssm_out\.weight in known order"):
        read_adapter(path, base)


def test_a_tied_embedding_is_one_matrix_of_the_file(tmp_path: Path) -> None:
    tied = replace(TinyModel(), tie_word_embeddings=True)
    base = shapes_of(open_model_files(write_tiny_gguf(tmp_path / "base.gguf", tied)))
    assert [each.name for each in base.gguf["token_embd.weight"]] == ["model.embed_tokens"]
    assert "lm_head" in base.matrices
