"""Layouts of adapter files, each worked out by hand in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from twofold.adapters.adapter import Adapter
from twofold.adapters.base_shapes import BaseExperts, BaseShapes
from twofold.adapters.reading import read_adapter
from twofold.weights.tensor_spec import TensorSpec

from tests.adapters.adapter_files import (
    COUNT,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYER,
    MATRICES,
    PREFIX,
    SCALE,
    TOKENS,
    Tensors,
    base,
    changes,
    factors,
    flat,
    numbers,
    read,
    write,
)

Q = f"{LAYER}.self_attn.q_proj"
Array = npt.NDArray[np.float32]


def product(tensors: Tensors, module: str, scale: float = SCALE) -> Array:
    """B A of a module, scaled."""
    a, b = (tensors[f"{PREFIX}{module}.lora_{side}.weight"] for side in "AB")
    change: Array = np.float32(scale) * (b @ a)
    return change


def fused(adapter: Adapter, *, interleaved: bool = False) -> dict[str, Array]:
    """Changes of an adapter's experts, those of gate and up joined as a fused matrix has them."""
    found, joined = changes(adapter), {}
    for number in range(COUNT):
        gate, up, down = (found[f"{EXPERTS}.{number}.{part}_proj"] for part in ("gate", "up", "down"))
        both = np.stack([gate, up], 1).reshape(-1, HIDDEN) if interleaved else np.concatenate([gate, up])
        joined |= {f"{EXPERTS}.{number}.gate_up": both, f"{EXPERTS}.{number}.down": down}
    return joined


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_attention(tmp_path: Path) -> None:
    tensors = factors(Q, 8, HIDDEN)
    adapter = read(tmp_path / "style", tensors)
    assert_same(changes(adapter), {Q: product(tensors, Q)})
    assert (adapter.name, adapter.base_name, adapter.max_rank) == ("style", "org/base", 2)
    assert adapter.num_bytes == 4 * 2 * (8 + HIDDEN)
    assert not adapter.products[Q].b.flags.writeable


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"lora_alpha": 3}, 1.5),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"k_proj": 9, "q_proj": 1, "self_attn.q_proj": 7}}, 0.5),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.[qk]_proj": 6}}, 3.0),
        ({"alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 6, "q_proj": 1}}, 3.0),
        ({"alpha_pattern": {"attn.q_proj": 6}}, 2.0),
        ({"alpha_pattern": {r"attn\.[qk]_proj": 6}}, 2.0),
        ({"r": 5, "rank_pattern": {"q_proj": 2}}, 2.0),
        (
            {"r": 5, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 8}, "use_rslora": True},
            8 / 2**0.5,
        ),
    ],
)
def test_scale(tmp_path: Path, settings: dict[str, object], scale: float) -> None:
    tensors = factors(Q, 8, HIDDEN)
    np.testing.assert_allclose(
        changes(read(tmp_path, tensors, **settings))[Q], product(tensors, Q, scale), rtol=1e-6
    )


@pytest.mark.parametrize(
    "theirs",
    [
        Q,
        "layers.0.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.q_proj",
        "thinker.model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.orig_module.q_proj",
    ],
)
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_names_of_other_programs(tmp_path: Path, theirs: str, prefix: str) -> None:
    tensors = factors(Q, 8, HIDDEN)
    renamed = {name.replace(f"{PREFIX}{Q}", f"{prefix}{theirs}"): values for name, values in tensors.items()}
    model = BaseShapes(MATRICES, renamed=(("thinker.", ""),))
    assert_same(changes(read(tmp_path, renamed, model)), {Q: product(tensors, Q)})


def test_name_of_the_adapter_in_names(tmp_path: Path) -> None:
    tensors = factors(Q, 8, HIDDEN)
    named = {name.replace(".weight", ".default.weight"): values for name, values in tensors.items()}
    assert_same(changes(read(tmp_path, named)), {Q: product(tensors, Q)})


def test_floats_of_16_bits_are_read_exactly(tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(values) for name, values in factors(Q, 8, HIDDEN).items()}
    write(tmp_path, {})
    for dtype in (torch.bfloat16, torch.float16):
        save_file(
            {name: values.to(dtype) for name, values in tensors.items()},
            tmp_path / "adapter_model.safetensors",
        )
        assert_same(changes(read_adapter(tmp_path, base())), {Q: product(factors(Q, 8, HIDDEN), Q)})


def test_embedding(tmp_path: Path) -> None:
    a, b = numbers(2, TOKENS), numbers(HIDDEN, 2, seed=1)
    name = f"{PREFIX}model.embed_tokens.lora_embedding_"
    assert_same(
        changes(read(tmp_path, {f"{name}A": a, f"{name}B": b})), {"model.embed_tokens": SCALE * (b @ a).T}
    )


