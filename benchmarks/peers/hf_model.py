"""The BF16 GGUF file of a random model as a directory that transformers loads: the same bytes, other names."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.peers.shapes import FullShape

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERT_NAMES: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_directory(gguf_path: Path, shape: FullShape, directory: Path) -> None:
    """config.json and model.safetensors, streamed from the mapped file. ValueError if a matrix is not BF16."""
    import gguf

    directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(gguf_path)
    header: dict[str, Any] = {}
    offset = 0
    for tensor in reader.tensors:
        for name, lengths, num_bytes in _parts(tensor):
            header[name] = {"dtype": "BF16", "shape": lengths, "data_offsets": [offset, offset + num_bytes]}
            offset += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = directory / "model.safetensors.part"
    try:
        with part.open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor in reader.tensors:
                for piece in _bf16_pieces(tensor):
                    out.write(piece.tobytes())
        part.replace(directory / "model.safetensors")
    finally:
        part.unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(shape), indent=1), encoding="utf-8")


def config_of(shape: FullShape) -> dict[str, Any]:
    """Contents of config.json for this shape."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_base,
        "rms_norm_eps": shape.norm_eps,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": shape.vocab - 1,
    }


def _parts(tensor: Any) -> Iterator[tuple[str, list[int], int]]:
    """The names, shapes and bytes that a GGUF tensor becomes; a stack of experts becomes one for each."""
    lengths = [int(length) for length in reversed(tensor.shape)]
    names = _names(str(tensor.name), lengths)
    if len(names) > 1 or len(lengths) == 3:
        lengths = lengths[1:]
    num_bytes = 2 * int(np.prod(lengths))
    for name in names:
        yield name, lengths, num_bytes


def _names(name: str, lengths: list[int]) -> list[str]:
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return [_TOP_NAMES[stem] + ".weight"]
    _, layer, part = stem.split(".")
    if part in _LAYER_NAMES:
        return [f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"]
    matrix = _EXPERT_NAMES[part]
    return [f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight" for expert in range(lengths[0])]


def _bf16_pieces(tensor: Any) -> Iterator[npt.NDArray[np.uint16]]:
    """Expert by expert; F32 (norms, routers) is cut to bfloat16."""
    kind = tensor.tensor_type.name
    if kind == "BF16":
        data = tensor.data.view(np.uint16)
        yield from data if data.ndim == 3 else (data,)
    elif kind == "F32":
        yield (np.ascontiguousarray(tensor.data).view(np.uint32) >> 16).astype(np.uint16)
    else:
        raise ValueError(f"{tensor.name} is {kind}; transformers is compared on BF16 files only")
