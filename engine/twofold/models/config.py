"""What a model is: `ModelConfig`, parsed and validated from config.json and generation_config.json.

Each architecture translates its own field names (`qwen3_moe.py`, `mixtral.py`) into this one form; everything after
loading reads only this. It holds no weights and no behaviour beyond derived figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from twofold.api.errors import ModelLoadError
from twofold.weights.block_formats import QUANT_METHOD, parse_block_formats
from twofold.weights.json_file import Fields, read_json_object

# No model comes near these; they keep a damaged config.json from asking for a plan of a billion tensors.
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65_535

FP8_BLOCK: Final = 128
"""FP8 checkpoints have one scale for a block of so many rows and columns."""

RopeKind = Literal["default", "linear", "dynamic", "yarn"]
ROPE_KINDS: Final[tuple[RopeKind, ...]] = ("default", "linear", "dynamic", "yarn")

WeightDType = Literal["float32", "bfloat16", "float16"]
WEIGHT_DTYPES: Final[tuple[WeightDType, ...]] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its scaling; formulas in `rope.py`."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context length before YaRN scaling; 0 for the other kinds."""
    attention_factor: float | None = None
    """YaRN: given explicitly; None derives it from factor and mscale."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()
    """[head_dim/2] by which the frequencies of kind "default" are divided, if any (GGUF's rope_freqs)."""


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's authors recommend in generation_config.json; None where they say nothing."""

    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one decoder-only MoE transformer. Names follow Hugging Face where they are clear."""

    architecture: str
    """The class name in config.json, e.g. "Qwen3MoeForCausalLM"."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    intermediate_size: int
    """Of the dense feed-forward layers; 0 where there is none."""
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    """Whether the k routing weights are divided by their sum."""
    moe_layers: tuple[int, ...]
    """Indices of the layers whose feed-forward part is a mixture of experts, ascending."""
    rope: RopeConfig
    attention_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before the rotation (Qwen3)."""
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    dtype: WeightDType = "float32"
    """Of the weights that are not quantised; the KV cache follows it."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def max_context(self) -> int:
        """Tokens (prompt and answer together) that one sequence may have.

        Linear scaling changes max_position_embeddings itself. Dynamic NTK takes it as the length before scaling, YaRN
        keeps that in original_max_position_embeddings; both reach `factor` times as far.
        """
        if self.rope.kind == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(
                self.max_position_embeddings,
                int(self.rope.original_max_position_embeddings * self.rope.factor),
            )
        return self.max_position_embeddings

    def validate(self, where: str) -> ModelConfig:
        """Itself, or ModelLoadError when fields contradict one another. `where` is the file to name."""
        checks: list[tuple[bool, str]] = [
            (
                self.num_heads % self.num_kv_heads == 0,
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
            ),
            (self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd, rotary embeddings need an even one"),
            (
                self.top_k <= self.num_experts,
                f"num_experts_per_tok {self.top_k} is more than the {self.num_experts} experts there are",
            ),
            (bool(self.moe_layers), "no layer has experts; Twofold runs mixture-of-experts models only"),
            (
                self.rope.kind != "dynamic" or self.head_dim > 2,
                "dynamic RoPE scaling needs a head_dim of more than 2",
            ),
            (
                all(token < self.vocab_size for token in self.eos_token_ids),
                f"eos_token_id {list(self.eos_token_ids)} is outside the vocabulary of {self.vocab_size}",
            ),
        ]
        for holds, message in checks:
            if not holds:
                raise ModelLoadError(f"{where}: {message}; fix or replace this file")
        return self


def read_config_json(directory: Path) -> Fields:
    """The fields of `directory`/config.json. Raises ModelLoadError also for a directory that is not there."""
    if not directory.exists():
        raise ModelLoadError(f"{directory}: no such model directory; check the path or download the model")
    if not directory.is_dir():
        raise ModelLoadError(
            f"{directory}: is a file, expected a GGUF file or a directory with config.json and *.safetensors"
        )
    path = directory / "config.json"
    gguf = [] if path.exists() else sorted(found.name for found in directory.glob("*.gguf"))
    if gguf:
        raise ModelLoadError(
            f"{directory}: holds {gguf[0]} and no config.json; give the path of that file as the model"
        )
    fields = Fields(str(path), read_json_object(path, "the model's configuration"))
    _check_quantization(fields)
    return fields


def _check_quantization(fields: Fields) -> None:
    """FP8 with one scale for 128 x 128 weights is run as it is; what is quantised otherwise is refused."""
    name, _ = fields.get(("quantization_config", "compression_config"))
    quantization = fields.section(name)
    if quantization is None:
        return
    method = quantization.text("quant_method", "?")
    if method == QUANT_METHOD:
        parse_block_formats(quantization)
        return
    if method != "fp8":
        raise ModelLoadError(
            f"{fields.where}: {name} (quant_method {method!r}) is not supported, expected 'fp8' or {QUANT_METHOD!r}; "
            "use a float32, bfloat16, float16 or FP8 checkpoint, or a GGUF file"
        )
    block = quantization.integers("weight_block_size")
    if block != (FP8_BLOCK, FP8_BLOCK):
        raise quantization.error("weight_block_size", list(block), f"[{FP8_BLOCK}, {FP8_BLOCK}]")


def read_block_formats(directory: Path) -> dict[str, str]:
    """Format by tensor name of a directory that `twofold quantize` wrote; of any other, nothing."""
    section = read_config_json(directory).section("quantization_config")
    if section is None or section.data.get("quant_method") != QUANT_METHOD:
        return {}
    return parse_block_formats(section)


def architecture_name(fields: Fields) -> str:
    """The first of config.json's `architectures`."""
    _, names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", names, 'a list such as ["Qwen3MoeForCausalLM"]')
    return names[0]


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """generation_config.json, or the empty defaults when there is no such file."""
    path = directory / "generation_config.json"
    if not path.exists():
        return GenerationDefaults()
    fields = Fields(str(path), read_json_object(path, "the model's generation defaults"))
    return GenerationDefaults(
        do_sample=fields.boolean("do_sample", False),
        temperature=fields.optional_number("temperature"),
        top_p=fields.optional_number("top_p", maximum=1.0, above=True),
        top_k=fields.optional_integer("top_k"),
        min_p=fields.optional_number("min_p", maximum=1.0),
        repetition_penalty=fields.optional_number("repetition_penalty", above=True),
        eos_token_ids=fields.integers("eos_token_id"),
    )


def read_dtype(fields: Fields) -> WeightDType:
    """`dtype` (transformers 5) or `torch_dtype`; float32 when the config does not say."""
    name, value = fields.get(("dtype", "torch_dtype"))
    if value is None:
        return "float32"
    for known in WEIGHT_DTYPES:
        if value == known:
            return known
    raise fields.error(name, value, f"one of {', '.join(WEIGHT_DTYPES)}")


def read_activation(fields: Fields) -> None:
    """Twofold's kernels compute SiLU-gated feed-forward layers; anything else must not be run as if it were one."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", activation, "'silu', the only supported activation")


def read_rope(fields: Fields, *, default_theta: float, max_position_embeddings: int) -> RopeConfig:
    """RoPE settings, from `rope_parameters` (transformers 5: theta inside) or `rope_scaling` with `rope_theta`."""
    theta = fields.number("rope_theta", default_theta, above=True)
    section = fields.section(("rope_parameters", "rope_scaling"))
    if section is None:
        return RopeConfig(theta=theta)
    if any(isinstance(value, dict) for value in section.data.values()):
        raise ModelLoadError(
            f"{section.where}: settings per layer type are not supported; use one set for all layers"
        )
    theta = section.number("rope_theta", theta, above=True)
    partial = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise section.error("partial_rotary_factor", partial, "1.0, the only supported value")
    name = section.text(("rope_type", "type"), "default")
    kind = next((known for known in ROPE_KINDS if known == name), None)
    if kind is None:
        raise section.error("rope_type", name, f"one of {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind=kind, theta=theta, factor=section.number("factor", minimum=1.0))
    original = section.integer("original_max_position_embeddings", max_position_embeddings)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=section.number("factor", max_position_embeddings / original, minimum=1.0),
        original_max_position_embeddings=original,
        attention_factor=section.optional_number("attention_factor", above=True),
        beta_fast=section.number("beta_fast", 32.0, above=True),
        beta_slow=section.number("beta_slow", 1.0, above=True),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        truncate=section.boolean("truncate", True),
    )
