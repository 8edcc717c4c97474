"""A GGUF file's metadata as a `ModelConfig`, for the architectures "qwen3moe" and "llama" (Mixtral and its kin).

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; a missing key means what it means to
llama.cpp. What no key says (which layers have experts, whether attention has biases, a tied head) is read off the
tensors there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.models.config import MAX_EXPERTS, MAX_LAYERS, GenerationDefaults, ModelConfig, RopeConfig
from twofold.weights.gguf_file import GgufFile
from twofold.weights.json_file import Fields

_SOFTMAX: Final = 1


@dataclass(frozen=True)
class GgufArchitecture:
    """How one GGUF architecture differs from the other."""

    class_name: str
    """Hugging Face's, under which `registry.py` knows it."""
    expert_size_keys: tuple[str, ...]
    """Where the experts' inner size is, first that is there."""
    qk_norm: bool
    default_theta: float
    rotates_neighbours: bool
    """Rows of q and k are stored so that rotation pairs neighbours (2i, 2i + 1), where Twofold pairs (i, i + d/2)."""


ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "qwen3moe": GgufArchitecture(
            "Qwen3MoeForCausalLM", ("expert_feed_forward_length",), True, 10_000.0, False
        ),
        "llama": GgufArchitecture(
            "MixtralForCausalLM",
            ("expert_feed_forward_length", "feed_forward_length"),
            False,
            10_000.0,
            True,
        ),
    }
)


def gguf_architecture(file: GgufFile) -> GgufArchitecture:
    """Raises ModelLoadError for an architecture that Twofold does not run."""
    name = file.fields.get("general.architecture")
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise ModelLoadError(
            f"{file.path}: general.architecture is {name!r}, expected one of {', '.join(ARCHITECTURES)}; choose a "
            "model of these"
        )
    return known


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """The validated configuration. Raises ModelLoadError naming the file and the key."""
    architecture = gguf_architecture(file)
    fields = _scalars(file)
    num_layers = fields.integer("block_count", maximum=MAX_LAYERS)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.error(
                key, fields.data[key], f"{head_dim} as attention.key_length, the only supported value"
            )
    if fields.integer("expert_gating_func", _SOFTMAX, minimum=0) not in (0, _SOFTMAX):
        raise fields.error("expert_gating_func", fields.data["expert_gating_func"], "1 (softmax)")
    if fields.number("expert_weights_scale", 1.0) not in (0.0, 1.0):  # 0: not scaled
        raise fields.error("expert_weights_scale", fields.data["expert_weights_scale"], "1.0")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(
            f"{file.path}: tensor token_embd.weight is missing or no matrix; the file is damaged, download it again"
        )
    moe_layers = tuple(
        layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors
    )
    max_positions = fields.integer("context_length")
    config = ModelConfig(
        architecture=architecture.class_name,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", above=True),
        intermediate_size=fields.integer("feed_forward_length") if len(moe_layers) < num_layers else 0,
        moe_intermediate_size=fields.integer(architecture.expert_size_keys),
        num_experts=fields.integer("expert_count", maximum=MAX_EXPERTS),
        top_k=fields.integer("expert_used_count"),
        norm_topk_prob=fields.boolean("expert_weights_norm", True),
        moe_layers=moe_layers,
        rope=_read_rope(file, fields, architecture.default_theta, head_dim, max_positions),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm=architecture.qk_norm,
        sliding_window=fields.optional_integer("attention.sliding_window") or None,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype="bfloat16",
        bos_token_id=_token_id(file, "tokenizer.ggml.bos_token_id"),
        pad_token_id=_token_id(file, "tokenizer.ggml.padding_token_id"),
        eos_token_ids=_eos_token_ids(file),
        generation=_generation_defaults(file),
    )
    return config.validate(str(file.path))


def _scalars(file: GgufFile) -> Fields:
    """The architecture's own keys without its prefix; a list of one number for every layer becomes that number."""
    prefix = f"{file.fields['general.architecture']}."
    found: dict[str, Any] = {}
    for key, value in file.fields.items():
        if not key.startswith(prefix):
            continue
        if isinstance(value, np.ndarray):
            if not value.size or np.any(value != value[0]):
                # Per-layer sizes differ; whoever needs this key says that it is not a number.
                found[key.removeprefix(prefix)] = value.tolist()[:8]
                continue
            value = value[0].item()
        found[key.removeprefix(prefix)] = value
    return Fields(f"{file.path}: {prefix[:-1]}", found)


def _read_rope(
    file: GgufFile, fields: Fields, default_theta: float, head_dim: int, max_positions: int
) -> RopeConfig:
    theta = fields.number("rope.freq_base", default_theta, above=True)
    kind = fields.text("rope.scaling.type", "linear" if "rope.scale_linear" in fields.data else "none")
    factors = _frequency_factors(file, head_dim)
    if kind not in ("none", "linear", "yarn"):
        raise fields.error("rope.scaling.type", kind, "one of none, linear, yarn")
    factor = fields.number(("rope.scaling.factor", "rope.scale_linear"), 1.0) or 1.0  # 0: not scaled
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta=theta, frequency_factors=factors)
    if factors:
        raise ModelLoadError(
            f"{file.path}: has both rope.scaling.type {kind} and factors in rope_freqs.weight, expected one of them; "
            "convert the model again"
        )
    if factor < 1.0:
        raise fields.error("rope.scaling.factor", factor, "a number of at least 1")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor)
    explicit = fields.optional_number("rope.scaling.yarn_attn_factor", above=True)
    multiplier = fields.number("rope.scaling.attn_factor", 1.0, above=True)
    if fields.number("rope.scaling.yarn_ext_factor", 1.0, minimum=-1.0) not in (1.0, -1.0):  # -1: default
        raise fields.error("rope.scaling.yarn_ext_factor", fields.data["rope.scaling.yarn_ext_factor"], "1.0")
    plain = 0.1 * np.log(factor) + 1.0
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", max_positions
        ),
        attention_factor=None if explicit is None and multiplier == 1.0 else (explicit or plain) * multiplier,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=True),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=True),
    )


def _frequency_factors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    """The few numbers of rope_freqs.weight, or none."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelLoadError(
            f"{tensor.file}: tensor rope_freqs.weight is {tensor.type_name} {list(tensor.shape)}, expected F32 "
            f"[{head_dim // 2}]; convert the model again"
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        factors = np.frombuffer(stream.read(tensor.num_bytes), np.float32)
    if len(factors) != head_dim // 2 or not np.all(np.isfinite(factors) & (factors > 0)):
        raise ModelLoadError(
            f"{tensor.file}: tensor rope_freqs.weight holds a factor that is not above 0; download it again"
        )
    return tuple(factors.tolist())


def _generation_defaults(file: GgufFile) -> GenerationDefaults:
    fields = Fields(str(file.path), dict(file.fields))
    return GenerationDefaults(
        do_sample=fields.optional_number("general.sampling.temp") not in (None, 0.0),
        temperature=fields.optional_number("general.sampling.temp"),
        top_p=fields.optional_number("general.sampling.top_p", maximum=1.0, above=True),
        top_k=fields.optional_integer("general.sampling.top_k"),
        min_p=fields.optional_number("general.sampling.min_p", maximum=1.0),
        repetition_penalty=fields.optional_number("general.sampling.penalty_repeat", above=True),
    )


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value < 2**31 else None


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """What the file names; `Tokenizer.from_gguf` adds the tokens that end an answer by their text."""
    end = _token_id(file, "tokenizer.ggml.eos_token_id")
    return () if end is None else (end,)
