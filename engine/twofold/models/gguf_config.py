"""A GGUF file's metadata in config.json's format, which a family's `parse_config` reads.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; a missing key has llama.cpp's default. Settings
without a key (which layers have experts, attention biases, a tied head) are derived from the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.models.config import MAX_EXPERTS, MAX_LAYERS, GenerationDefaults, ModelConfig
from twofold.models.config_json import generation_defaults, rotary_share
from twofold.models.keys import ALSO
from twofold.weights.gguf_file import GgufFile
from twofold.weights.json_file import Fields

Score = Literal["softmax", "sigmoid", "softmax_of_chosen"]
_HEADS: Final = ("head_count", "head_count_kv")
_GATING: Final[dict[Score, int]] = {"softmax": 1, "sigmoid": 2, "softmax_of_chosen": 3}


class GgufMetadata:
    """Header of a GGUF file, from which a family makes its settings; ModelLoadErrors name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.fields = _scalars(file)
        """The architecture's own keys, without the prefix."""
        self.num_blocks = self.fields.integer("block_count", maximum=MAX_LAYERS)
        self.num_predicting = self.fields.integer("nextn_predict_layers", 0, minimum=0)
        """Layers after the model's last one that predict further tokens."""
        self.num_layers = self.num_blocks - self.num_predicting
        for key, size in self._sizes_of_tensors():
            self.fields.data.setdefault(key, size)
        self.hidden_size = self.fields.integer("embedding_length")

    def config_json(self, settings: dict[str, Any]) -> Fields:
        """The file's whole configuration; `settings` are the family's."""
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise ModelLoadError(
                f"{self.file.path}: tensor token_embd.weight is missing or no matrix; the file is damaged, download it "
                "again"
            )
        shared = {
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_nextn_predict_layers": self.num_predicting,
            "vocab_size": table.shape[0],
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "max_position_embeddings": self.fields.integer("context_length"),
            "rms_norm_eps": self.fields.number("attention.layer_norm_rms_epsilon", above=True),
            "bos_token_id": self._token_id("tokenizer.ggml.bos_token_id"),
            "pad_token_id": self._token_id("tokenizer.ggml.padding_token_id"),
            # `Tokenizer.from_gguf` adds the tokens that end an answer by their text.
            "eos_token_id": self._token_id("tokenizer.ggml.eos_token_id"),
            "dtype": "bfloat16",
        }
        rope = {} if "rope_parameters" in settings else {"rope_parameters": self.rope_parameters()}
        return Fields(str(self.file.path), shared | rope | settings, also=ALSO)

    def _sizes_of_tensors(self) -> Iterator[tuple[str, int]]:
        """Sizes that tensors imply where a converter left their keys out."""
        keys = {
            "ffn_gate_inp": ("expert_count", 0), "ffn_down_exps": ("expert_feed_forward_length", -1),
            "ffn_down_shexp": ("expert_shared_feed_forward_length", -1), "ffn_down": ("feed_forward_length", -1),
        }  # fmt: skip
        if "expert_shared_count" in self.fields.data:  # whose widths follow
            del keys["ffn_down_shexp"]
        for name, tensor in self.file.tensors.items():
            part = name.split(".")
            if len(part) == 4 and part[0] == "blk" and part[3] == "weight" and part[2] in keys:
                key, axis = keys[part[2]]
                yield key, tensor.shape[axis]

    def attention(
        self, *, windows: bool = False, partly_rotated: bool = False, uneven: bool = False
    ) -> dict[str, Any]:
        """Settings of grouped-query attention that is the same in every layer.

        windows: it may have a sliding window. partly_rotated: rope.dimension_count may be less than a head. uneven: the
        family reads by itself which numbers of heads layers have, and the length of values; those here are the first
        layer's.
        """
        fields = self.fields
        first = {f"attention.{key}": self.of_layers(f"attention.{key}")[0] for key in _HEADS if uneven}
        fields = Fields(fields.where, fields.data | first)
        num_heads = fields.integer("attention.head_count")
        head_dim = fields.integer("attention.key_length", max(1, self.hidden_size // num_heads))
        whole = () if uneven else ("attention.value_length",)
        for key in (*whole, *(() if partly_rotated else ("rope.dimension_count",))):
            if fields.integer(key, head_dim) != head_dim:
                raise fields.error(
                    key, fields.data[key], f"{head_dim} as attention.key_length, the only supported value"
                )
        settings: dict[str, Any] = {
            "num_attention_heads": num_heads,
            "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "attention_bias": "blk.0.attn_q.bias" in self.file.tensors,
        }
        if partly_rotated:
            # DeepSeek-OCR's files have 0, and whole heads turn.
            rotated = fields.integer("rope.dimension_count", 0, minimum=0, maximum=head_dim) or head_dim
            settings["partial_rotary_factor"] = rotary_share(rotated, head_dim)
        if windows:
            settings["sliding_window"] = fields.optional_integer("attention.sliding_window") or None
        else:
            fields.only("attention.sliding_window", 0)
        return settings

    def experts(
        self,
        num_experts: str = "num_experts",
        *size_keys: str,
        top_k: str = "num_experts_per_tok",
        intermediate: str = "moe_intermediate_size",
    ) -> dict[str, Any]:
        """Sizes of routed experts under these keys of config.json; the intermediate size is in the first key that the
        file has, or under "expert_feed_forward_length"."""
        return {
            num_experts: self.fields.integer("expert_count", maximum=MAX_EXPERTS),
            top_k: self.fields.integer("expert_used_count"),
            intermediate: self.fields.integer(("expert_feed_forward_length", *size_keys)),
        }

    @property
    def shared_width(self) -> int:
        """Intermediate size of the last layer's shared experts together, by their tensor; 0: there are none."""
        tensor = self.file.tensors.get(f"blk.{self.num_layers - 1}.ffn_down_shexp.weight")
        return 0 if tensor is None else tensor.shape[-1]

    def expect_score(self, score: Score) -> None:
        """Raises ModelLoadError if the file's router has another score."""
        number = _GATING[score]
        if self.fields.integer("expert_gating_func", number, minimum=0) not in (0, number):
            raise self.fields.error(
                "expert_gating_func", self.fields.data["expert_gating_func"], f"{number} ({score})"
            )

    def dense_layers(self) -> dict[str, Any]:
        """Settings of the layers that have no router, by Qwen's keys."""
        layers = [layer for layer in range(self.num_layers) if not self.has_gate(layer)]
        size = {"intermediate_size": self.fields.integer("feed_forward_length")} if layers else {}
        return {"mlp_only_layers": layers, **size}

    def of_layers(self, key: str, *, minimum: int = 0) -> list[int]:
        """Per-layer values of a key, one value applying to all layers. Raises ModelLoadError for anything else."""
        value = self.file.fields.get(f"{self.file.fields['general.architecture']}.{key}")
        numbers = np.ravel(value if value is not None else minimum - 1)
        fits = numbers.dtype.kind in "bui" and numbers.size in (1, self.num_blocks)
        if not fits or int(numbers.min()) < minimum or int(numbers.max()) >= 2**31:
            raise self.fields.error(key, numbers.tolist()[:8], f"{minimum} or more for each layer")
        return [int(number) for number in np.broadcast_to(numbers, self.num_blocks)]

    def slides(self, period: int, *, full_first: bool = False) -> list[bool]:
        """Whether each layer has a sliding window, from attention.sliding_window_pattern: a value for each layer, or a
        period of layers with one layer without, the last of them or the first. `period`: that of a file without the
        key; 0: every layer has one."""
        value = self.file.fields.get(
            f"{self.file.fields['general.architecture']}.attention.sliding_window_pattern", period
        )
        if isinstance(value, int) and not isinstance(value, bool):
            whole = 0 if full_first else value - 1
            return [value == 0 or n % value != whole for n in range(self.num_layers)]
        return [bool(each) for each in self.of_layers("attention.sliding_window_pattern")[: self.num_layers]]

    def has_gate(self, layer: int) -> bool:
        """Whether a layer has a router."""
        return f"blk.{layer}.ffn_gate_inp.weight" in self.file.tensors

    def rope_parameters(self, default_theta: float | None = None) -> dict[str, Any]:
        """RoPE settings; `default_theta`: if llama.cpp's default is not the family's."""
        fields = self.fields
        theta = fields.optional_number("rope.freq_base", above=True) or default_theta
        settings: dict[str, Any] = {"rope_type": "default", "rope_theta": theta} | self._axes()
        kind = fields.text("rope.scaling.type", "linear" if "rope.scale_linear" in fields.data else "none")
        if kind not in ("none", "linear", "yarn"):
            raise fields.error("rope.scaling.type", kind, "one of none, linear, yarn")
        factor = fields.number(("rope.scaling.factor", "rope.scale_linear"), 1.0) or 1.0  # 0: not scaled
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return settings
        if "rope_freqs.weight" in self.file.tensors:
            raise ModelLoadError(
                f"{self.file.path}: has both rope.scaling.type {kind} and factors in rope_freqs.weight, expected one "
                "of them; convert the model again"
            )
        if kind == "yarn" and fields.get(("rope.scaling.factor", "rope.scale_linear"))[1] is None:
            raise ModelLoadError(
                f"{self.file.path}: rope.scaling.factor is missing, expected the factor of rope.scaling.type yarn; "
                "convert the model again"
            )
        if factor < 1.0:
            raise fields.error("rope.scaling.factor", factor, "a number of at least 1")
        settings |= {"rope_type": kind, "factor": factor}
        return settings if kind == "linear" else settings | self._yarn(factor)

    @property
    def has_axes(self) -> bool:
        """Whether positions have axes: pictures have rows and columns."""
        return bool(self._axes())

    def _axes(self) -> dict[str, Any]:
        """Rotated pairs by axis, as Qwen's settings have them; files have a fourth axis without pairs."""
        key = "rope.dimension_sections"
        pairs = np.ravel(self.file.fields.get(f"{self.file.fields['general.architecture']}.{key}", []))
        if not pairs.size:
            return {}
        if pairs.dtype.kind not in "ui" or pairs.size not in (3, 4) or pairs.min() < 0 or any(pairs[3:]):
            raise self.fields.error(key, pairs.tolist()[:8], "numbers of pairs of three axes")
        return {"mrope_section": [int(count) for count in pairs[:3]]}

    def _yarn(self, factor: float) -> dict[str, Any]:
        fields = self.fields
        explicit = fields.optional_number("rope.scaling.yarn_attn_factor", above=True)
        multiplier = fields.number("rope.scaling.attn_factor", 1.0, above=True)
        if fields.number("rope.scaling.yarn_ext_factor", 1.0, minimum=-1.0) not in (1.0, -1.0):  # -1: default
            raise fields.error(
                "rope.scaling.yarn_ext_factor", fields.data["rope.scaling.yarn_ext_factor"], "1.0"
            )
        settings: dict[str, Any] = {
            "original_max_position_embeddings": fields.integer(
                "rope.scaling.original_context_length", fields.integer("context_length")
            ),
            "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0, above=True),
            "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0, above=True),
        }
        if explicit is not None or multiplier != 1.0:
            usual = float(0.1 * np.log(factor) + 1.0)
            settings["attention_factor"] = (explicit or usual) * multiplier
        return settings

    def with_frequency_factors(self, config: ModelConfig) -> ModelConfig:
        """The configuration with the factors in rope_freqs.weight, for which config.json has no place.

        A family with several rotations has read them itself.
        """
        if config.further_rotations or not (factors := frequency_factors(self.file, config.rope_dim)):
            return config
        return replace(config, rope=replace(config.rope, frequency_factors=factors))

    def generation_defaults(self) -> GenerationDefaults:
        names = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
        fields = Fields(str(self.file.path), dict(self.file.fields))
        read = generation_defaults(fields, lambda key: f"general.sampling.{names.get(key, key)}")
        return replace(read, do_sample=read.temperature not in (None, 0.0))

    def _token_id(self, key: str) -> int | None:
        value = self.file.fields.get(key)
        return (
            value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None
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


def frequency_factors(file: GgufFile, rope_dim: int) -> tuple[float, ...]:
    """Values of rope_freqs.weight, empty if the tensor is missing. Raises ModelLoadError."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.type_name != "F32" or tensor.shape != (rope_dim // 2,):
        raise ModelLoadError(
            f"{tensor.file}: tensor rope_freqs.weight is {tensor.type_name} {list(tensor.shape)}, expected F32 "
            f"[{rope_dim // 2}]; convert the model again"
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        factors = np.frombuffer(stream.read(tensor.num_bytes), np.float32)
    if len(factors) != rope_dim // 2 or not np.all(np.isfinite(factors) & (factors > 0)):
        raise ModelLoadError(
            f"{tensor.file}: tensor rope_freqs.weight holds a factor that is not above 0; download it again"
        )
    return tuple(factors.tolist())
