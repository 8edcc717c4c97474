"""Tiny random models of any family that transformers has: names and shapes of the weights are those of its own classes.

A family needs its model type, its settings and, for GGUF, the package's name of its architecture.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tests.tiny_models.described_gguf import FURTHER_NAMES, NAMED_LIKE, add_metadata, file_says_all
from tests.tiny_models.writing import F32, RandomWeights, TinyModel, without_qwens

_BY_LAYER: Final = (
    "layer_types", "mlp_layer_types", "layer_rope_theta", "num_attention_heads_per_layer", "swiglu_limits",
    "swiglu_limits_shared",
)  # fmt: skip
_RATHER_WIDE: Final = (".gate.weight", "experts", "lm_head", "router")


@dataclass(frozen=True)
class TinyDescribed(TinyModel):
    """A model of transformers' `model_type`, the text part of `outer` if there is one."""

    model_type: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json beyond the sizes that all families have."""
    left_out: tuple[str, ...] = ()
    """Keys of Qwen3-MoE's config.json that the family does not have."""
    outer: str = ""
    """Model type of the multimodal model around it; "": the model is a text model."""
    outer_settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json beside the text part."""
    text_prefix: str = "model.language_model."
    vision_tensor: str = "model.visual.patch_embed.proj.bias"
    """A tensor of the part that sees."""
    gguf: str = ""
    """GGUF architecture; "": the package knows none."""
    scores: str = "SOFTMAX"
    """The router's score, as the package names it."""
    experts_key: str = "num_experts"
    """The number of experts in config.json; "": the family has none."""
    neighbours_in_gguf: bool = False
    """Whether converters put the rows of q and k in the order in which rotation pairs neighbours."""
    has_biases: bool = True
    """Whether `attention_bias` means something to the family."""

    def with_settings(self, **changed: Any) -> TinyDescribed:
        """The same model with these keys of config.json."""
        return replace(self, settings={**self.settings, **changed})

    def resized(self, **sizes: Any) -> TinyDescribed:
        """The same model with other sizes, without groups; lists by layer are cut to the number of layers."""
        model = replace(self, **sizes)
        lists = {
            key: value[-model.num_layers :]
            for key, value in self.settings.items()
            if key in _BY_LAYER and value is not None
        }
        if self.outer == "ernie4_5_vl_moe":  # sections fill half of a head
            half = model.hidden_size // model.num_heads // 2
            section = [3 * half // 8, 3 * half // 8, half // 4]
            lists["rope_parameters"] = self.settings["rope_parameters"] | {"mrope_section": section}
        if "intermediate_size" in self.settings:  # the experts' in granitemoe_swa
            lists["intermediate_size"] = model.moe_intermediate_size
        return model.with_settings(**lists, **self._one_group())

    def _one_group(self) -> dict[str, int]:
        return {key: 1 for key in ("n_group", "topk_group") if key in self.settings}

    def all_chosen(self) -> TinyDescribed:
        """The same model, of which a token goes to all experts there are."""
        return replace(self.with_settings(**self._one_group()), top_k=self.num_experts)

    def text_config(self) -> dict[str, Any]:
        """The settings of the text part alone."""
        qwens = {"num_experts", "norm_topk_prob", *self.left_out}
        if "rope_parameters" in self.settings:
            qwens |= {"rope_theta", "rope_scaling", "rope_parameters"}
        if not self.experts_key:
            qwens |= {"num_experts_per_tok", "moe_intermediate_size"}
        kept = without_qwens(super().config(), *qwens)
        experts = {self.experts_key: self.num_experts} if self.experts_key else {}
        return kept | experts | {"model_type": self.model_type} | dict(self.settings)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        text = self.text_config()
        if not self.outer:
            return text
        outer = {key: text.pop(key) for key in ("architectures", "bos_token_id", "eos_token_id", "dtype")}
        tied = {"tie_word_embeddings": self.tie_word_embeddings}
        counts = ("depth", "num_heads", "num_hidden_layers", "num_attention_heads")
        vision = dict.fromkeys(counts, 2) | dict.fromkeys(("hidden_size", "intermediate_size"), 16)
        vision |= {"out_hidden_size": self.hidden_size, "deepstack_visual_indexes": [0]}
        outer |= tied | dict(self.outer_settings)
        return outer | {"model_type": self.outer, "text_config": text | tied, "vision_config": vision}

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        random, found = RandomWeights(self.seed), {}
        for name, shape in _shapes(json.dumps(self._plain_config())):
            _add(random, name, shape)
        for name, values in random.found.items():
            found |= self._parted(name, values)
        if self.outer == "ernie4_5_vl_moe":
            found = _with_experts_of_images(found)
        if not self.outer:
            return found
        theirs = {
            name if name.startswith("lm_head") else self.text_prefix + name.removeprefix("model."): values
            for name, values in found.items()
        }
        return theirs | {self.vision_tensor: found["model.norm.weight"]}

    def _plain_config(self) -> dict[str, Any]:
        return {key: value for key, value in self.text_config().items() if key != "architectures"}

    def _parted(self, name: str, values: F32) -> dict[str, F32]:
        """One set of tensors per expert, as most families are published; transposed ones of multimodal Qwens."""
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts"):
            return {name: values}
        if self.outer == "qwen3_vl_moe" and self.expert_layout == "fused":
            return {name: np.ascontiguousarray(values.swapaxes(1, 2))}
        if self.expert_layout == "fused":
            return {name: values}
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        return {
            f"{stem}.{expert}.{part}.weight": np.ascontiguousarray(half)
            for expert, both in enumerate(values)
            for part, half in zip(parts, np.split(both, len(parts)), strict=True)
        }

    def is_moe_layer(self, layer: int) -> bool:
        names = (name for name, _ in _shapes(json.dumps(self._plain_config())))
        return any(name.startswith(f"model.layers.{layer}.") and ".experts." in name for name in names)

    @property
    def has_experts(self) -> bool:
        return bool(self.experts_key)

    @property
    def fits_gguf(self) -> bool:
        """See `TinyModel.fits_gguf`."""
        return super().fits_gguf and file_says_all(self)

    @property
    def gguf_architecture(self) -> str:
        return self.gguf

    @property
    def gguf_pairs_neighbours(self) -> bool:
        return self.neighbours_in_gguf

    @property
    def gguf_rope_theta(self) -> float:
        """See `TinyModel.gguf_rope_theta`."""
        rope = self.settings.get("rope_parameters", {})
        if alpha := rope.get("alpha"):
            return float(rope["rope_theta"] * alpha ** (self.head_dim / (self.head_dim - 2)))
        return float(rope.get("full_attention", rope).get("rope_theta", super().gguf_rope_theta))

    @property
    def gguf_names(self) -> dict[str, str]:
        """The package's own names of this architecture's tensors."""
        import gguf

        name = NAMED_LIKE.get(self.gguf, self.gguf)
        known = next(arch for arch, of_package in gguf.MODEL_ARCH_NAMES.items() if of_package == name)
        table = gguf.get_tensor_name_map(known, self.num_layers)
        names = {}
        for name in self.gguf_source():
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            stem = re.sub(r"\.(weight|bias)$", "", name)
            if ".experts." in stem or (theirs := table.get_name(stem)) is None:
                continue
            of_layer = re.match(r"model\.layers\.\d+\.(.*)", stem)
            names[of_layer[1] if of_layer else stem] = re.sub(r"^blk\.\d+\.", "", theirs)
        return names | FURTHER_NAMES

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`."""
        found = replace(self, outer="").weights()
        if self.gguf not in ("gemma3", "step35"):
            return {_suffixed(name): values for name, values in found.items()}
        return {
            name: values + np.float32(1.0) if name.endswith("norm.weight") else values
            for name, values in found.items()
        }

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        add_metadata(self, writer, package)


def _suffixed(name: str) -> str:
    """The name with the suffix that converters give vectors without one."""
    name = name.replace("expert_bias", "expert_bias.bias")
    return f"{name}.weight" if name.endswith(("sinks", "attention_sink_bias")) else name


def _with_experts_of_images(found: Mapping[str, F32]) -> dict[str, F32]:
    """Tensors as ERNIE-4.5-VL is published: gates transposed, experts of images after those of text."""
    made: dict[str, F32] = {}
    num_text = len({name.split(".")[6] for name in found if ".text_moe.experts." in name})
    for name, values in found.items():
        stem, of_images = re.sub(r"\.(text|vision)_moe\.", ".", name), ".vision_moe." in name
        if stem.endswith(".mlp.gate.weight"):
            made[stem + "_1" * of_images] = np.ascontiguousarray(values.T)
        elif "moe_statics" in stem:
            stem = stem.replace(".gate.moe_statics", ".moe_statics")
            made[stem] = np.concatenate([made.get(stem, values[:0]), values])
        elif of_images:
            made[re.sub(r"experts\.(\d+)", lambda n: f"experts.{num_text + int(n[1])}", stem)] = values
        else:
            made[stem] = values
    return made


def _add(random: RandomWeights, name: str, shape: tuple[int, ...]) -> None:
    """A tensor with the scale that makes its part of the forward pass show in the logits."""
    if len(shape) == 1:
        random.vector(name, shape[0], 1.0 if "norm" in name else 0.0)
        return
    *stack, rows, columns = shape
    gain = 1.5 if any(part in name for part in _RATHER_WIDE) else 1.0
    if name == "model.embed_tokens.weight":
        gain = float(columns) ** 0.5
    random.found[name] = random.rng.normal(0.0, gain / columns**0.5, (*stack, rows, columns)).astype(
        np.float32
    )


@functools.cache
def _shapes(config_json: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, shape) of every tensor of transformers' model with this configuration, in its order."""
    import torch
    import transformers

    settings = json.loads(config_json)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = _model_class(config)._from_config(config)
    tensors = [
        *model.named_parameters(),
        *((name, each) for name, each in model.named_buffers() if "bias" in name),
    ]
    prefix = "" if any(name.startswith("model.") for name, _ in tensors) else "model."
    found = {
        name if name.startswith("lm_head") else prefix + name: tuple(each.shape) for name, each in tensors
    }
    if prefix and not config.tie_word_embeddings:
        found["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return tuple(found.items())


def _model_class(config: Any) -> Any:
    """transformers' class for text generation, or its bare text model."""
    import transformers

    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        return mapping[type(config)]
    name = type(config).__name__.removesuffix("Config")
    module = __import__(type(config).__module__.replace("configuration", "modeling"), fromlist=[name])
    of_thinker = f"{name.removesuffix('Text')}ThinkerTextModel"
    return getattr(module, of_thinker if hasattr(module, of_thinker) else f"{name}Model")
