"""A GGUF file's metadata as a source for `ModelConfig`.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; a missing key has llama.cpp's default. Settings
without a key (which layers have experts, attention biases, a tied head) are derived from the tensors.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.head import Embedding, Head
from twofold.blocks.rope import RopeConfig
from twofold.blocks.router import Router
from twofold.models.config import MAX_EXPERTS, MAX_LAYERS, GenerationDefaults, ModelConfig, repeat_layers
from twofold.weights.gguf_file import GgufFile
from twofold.weights.json_file import Fields

_SOFTMAX: Final = 1


class GgufMetadata:
    """Header of a GGUF file, from which a family composes blocks; ModelLoadErrors name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.fields = _scalars(file)
        """The architecture's own keys, without the prefix."""
        self.num_layers = self.fields.integer("block_count", maximum=MAX_LAYERS)
        self.hidden_size = self.fields.integer("embedding_length")
        self.max_positions = self.fields.integer("context_length")
        self.eps = self.fields.number("attention.layer_norm_rms_epsilon", above=True)

    def attention(
        self,
        *,
        qk_norm: bool = False,
        pairs_neighbours: bool = False,
        flat_norms: bool = False,
        o_bias: bool = True,
        partly_rotated: bool = False,
    ) -> Gqa:
        """Grouped-query attention, the same for every layer.

        `o_bias`: whether the output has a bias if q, k and v have one. With `partly_rotated`, rope.dimension_count may
        be less than a head.
        """
        fields = self.fields
        num_heads = fields.integer("attention.head_count")
        head_dim = fields.integer("attention.key_length", max(1, self.hidden_size // num_heads))
        whole = ("attention.value_length", *(() if partly_rotated else ("rope.dimension_count",)))
        for key in whole:
            if fields.integer(key, head_dim) != head_dim:
                raise fields.error(
                    key, fields.data[key], f"{head_dim} as attention.key_length, the only supported value"
                )
        bias = "blk.0.attn_q.bias" in self.file.tensors
        return Gqa(
            layer=0,
            hidden_size=self.hidden_size,
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            eps=self.eps,
            bias=bias,
            o_bias=bias and o_bias,
            qk_norm=qk_norm or flat_norms,
            flat_norms=flat_norms,
            sliding_window=fields.optional_integer("attention.sliding_window") or None,
            gguf_pairs_neighbours=pairs_neighbours,
        )

    def mixture(
        self,
        expert_size_keys: tuple[str, ...],
        modules: tuple[str, ...] = ("mlp",),
        projections: tuple[tuple[str, str, str], ...] = (("gate_proj", "up_proj", "down_proj"),),
        *,
        renormalise: bool = True,
    ) -> tuple[Router, RoutedExperts]:
        """Softmax router and its experts, whose intermediate size is in the first key that exists.

        `renormalise`: default if the file has no value.
        """
        fields = self.fields
        if fields.integer("expert_gating_func", _SOFTMAX, minimum=0) not in (0, _SOFTMAX):
            raise fields.error("expert_gating_func", fields.data["expert_gating_func"], "1 (softmax)")
        if fields.number("expert_weights_scale", 1.0) not in (0.0, 1.0):  # 0: not scaled
            raise fields.error("expert_weights_scale", fields.data["expert_weights_scale"], "1.0")
        inner = fields.integer(expert_size_keys)
        num_experts = fields.integer("expert_count", maximum=MAX_EXPERTS)
        top_k = fields.integer("expert_used_count")
        renormalise = fields.boolean("expert_weights_norm", renormalise)
        return (
            Router(0, self.hidden_size, num_experts, top_k, self.eps, renormalise, modules=modules),
            RoutedExperts(0, self.hidden_size, num_experts, top_k, inner, modules, projections),
        )

    def of_layers(self, key: str, *, minimum: int = 0) -> list[int]:
        """Per-layer values of a key, one value applying to all layers. Raises ModelLoadError for anything else."""
        said = self.file.fields.get(f"{self.file.fields['general.architecture']}.{key}")
        numbers = np.ravel(said if said is not None else minimum - 1)
        fits = numbers.dtype.kind in "bui" and numbers.size in (1, self.num_layers)
        if not fits or int(numbers.min()) < minimum or int(numbers.max()) >= 2**31:
            raise self.fields.error(key, numbers.tolist()[:8], f"{minimum} or more for each layer")
        return [int(number) for number in np.broadcast_to(numbers, self.num_layers)]

    def has_gate(self, layer: int) -> bool:
        """Whether a layer has a router."""
        return f"blk.{layer}.ffn_gate_inp.weight" in self.file.tensors

    def layers(self, attention: Block, *mixture: Block) -> tuple[tuple[Block, ...], ...]:
        """Layers of attention and an MoE part; a layer without a router's gate has a dense feed-forward part."""

        inner = 0
        if not all(map(self.has_gate, range(self.num_layers))):
            inner = self.fields.integer("feed_forward_length")
        dense = DenseFfn(0, self.hidden_size, inner, self.eps)
        return repeat_layers(
            self.num_layers, lambda layer: (attention, *(mixture if self.has_gate(layer) else (dense,)))
        )

    def outline(
        self,
        class_name: str,
        layers: tuple[tuple[Block, ...], ...],
        *,
        rope: RopeConfig,
        rope_dim: int,
    ) -> ModelConfig:
        """A family's layers with the settings common to all files; `class_name` is Hugging Face's."""
        file = self.file
        table = file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelLoadError(
                f"{file.path}: tensor token_embd.weight is missing or no matrix; the file is damaged, download it again"
            )
        tied = "output.weight" not in file.tensors
        return ModelConfig(
            architecture=class_name,
            embedding=Embedding(table.shape[0], self.hidden_size, tied),
            layers=layers,
            head=Head(table.shape[0], self.hidden_size, self.eps, tied),
            max_position_embeddings=self.max_positions,
            rope=rope,
            rope_dim=rope_dim,
            dtype="bfloat16",
            bos_token_id=_token_id(file, "tokenizer.ggml.bos_token_id"),
            pad_token_id=_token_id(file, "tokenizer.ggml.padding_token_id"),
            eos_token_ids=_eos_token_ids(file),
            generation=_generation_defaults(file),
        )

    def rope(self, default_theta: float, rope_dim: int) -> RopeConfig:
        """RoPE settings for `rope_dim` elements of a head."""
        file, fields = self.file, self.fields
        theta = fields.number("rope.freq_base", default_theta, above=True)
        kind = fields.text("rope.scaling.type", "linear" if "rope.scale_linear" in fields.data else "none")
        factors = _frequency_factors(file, rope_dim)
        if kind not in ("none", "linear", "yarn"):
            raise fields.error("rope.scaling.type", kind, "one of none, linear, yarn")
        factor = fields.number(("rope.scaling.factor", "rope.scale_linear"), 1.0) or 1.0  # 0: not scaled
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return RopeConfig(theta=theta, frequency_factors=factors)
        if factors:
            raise ModelLoadError(
                f"{file.path}: has both rope.scaling.type {kind} and factors in rope_freqs.weight, expected one of "
                "them; convert the model again"
            )
        if kind == "yarn" and fields.get(("rope.scaling.factor", "rope.scale_linear"))[1] is None:
            raise ModelLoadError(
                f"{file.path}: rope.scaling.factor is missing, expected the factor of rope.scaling.type yarn; convert "
                "the model again"
            )
        if factor < 1.0:
            raise fields.error("rope.scaling.factor", factor, "a number of at least 1")
        if kind == "linear":
            return RopeConfig(kind="linear", theta=theta, factor=factor)
        explicit = fields.optional_number("rope.scaling.yarn_attn_factor", above=True)
        multiplier = fields.number("rope.scaling.attn_factor", 1.0, above=True)
        if fields.number("rope.scaling.yarn_ext_factor", 1.0, minimum=-1.0) not in (1.0, -1.0):  # -1: default
            raise fields.error(
                "rope.scaling.yarn_ext_factor", fields.data["rope.scaling.yarn_ext_factor"], "1.0"
            )
        plain = 0.1 * np.log(factor) + 1.0
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=fields.integer(
                "rope.scaling.original_context_length", self.max_positions
            ),
            attention_factor=None
            if explicit is None and multiplier == 1.0
            else (explicit or plain) * multiplier,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, above=True),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, above=True),
        )


def _scalars(file: GgufFile) -> Fields:
    """The architecture's own keys without the prefix; a list of one number for every layer becomes that number."""
    prefix = f"{file.fields['general.architecture']}."
    found: dict[str, Any] = {}
    for key, value in file.fields.items():
        if not key.startswith(prefix):
            continue
        if isinstance(value, np.ndarray):
            if not value.size or np.any(value != value[0]):
                # Per-layer sizes differ; reading this key as a number reports the error.
                found[key.removeprefix(prefix)] = value.tolist()[:8]
                continue
            value = value[0].item()
        found[key.removeprefix(prefix)] = value
    return Fields(f"{file.path}: {prefix[:-1]}", found)


def _frequency_factors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    """Values of rope_freqs.weight, empty if the tensor is missing."""
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
    """End tokens from the file; `Tokenizer.from_gguf` adds the tokens that end an answer by their text."""
    end = _token_id(file, "tokenizer.ggml.eos_token_id")
    return () if end is None else (end,)
