"""Tiny random models in Hugging Face layout, for tests of Twofold and of others that build on it.

`write_tiny_model` makes a complete directory (config, weights, tokenizer with a ChatML template) in milliseconds that
both Twofold and transformers load. The weights are random, but scaled so that every part of the forward pass shows in
the logits. Nothing here is used to serve a model.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from twofold.weights.tensor_spec import TensorSpec
from twofold.weights.weight_format import WeightMatrix

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

CHATML_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MLP: Final = r"\.mlp\.(gate\.|experts\.gate_up)"
BLOCK_SPARSE_MOE: Final = r"block_sparse_moe\.(gate\.|experts\.\d+\.w)"
"""Names of Mixtral's mixture, fused or as it was published."""
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES: Final = (
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "and"),
    ("in", "g"),
)
_DTYPE_NAMES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class TinyModel:
    """Model to write. The defaults are a small Qwen3-MoE; every field is one corner of the configuration."""

    architecture: str = "Qwen3MoeForCausalLM"
    """Or "MixtralForCausalLM"; other families have classes of their own."""
    hidden_size: int = 48
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    """Need not be hidden_size / num_heads."""
    vocab_size: int = 320
    intermediate_size: int = 64
    """Intermediate size of dense layers (Qwen3-MoE only)."""
    moe_intermediate_size: int = 24
    num_experts: int = 8
    top_k: int = 2
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    max_position_embeddings: int = 256
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    """E.g. {"rope_type": "linear", "factor": 4.0}."""
    rope_form: Literal["rope_parameters", "rope_scaling"] = "rope_parameters"
    """transformers 5's name for it, or the older one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    num_shards: int = 1
    """More than one: shards with an index."""
    expert_layout: Literal["separate", "fused"] = "separate"
    """One set of tensors per expert, or all experts of a layer in two."""
    seed: int = 0

    def is_moe_layer(self, layer: int) -> bool:
        if self.architecture == "MixtralForCausalLM":
            return True
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def has_experts(self) -> bool:
        return True

    def is_stored(self, spec: TensorSpec) -> bool:
        """Whether a checkpoint has this one of several possible tensors."""
        if self.architecture != "MixtralForCausalLM":
            pattern = "experts.gate_up_proj" if self.expert_layout == "fused" else r"\.experts\.\d"
            return re.search(pattern, spec.name) is not None
        pattern = MLP if self.expert_layout == "fused" else BLOCK_SPARSE_MOE
        return re.search(pattern, spec.name) is not None

    def written(self, weights: dict[str, F32]) -> dict[str, Array]:
        """`weights` as the checkpoint has them: floats, and bytes of what is quantised."""
        return dict(weights)

    def all_chosen(self) -> TinyModel:
        """The same model, of which a token goes to all experts there are: rounding chooses no others."""
        return replace(self, top_k=self.num_experts)

    @property
    def num_gguf_layers(self) -> int:
        """Layers in a GGUF file."""
        return self.num_layers

    @property
    def gguf_architecture(self) -> str:
        return "llama" if self.architecture == "MixtralForCausalLM" else "qwen3moe"

    @property
    def twin(self) -> TinyModel:
        """The same model in the form of transformers' text models and GGUF files."""
        return self

    @property
    def fits_gguf(self) -> bool:
        """Whether a GGUF file, as written here, can express the whole model."""
        return self.rope_scaling is None and not self.sliding_window

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return _config(self)

    def weights(self) -> dict[str, F32]:
        """Every tensor by name, random but always the same for the same model."""
        return _weights(self)


def write_tiny_model(directory: str | Path, model: TinyModel | None = None) -> Path:
    """Write config.json, generation_config.json, weights and tokenizer into `directory` (made if missing)."""
    model = model or TinyModel()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", tiny_config(model))
    _write_json(
        directory / "generation_config.json", {"eos_token_id": [2, 0], "temperature": 0.7, "top_p": 0.9}
    )
    weights = model.written(tiny_weights(model))
    write_weights(directory, weights, dtype=model.dtype, num_shards=model.num_shards)
    write_tiny_tokenizer(directory)
    return directory


def tiny_config(model: TinyModel) -> dict[str, Any]:
    """The contents of config.json."""
    return model.config()


def tiny_weights(model: TinyModel) -> dict[str, F32]:
    """Every tensor by name, random but always the same for the same `model`."""
    return model.weights()


def _config(model: TinyModel) -> dict[str, Any]:
    rope: dict[str, Any] = dict(model.rope_scaling or {"rope_type": "default"})
    config: dict[str, Any] = {
        "architectures": [model.architecture],
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "num_experts_per_tok": model.top_k,
        "tie_word_embeddings": model.tie_word_embeddings,
        "max_position_embeddings": model.max_position_embeddings,
        "sliding_window": model.sliding_window,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": model.dtype,
    }
    if model.rope_form == "rope_parameters":
        config["rope_parameters"] = {**rope, "rope_theta": model.rope_theta}
    else:
        config["rope_theta"] = model.rope_theta
        config["rope_scaling"] = None if model.rope_scaling is None else rope
    if model.architecture == "MixtralForCausalLM":
        return config | {
            "model_type": "mixtral",
            "intermediate_size": model.moe_intermediate_size,
            "num_local_experts": model.num_experts,
        }
    return config | {
        "model_type": "qwen3_moe",
        "intermediate_size": model.intermediate_size,
        "moe_intermediate_size": model.moe_intermediate_size,
        "num_experts": model.num_experts,
        "norm_topk_prob": model.norm_topk_prob,
        "mlp_only_layers": list(model.mlp_only_layers),
        "decoder_sparse_step": model.decoder_sparse_step,
        "attention_bias": model.attention_bias,
        "use_sliding_window": model.sliding_window is not None,
    }


