"""What only DeepSeek-V2 and V3 have: kv_b absorbed in any format, split in GGUF files; layers without experts between.

Their configurations against transformers: test_model_forward. Against themselves and on a device: test_families.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.blocks import ops
from twofold.models.model_files import open_model_files

from tests.engine.model_runs import load, random_prompt
from tests.tiny_models.gguf import write_tiny_gguf
from tests.tiny_models.table import EXAMPLES, tiny
from tests.tiny_models.writing import write_tiny_model
from tests.weights.fp8_models import write_both

PROMPT = random_prompt(40)


@pytest.mark.parametrize("sizes", ["odd", "whole-blocks"])
def test_an_fp8_checkpoint_equals_its_dequantised_twin(tmp_path: Path, sizes: str) -> None:
    """With heads that scales of 128 x 128 weights divide, kv_b is absorbed as it is, else in float32."""
    model = tiny(
        "deepseek_v3",
        rope_scaling=None,
        hidden_size=160,
        moe_intermediate_size=144,
        kv_lora_rank=136,
        q_lora_rank=140,
        num_layers=2,
    )
    if sizes == "whole-blocks":
        model = model.changed(num_heads=2, qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=256)
    fp8, float32 = write_both(tmp_path, model)
    ours, twin = load(fp8), load(float32)
    prompt = random_prompt(20)
    got, expected = (run.logits(run.prefill(prompt)[1]) for run in (ours, twin))
    assert np.abs(expected).max() > 1
    assert np.abs(got - expected).max() < 1e-3
    assert ours.greedy(prompt, 12)[0] == twin.greedy(prompt, 12)[0]


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("split_kv", [True, False], ids=["k_b-v_b", "kv_b"])
def test_a_gguf_file_is_bit_equal_to_the_directory(tmp_path: Path, case: str, split_kv: bool) -> None:
    model = EXAMPLES[case]
    directory = load(write_tiny_model(tmp_path / "directory", model))
    file = load(write_tiny_gguf(tmp_path / "model.gguf", model, split_kv=split_kv))
    for ours in (file, directory):
        assert ours.model.config.max_context == directory.model.config.max_context
    np.testing.assert_array_equal(
        file.logits(file.prefill(PROMPT)[1]), directory.logits(directory.prefill(PROMPT)[1])
    )


def test_a_quantised_kv_b_is_absorbed_exactly(tmp_path: Path) -> None:
    """Q8_0 runs along the latents; the keys' part, which is multiplied across, becomes float32."""
    model = tiny(
        "deepseek_v2",
        rope_scaling=None,
        hidden_size=64,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        qk_rope_head_dim=32,
        n_shared_experts=2,
        moe_intermediate_size=32,
    )
    eight = write_tiny_gguf(
        tmp_path / "eight.gguf",
        model,
        split_kv=False,
        type_of=lambda name: "Q8_0" if "kv_b" in name else "F32",
    )
    files = open_model_files(eight)
    pool = ops.ThreadPool(1)
    for block, weights in files.layers[1]:
        if "kv_b" not in weights:
            continue
        whole = ops.dequantise(pool, weights.matrix("kv_b")).reshape(model.num_heads, 64, 32)
        keys, values = block.absorb.matrices(weights, pool)
        assert {part.format for part in keys} == {"f32"}
        assert {part.format for part in values} == {"q8_0"}
        for head, (k, v) in enumerate(zip(keys, values, strict=True)):
            np.testing.assert_array_equal(k.data.T, whole[head, :32])
            np.testing.assert_array_equal(ops.dequantise(pool, v), whole[head, 32:])
        packed = sum(ops.PackedMatrix(pool, parts).bytes for parts in (keys, values))
        others = sum(weights.packed_bytes(part) for part in weights.specs if part != "kv_b")
        assert block.host_bytes(weights) == others + packed
        return
    raise AssertionError("no block has a kv_b")


def test_moe_layer_freq_spaces_the_mixtures(tmp_path: Path) -> None:
    model = tiny("deepseek_v3", num_layers=6, moe_layer_freq=2)
    assert open_model_files(write_tiny_model(tmp_path, model)).config.moe_layers == (2, 4)