@pytest.mark.parametrize("suffix", ["", ".modules_to_save", ".modules_to_save.default", ".base_layer"])
def test_whole_embedding_and_head(tmp_path: Path, suffix: str) -> None:
    embedding, head = numbers(TOKENS, HIDDEN), numbers(TOKENS, HIDDEN, seed=1)
    tensors = {
        f"{PREFIX}model.embed_tokens{suffix}.weight": embedding,
        f"{PREFIX}lm_head{suffix}.weight": head,
    }
    adapter = read(tmp_path, tensors)
    assert not adapter.products
    assert_same(dict(adapter.replaced), {"model.embed_tokens": embedding, "lm_head": head})
    assert adapter.num_bytes == 2 * 4 * TOKENS * HIDDEN


@pytest.mark.parametrize(
    "names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids=["projections", "w1"]
)
def test_experts_one_by_one(tmp_path: Path, names: tuple[str, str, str]) -> None:
    tensors: Tensors = {}
    expected = {}
    for number, name, part, rows, columns in (
        (0, names[0], "gate_proj", INNER, HIDDEN),
        (2, names[1], "up_proj", INNER, HIDDEN),
        (2, names[2], "down_proj", HIDDEN, INNER),
    ):
        module = f"{EXPERTS}.{number}.{name}"
        tensors |= factors(module, rows, columns)
        expected[f"{EXPERTS}.{number}.{part}"] = product(tensors, module)
    assert_same(changes(read(tmp_path, tensors)), expected)


def test_experts_of_a_module_that_transformers_renames(tmp_path: Path) -> None:
    ours = "model.layers.0.block_sparse_moe.experts"
    module = f"{EXPERTS}.1.w2"
    tensors = factors(module, HIDDEN, INNER)
    model = BaseShapes({}, {ours: BaseExperts(COUNT, HIDDEN, INNER)})
    assert_same(changes(read(tmp_path, tensors, model)), {f"{ours}.1.down_proj": product(tensors, module)})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_flat_experts(tmp_path: Path, interleaved: bool, swapped: bool) -> None:
    tensors, expected = flat(swapped=swapped)
    adapter = read(tmp_path, tensors, base(interleaved=interleaved))
    assert_same(fused(adapter, interleaved=interleaved), expected)
    assert adapter.num_bytes <= 4 * sum(values.size for values in tensors.values())


def test_patterns_name_the_parameter_of_flat_experts(tmp_path: Path) -> None:
    tensors, expected = flat()
    alphas = {"experts.gate_up_proj": 2, "down_proj": 8}
    found = fused(read(tmp_path, tensors, alpha_pattern=alphas))
    assert_same(
        found, {name: values / 2 if "gate_up" in name else values * 2 for name, values in expected.items()}
    )


def test_flat_experts_may_be_nested_in_any_order(tmp_path: Path) -> None:
    tensors, expected = flat()
    other = {
        name.replace("base_layer.", "")
        if "base_layer" in name
        else name.replace("lora_", "base_layer.lora_"): values
        for name, values in tensors.items()
    }
    assert_same(fused(read(tmp_path, other)), expected)