def _weights(model: TinyModel) -> dict[str, F32]:
    found: dict[str, F32] = {}
    hidden = model.hidden_size

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        found[name] = drawn(model.seed, name, (rows, columns), spread=gain / columns**0.5)

    def vector(name: str, size: int, mean: float) -> None:
        found[name] = drawn(model.seed, name, (size,), spread=0.2, mean=mean)

    matrix("model.embed_tokens.weight", model.vocab_size, hidden, hidden**0.5)
    q_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}"
        vector(f"{prefix}.input_layernorm.weight", hidden, 1.0)
        vector(f"{prefix}.post_attention_layernorm.weight", hidden, 1.0)
        sizes = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
        for name, (rows, columns) in sizes.items():
            matrix(f"{prefix}.self_attn.{name}_proj.weight", rows, columns)
            if model.attention_bias:
                vector(f"{prefix}.self_attn.{name}_proj.bias", rows, 0.0)
        if model.architecture == "Qwen3MoeForCausalLM":
            vector(f"{prefix}.self_attn.q_norm.weight", model.head_dim, 1.0)
            vector(f"{prefix}.self_attn.k_norm.weight", model.head_dim, 1.0)
        if model.is_moe_layer(layer):
            _add_experts(model, prefix, found)
            continue
        wide = model.intermediate_size
        for name, (rows, columns) in {
            "gate": (wide, hidden),
            "up": (wide, hidden),
            "down": (hidden, wide),
        }.items():
            matrix(f"{prefix}.mlp.{name}_proj.weight", rows, columns)
    vector("model.norm.weight", hidden, 1.0)
    if not model.tie_word_embeddings:
        matrix("lm_head.weight", model.vocab_size, hidden, 2.0)
    return found


def drawn(seed: int, name: str, shape: tuple[int, ...], *, spread: float, mean: float = 0.0) -> F32:
    """Normal values of the tensor `name`, whatever other tensors a model has and in which order."""
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    return rng.normal(mean, spread, shape).astype(np.float32)


def write_weights(
    directory: Path, weights: Mapping[str, Array], *, dtype: str = "float32", num_shards: int = 1
) -> None:
    """Write `weights` as model.safetensors, or as shards with an index, in `dtype`."""
    names = list(weights)
    if num_shards == 1:
        write_safetensors(directory / "model.safetensors", weights, dtype)
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard::num_shards]
        write_safetensors(directory / file, {name: weights[name] for name in part}, dtype)
        weight_map |= dict.fromkeys(part, file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_safetensors(file: Path, tensors: Mapping[str, Array], dtype: str) -> None:
    """One safetensors file (numpy cannot name bfloat16, so the format's few bytes are written here).

    uint8 tensors are written as they are, as F8_E4M3; blocks and scales of MXFP4 as U8.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = _to_bytes(tensor, dtype)
        offsets = [len(data), len(data) + len(raw)]
        bytes_ = "U8" if name.endswith(("_blocks", "_scales")) else "F8_E4M3"
        kind = bytes_ if tensor.dtype == np.uint8 else _DTYPE_NAMES[dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def to_bfloat16(values: F32) -> npt.NDArray[np.uint16]:
    """bfloat16 bits of finite `values`, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def weight_matrix(values: Array) -> WeightMatrix:
    """Plain values [rows, columns] as a source matrix: float32 as f32, float16 as f16, uint16 as bf16's bits."""
    formats = {"float32": "f32", "float16": "f16", "uint16": "bf16"}
    data = values.view(np.uint16) if values.dtype == np.float16 else values
    return WeightMatrix(data, formats[str(values.dtype)], values.shape[1])


def write_tiny_tokenizer(directory: str | Path, *, chat_template: str = CHATML_TEMPLATE) -> None:
    """A byte-level BPE tokenizer of 267 tokens (ids 0-2: the special tokens) with `chat_template`."""
    directory = Path(directory)
    symbols = [
        *SPECIAL_TOKENS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(merge) for merge in _MERGES),
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(symbols)}, merges=list(_MERGES))
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": chat_template,
        },
    )


def _add_experts(model: TinyModel, prefix: str, weights: dict[str, F32]) -> None:
    mixtral = model.architecture == "MixtralForCausalLM"
    fused = model.expert_layout == "fused"
    block = f"{prefix}.block_sparse_moe" if mixtral and not fused else f"{prefix}.mlp"
    hidden, inner, num_experts = model.hidden_size, model.moe_intermediate_size, model.num_experts

    def matrices(part: str, *shape: int, gain: float = 1.5) -> F32:
        return drawn(model.seed, f"{prefix}.mlp.{part}", shape, spread=gain / shape[-1] ** 0.5)

    weights[f"{block}.gate.weight"] = matrices("gate.weight", num_experts, hidden, gain=2.0)
    gate = matrices("experts.gate", num_experts, inner, hidden)
    up = matrices("experts.up", num_experts, inner, hidden)
    down = matrices("experts.down", num_experts, hidden, inner)
    if fused:
        weights[f"{block}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        weights[f"{block}.experts.down_proj"] = down
        return
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for expert in range(num_experts):
        for name, part in zip(names, (gate, up, down), strict=True):
            weights[f"{block}.experts.{expert}.{name}.weight"] = part[expert]


def _to_bytes(tensor: Array, dtype: str) -> bytes:
    if tensor.dtype == np.uint8:
        return tensor.tobytes()
    if dtype == "bfloat16":
        return to_bfloat16(tensor).tobytes()
    return np.ascontiguousarray(tensor, np.float16 if dtype == "float16" else np.float32).tobytes()


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
