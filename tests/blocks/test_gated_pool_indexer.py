"""Latent attention with an indexer of pools against transformers' GLM-5.3-Flash."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention
from twofold.blocks import ops
from twofold.blocks.attention.gated_pool_indexer import GatedPoolIndexer
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import Chosen
from twofold.blocks.block import Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.mla import Mla
from twofold.weights.checkpoint import Checkpoint

from tests.models.transformers_runs import lower_entries_first
from tests.tiny_models.writing import write_safetensors

HIDDEN, TOKENS, PAGE_SIZE, EPS = 30, 41, 3, 1e-5
F32 = NDArray[np.float32]


def attention(pooled: int, most_pools: int) -> Mla:
    indexer = GatedPoolIndexer(3, 12, pooled=pooled, most_pools=most_pools, rank=14, eps=EPS, rank_eps=EPS)
    return Mla(
        0,
        HIDDEN,
        num_heads=4,
        q_lora_rank=14,
        kv_lora_rank=16,
        qk_nope_head_dim=10,
        qk_rope_head_dim=0,
        v_head_dim=6,
        eps=EPS,
        scores=Scores(10**-0.5),
        rotation=None,
        latent_eps=EPS,
        select=Chosen(indexer.most, indexer),
    )


def of_transformers(block: Mla, tensors: dict[str, F32], rows: F32) -> F32:
    assert isinstance(block.select, Chosen)
    indexer = block.select.chooser
    assert isinstance(indexer, GatedPoolIndexer)
    config = Glm5NextTextConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=14,
        kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=0, v_head_dim=6, rms_norm_eps=EPS, index_n_heads=3,
        index_head_dim=12, index_topk=indexer.most_pools * indexer.pooled, index_kpool=indexer.pooled,
        layer_types=["full_attention"], indexer_types=["full"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = Glm5NextTextAttention(config, 0).eval()
    prefix = "model.layers.0.self_attn."
    module.load_state_dict(
        {
            name.removeprefix(prefix): torch.from_numpy(each)
            for name, each in tensors.items()
            if prefix in name
        }
    )
    norm = torch.from_numpy(tensors["model.layers.0.input_layernorm.weight"])
    normed = torch.nn.functional.rms_norm(torch.from_numpy(rows), (HIDDEN,), norm, EPS)
    with torch.no_grad(), lower_entries_first():
        output = module(normed[None], attention_mask=torch.ones(1, len(rows), dtype=torch.bool))[0]
    return np.asarray(output[0].numpy())


@pytest.mark.parametrize(("pooled", "most_pools"), [(4, 3), (16, 1), (2, 7), (1, 5)])
def test_attention_over_pools_equals_transformers_however_a_prompt_is_cut(
    tmp_path: Path, pooled: int, most_pools: int
) -> None:
    block, rng = attention(pooled, most_pools), np.random.default_rng(pooled)
    specs = block.tensors(lambda spec: False)
    tensors = {
        spec.name: rng.normal("norm" in spec.name, spec.shape[-1] ** -0.5, spec.shape).astype(np.float32)
        for spec in specs.values()
    }
    write_safetensors(tmp_path / "model.safetensors", tensors, "float32")
    weights, threads = BlockWeights(Checkpoint.open(tmp_path), specs), ops.ThreadPool(2)
    decoder = ops.Decoder([block.cpu(weights, threads, 0)])
    planes = [(kept.planes, kept.elements, "float32") for kept in block.state if isinstance(kept, Pages)]
    pages = rng.permutation(-(-TOKENS // PAGE_SIZE)).astype(np.int32)[None]
    given = rng.standard_normal((TOKENS, HIDDEN)).astype(np.float32)

    def computed(*chunks: int) -> F32:
        cache, rows, begin = ops.StateCache([planes], pages.size, PAGE_SIZE), given.copy(), 0
        for count in chunks:
            places = np.arange(begin, begin + count, dtype=np.int32)
            angles = np.zeros((2, count, 1), np.float32)
            batch = ops.AttentionBatch(places, np.zeros(count, np.int32), pages, *angles)
            part = rows[begin : begin + count].copy()
            decoder.forward(part, batch, cache)
            rows[begin : begin + count] = part
            begin += count
        return rows - given

    whole = computed(TOKENS)
    expected = of_transformers(block, tensors, given)
    np.testing.assert_allclose(whole, expected, atol=2e-5 * float(np.abs(expected).max()))
    for chunks in ((1,) * TOKENS, (7, 1, 20, 13)):
        np.testing.assert_array_equal(computed(*chunks), whole)