@pytest.mark.parametrize("version", [None, "0.18.1", "0.19.0", "0.21.2"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_pair_that_is_not_square_decides_for_all(
    tmp_path: Path, version: str | None, swapped: bool
) -> None:
    tensors, expected = flat(inner=HIDDEN, swapped=swapped)
    adapter = read(tmp_path, tensors, base(inner=HIDDEN, transposed=True), peft_version=version)
    assert_same(fused(adapter), expected)


@pytest.mark.parametrize(
    ("version", "transposed", "swapped"),
    [("0.18.1", False, True), ("0.19.0", False, True), ("0.19.1", False, False), ("0.21.2", False, False),
     ("0.17.0", True, False)],
)  # fmt: skip
def test_version_decides_about_square_pairs_alone(
    tmp_path: Path, version: str, transposed: bool, swapped: bool
) -> None:
    tensors, expected = flat(inner=HIDDEN // 2, swapped=swapped)
    gate_up = {name: values for name, values in tensors.items() if "base_layer" in name}
    adapter = read(tmp_path, gate_up, base(inner=HIDDEN // 2, transposed=transposed), peft_version=version)
    found = changes(adapter)
    for number in range(COUNT):
        both = np.concatenate([found[f"{EXPERTS}.{number}.{part}_proj"] for part in ("gate", "up")])
        np.testing.assert_array_equal(both, expected[f"{EXPERTS}.{number}.gate_up"])


@pytest.mark.parametrize("by_expert", [False, True])
def test_columns_of_unsloth(tmp_path: Path, by_expert: bool) -> None:
    tensors, expected = flat(columns_by_expert=by_expert)
    layout = "grouped_by_expert" if by_expert else "rank_major"
    adapter = read(tmp_path, tensors, lora_B_layout=layout, auto_mapping={"unsloth_fixed": True})
    assert_same(fused(adapter), expected)


@pytest.mark.parametrize(
    "names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids=["projections", "w1"]
)
def test_shared_outer_factors(tmp_path: Path, names: tuple[str, str, str]) -> None:
    """SGLang's: one A of gate and up, and one B of down, for all experts."""
    tensors: Tensors = {}
    expected = {}
    for name, part, rows, columns in (
        (names[0], "gate_proj", INNER, HIDDEN),
        (names[1], "up_proj", INNER, HIDDEN),
        (names[2], "down_proj", HIDDEN, INNER),
    ):
        is_down = part == "down_proj"
        a = numbers(COUNT if is_down else 1, 2, columns, seed=len(tensors))
        b = numbers(1 if is_down else COUNT, rows, 2, seed=len(tensors) + 1)
        tensors |= {
            f"{PREFIX}{EXPERTS}.{name}.lora_A.weight": a,
            f"{PREFIX}{EXPERTS}.{name}.lora_B.weight": b,
        }
        for number in range(COUNT):
            change = SCALE * (b[0 if is_down else number] @ a[number if is_down else 0])
            expected[f"{EXPERTS}.{number}.{part}"] = change
    adapter = read(tmp_path, tensors)
    assert_same(changes(adapter), expected)
    assert adapter.num_bytes == sum(values.nbytes for values in tensors.values())


def test_shared_factor_beside_factors_one_by_one(tmp_path: Path) -> None:
    shared = numbers(1, 2, HIDDEN)
    tensors: Tensors = {f"{PREFIX}{EXPERTS}.up_proj.lora_A.weight": shared}
    expected = {}
    for number in range(COUNT):
        b = numbers(INNER, 2, seed=number)
        tensors[f"{PREFIX}{EXPERTS}.{number}.up_proj.lora_B.weight"] = b
        expected[f"{EXPERTS}.{number}.up_proj"] = SCALE * (b @ shared[0])
    assert_same(changes(read(tmp_path, tensors)), expected)


def test_stacked_gate_and_up(tmp_path: Path) -> None:
    a, b = numbers(COUNT, 2, HIDDEN), numbers(COUNT, 2 * INNER, 2, seed=1)
    name = f"{PREFIX}{EXPERTS}.gate_up_proj.lora_"
    found = changes(read(tmp_path, {f"{name}A.weight": a, f"{name}B.weight": b}))
    for number in range(COUNT):
        both = np.concatenate([found[f"{EXPERTS}.{number}.{part}_proj"] for part in ("gate", "up")])
        np.testing.assert_array_equal(both, SCALE * (b[number] @ a[number]))


def test_digest_changes_with_every_file(tmp_path: Path) -> None:
    tensors = factors(Q, 8, HIDDEN)
    first = read(tmp_path / "a", tensors).digest
    assert len(first) == 64
    assert read(tmp_path / "b", tensors).digest == first
    assert read(tmp_path / "c", tensors, lora_alpha=5).digest != first
    assert read(tmp_path / "d", {name: values + 1 for name, values in tensors.items()}).digest != first


def test_base_from_specs_of_its_tensors() -> None:
    specs = [
        TensorSpec(
            "model.layers.0.self_attn.q_proj.weight", (8, 6), "matrix", "blk.0.attn_q.weight", None, 4
        ),
        TensorSpec("model.layers.0.input_layernorm.weight", (6,), "exact", "blk.0.attn_norm.weight"),
        TensorSpec(f"{EXPERTS}.0.gate_proj.weight", (4, 6), "matrix", "blk.0.ffn_gate.0.weight"),
        TensorSpec(f"{EXPERTS}.gate_up_proj", (3, 8, 6), "matrix", ""),
    ]
    model = BaseShapes.of_specs(specs, {EXPERTS: BaseExperts(COUNT, HIDDEN, INNER)})
    assert dict(model.matrices) == {Q: (8, 6)}
    assert model.shape_of(f"{EXPERTS}.2.down_proj") == (HIDDEN, INNER)
    assert model.shape_of(f"{EXPERTS}.3.down_proj") is None
    assert model.shape_of(f"{EXPERTS}.gate_up_proj") is None
    (q,) = model.gguf["blk.0.attn_q.weight"]
    assert (q.name, q.heads) == (Q, 4)
