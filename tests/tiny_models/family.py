"""Tiny random models of any family: config.json by its row in `table.py`, tensors by the blocks that the engine reads.

A block knows the names and shapes of its tensors in both kinds of files. transformers, which loads the same directory,
judges them; `tests/models/test_gguf_names.py` holds the names of GGUF files to the `gguf` package's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from twofold.blocks.biased_experts import BiasedExperts
from twofold.blocks.block import ModelPart
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.picture_experts import PictureExperts
from twofold.models.config import GenerationDefaults, ModelConfig
from twofold.models.config_json import architecture_name
from twofold.models.keys import ALSO
from twofold.models.registry import family_of
from twofold.weights.json_file import Fields
from twofold.weights.tensor_spec import HasTensor, TensorSpec

from tests.tiny_models import mxfp4
from tests.tiny_models.writing import F32, Array, TinyModel, drawn

QWENS: Final = (
    "mlp_only_layers",
    "decoder_sparse_step",
    "use_sliding_window",
    "sliding_window",
    "norm_topk_prob",
)
"""Keys of Qwen3-MoE's config.json that a family has only if its settings give them."""
BY_LAYER: Final = (
    "layer_types", "mlp_layer_types", "indexer_types", "layer_rope_theta", "num_attention_heads_per_layer",
    "swiglu_limits", "swiglu_limits_shared", "no_rope_layers", "kv_source_layers",
)  # fmt: skip
_GAINS: Final = {
    "router": 2.0, "experts": 1.5, "shared_experts": 1.5, "dense": 1.5, "head": 2.0, "conv": 1.0,
}  # fmt: skip
"""Standard deviation of a product with rows of 1, by kind of block, where it is not 1."""
_MEANS: Final = {"decay": -1.5, "decay_bias": -1.0, "scalar": 0.8, "gate_scale": 1.0, "expert_scale": 1.0}
"""Means of vectors by their part of a block; norms have 1, others 0."""


@dataclass(frozen=True)
class Row:
    """What all tiny models of a family share."""

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    """Sizes under other names than Qwen3-MoE's in config.json; "": the family has no such key."""
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns of names by which a checkpoint of each layout of experts is known, where blocks have a choice."""
    renamed: tuple[tuple[str, str], ...] | None = None
    """(ours, theirs) parts of names in checkpoints; None: what the engine renames, the other way round."""
    outer: str = ""
    """Model type of the multimodal model around it; "": the family has text models alone."""
    outer_class: str = ""
    """Its class; "": that of the text model."""
    outer_settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json beside the text part."""
    has_small_vision: bool = True
    """Whether transformers can load it with a tiny vision tower."""
    vision_settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the section of the tiny vision tower."""
    prefix: tuple[str, str] = ("model.", "model.language_model.")
    """(ours, theirs) of the text part's names in its checkpoints."""
    vision_tensor: str = "model.visual.patch_embed.proj.bias"
    """A tensor of the part that sees."""
    bias_in_rows: bool = False
    """Whether checkpoints hold the router's bias as a matrix of one row."""
    images_inner: int = 0
    """Intermediate size of experts of pictures beside those of text; 0: there are none."""
    left_out: tuple[str, int] | None = None
    """(name, size) of a tensor of a part that is not run."""
    small_embedding: bool = False
    """Whether the embedding's rows have a norm of 1, because the model multiplies them."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Means of vectors, by parts of their names."""
    gguf: str = ""
    """GGUF architecture; "": the package knows none."""
    gguf_stored: tuple[str, ...] = ()
    """Parts of names by which its GGUF files are known, where blocks have a choice."""
    scores: str = "SOFTMAX"
    """The router's score, as the package names it; "": files do not say it."""
    mtp_in_gguf: bool = True
    """Whether converters keep the layer that predicts further tokens."""


@dataclass(frozen=True)
class TinyFamily(TinyModel):
    """A model of a family; sizes are fields, all other keys of config.json are in `settings`."""

    row: Row = Row("")
    settings: Mapping[str, Any] = field(default_factory=dict)
    nested: bool = False
    """Whether it is the text part of a multimodal model, with a tensor of the part that sees."""
    has_mtp: bool = False
    """Whether the checkpoint has a layer after the last that predicts further tokens."""
    mxfp4: bool = False
    """Whether experts are stored in MXFP4 (gpt-oss); sizes are then multiples of 32."""

    def changed(self, **changed: Any) -> TinyFamily:
        """The same model with other fields, or keys of config.json."""
        known = {each.name for each in fields(self)} - {*QWENS}
        keys = {key: value for key, value in changed.items() if key not in known}
        own = {key: value for key, value in changed.items() if key in known}
        return replace(self, **{"settings": {**self.settings, **keys}, **own})

    def resized(self, **changed: Any) -> TinyFamily:
        """The same with other sizes, without groups; lists by layer are cut to the number of layers."""
        model = self.changed(
            **{"top_k": min(self.top_k, changed.get("num_experts", self.num_experts)), **changed}
        )
        lists = {
            key: value[-model.num_layers :]
            for key, value in self.settings.items()
            if key in BY_LAYER and isinstance(value, list)
        }
        return model.changed(**{**lists, **model._one_group(), **changed})

    def _one_group(self) -> dict[str, int]:
        return {key: 1 for key in ("n_group", "topk_group") if key in self.settings}

    def all_chosen(self) -> TinyFamily:
        """The same model, of which a token goes to all experts there are, and attends to all positions."""
        if self.row.model_type == "llama4_text":  # a token has one expert
            return replace(self, num_experts=1)
        most = ("index_topk", "index_topk_blocks", "indexer_budget")
        all_positions = {key: 1020 for key in most if key in self.settings}
        return replace(self.changed(**self._one_group(), **all_positions), top_k=self.num_experts)

    def text_config(self) -> dict[str, Any]:
        """The settings of the text part."""
        config = {key: value for key, value in super().config().items() if key not in QWENS}
        if "rope_parameters" in self.settings:
            for key in ("rope_theta", "rope_scaling"):
                config.pop(key, None)
        sizes = {theirs: config.pop(ours, None) for ours, theirs in self.row.keys.items()}
        config |= {theirs: value for theirs, value in sizes.items() if theirs}
        if row_inner := self.row.images_inner:
            config["moe_intermediate_size"] = [self.moe_intermediate_size, row_inner]
        known = {"architectures": [self.architecture], "model_type": self.row.model_type}
        config |= known | dict(self.settings)
        if self.mxfp4:
            kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        return config

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        text, row = self.text_config(), self.row
        if not self.nested:
            return text
        outer = {key: text.pop(key) for key in ("bos_token_id", "eos_token_id", "dtype")}
        if self.settings.get("ple_layer_ids"):
            text["eos_token_id"] = outer["eos_token_id"]
        outer |= {"architectures": [row.outer_class or text.pop("architectures")[0]], "model_type": row.outer}
        outer |= {"tie_word_embeddings": self.tie_word_embeddings, **row.outer_settings}
        text.pop("architectures", None)
        if row.has_small_vision:
            counts = ("depth", "num_heads", "num_hidden_layers", "num_attention_heads")
            vision = dict.fromkeys(counts, 2) | dict.fromkeys(("hidden_size", "intermediate_size"), 16)
            outer["vision_config"] = vision | {
                "out_hidden_size": self.hidden_size,
                "deepstack_visual_indexes": [0],
                **row.vision_settings,
            }
        return outer | {"text_config": text}

    @functools.cached_property
    def parsed(self) -> ModelConfig:
        """The configuration of the text part, as the engine reads it."""
        return parsed(json.dumps(self.text_config()))

    def is_stored(self, spec: TensorSpec) -> bool:
        """Whether a checkpoint has this one of several possible tensors."""
        usual = {"separate": (r"\.experts\.\d",), "fused": ("experts.gate_up_proj",)}
        layout = self.row.stored.get(self.expert_layout, usual[self.expert_layout])
        return any(re.search(part, spec.name) for part in (*layout, *self.row.stored.get("", ())))

    def own_weights(self) -> dict[str, F32]:
        """Every tensor by the name that the engine gives it."""
        found: dict[str, F32] = {}
        for part in parts_of(self.parsed, predicting=self.has_mtp):
            for name, values in _Drawn(self, part).tensors(self.is_stored):
                found.setdefault(name, values)
        if self.has_mtp and not (self.parsed.mtp and self.parsed.mtp.layer):
            last, extra = f"model.layers.{self.num_layers - 1}.", f"model.layers.{self.num_layers}."
            found |= {
                name.replace(last, extra): each for name, each in found.items() if name.startswith(last)
            }
        return found

    def weights(self) -> dict[str, F32]:
        """Every tensor by its name in a checkpoint."""
        own = self.own_weights()
        if self.row.bias_in_rows:
            own |= {
                name: values[None] for name, values in own.items() if name.endswith("e_score_correction_bias")
            }
        found = {self.published(name): values for name, values in own.items()}
        if self.row.left_out is not None:
            name, size = self.row.left_out
            found.setdefault(name, np.ones(size, np.float32))
        if not self.nested:
            return found
        ours, theirs = self.row.prefix
        text = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: values
            for name, values in found.items()
        }
        return text | {self.row.vision_tensor: np.ones(self.hidden_size, np.float32)}

    def published(self, name: str) -> str:
        if (mtp := self.parsed.mtp) is not None:
            for theirs, ours in sorted(mtp.renamed, key=lambda pair: -len(pair[1])):
                if name.startswith(ours):
                    return theirs + name.removeprefix(ours)
        usual = tuple((ours, theirs) for theirs, ours in self.parsed.renamed)
        for ours, theirs in usual if self.row.renamed is None else self.row.renamed:
            if ours.startswith("*"):
                name = name.replace(ours[1:], theirs[1:])
            elif ours.count(".") > 1 and name.startswith(
                ours
            ):  # others begin all names of a multimodal model
                name = theirs + name.removeprefix(ours)
        return name

    def written(self, weights: dict[str, F32]) -> dict[str, Array]:
        """See `TinyModel.written`."""
        return mxfp4.stored(weights) if self.mxfp4 else dict(weights)

    @property
    def has_experts(self) -> bool:
        return bool(self.parsed.routed.num_experts)

    @property
    def twin(self) -> TinyFamily:
        """See `TinyModel.twin`."""
        return replace(self, nested=False) if self.nested else self

    @property
    def fits_gguf(self) -> bool:
        from tests.tiny_models.gguf_keys import says_all

        return bool(self.row.gguf) and says_all(self)

    @property
    def gguf_architecture(self) -> str:
        return self.row.gguf

    @property
    def num_gguf_layers(self) -> int:
        return self.num_layers + (self.has_mtp and self.row.mtp_in_gguf)


def parts_of(config: ModelConfig, *, predicting: bool) -> Iterator[ModelPart]:
    """Everything of a model that has tensors, the layer that predicts further tokens last but the head."""
    yield config.embedding
    for layer in config.layers:
        yield from layer
    if predicting and config.mtp is not None:
        yield from config.mtp.layer
    yield config.head


@functools.lru_cache(maxsize=256)
def parsed(config_json: str) -> ModelConfig:
    """A config.json as the engine reads it."""
    config = json.loads(config_json)
    fields = Fields("config.json", config, also=ALSO)
    return family_of(architecture_name(fields), config=config).parse_config(fields, GenerationDefaults())


class _Drawn:
    """Random tensors of one part of a model, scaled so that the part shows in the logits."""

    def __init__(self, model: TinyFamily, part: ModelPart) -> None:
        self.model, self.part = model, part

    def tensors(self, found: HasTensor) -> Iterator[tuple[str, F32]]:
        """(name, values) of those that `found` says a checkpoint has."""
        if isinstance(self.part, PictureExperts):
            for own in (self.part.text, self.part.pictures):
                yield from self._experts(own, found)
            return
        if isinstance(self.part, RoutedExperts):
            yield from self._experts(self.part, found)
            return
        # A checkpoint of another layout, such as a GGUF file, has the same values under other names.
        usual = self.part.tensors(replace(self.model, expert_layout="separate").is_stored)
        for role, spec in self.part.tensors(found).items():
            values = self._values(role, spec, usual.get(role, spec).name)
            yield spec.name, values - np.float32(spec.zero_centred)

    def _values(self, role: str, spec: TensorSpec, name: str) -> F32:
        draw = functools.partial(drawn, self.model.seed, name, spec.shape)
        if len(spec.shape) == 1 or spec.name.endswith("bias"):
            mean = next((mean for part, mean in self.model.row.means.items() if part in spec.name), None)
            usual = _MEANS.get(role, 1.0 if "norm" in role else 0.0)
            return draw(spread=1.0 if role == "sinks" else 0.2, mean=usual if mean is None else mean)
        if len(spec.shape) == 3:  # taps of a convolution
            return draw(spread=0.6)
        columns = min(spec.shape) if getattr(self.part, "published", False) else spec.shape[-1]
        if role == "table":
            return draw(spread=columns**-0.5 if self.model.row.small_embedding else 1.0)
        gain = _GAINS.get(self.part.kind, 1.0)
        if getattr(self.part, "gate_scaled", False):
            gain *= columns**0.5
        return draw(spread=gain / columns**0.5)

    def _experts(self, block: RoutedExperts, found: HasTensor) -> Iterator[tuple[str, F32]]:
        number, inner, hidden = block.num_experts, block.intermediate_size, block.hidden_size
        gain = _GAINS["experts"] * (2 if block.has_biases else 1)  # beyond the limit now and then
        shapes = {
            "gate": (number, inner, hidden),
            "up": (number, inner, hidden),
            "down": (number, hidden, inner),
        }

        # Not by the names in a checkpoint: experts are the same in every layout.
        def draw(part: str, *shape: int, spread: float) -> F32:
            name = f"model.layers.{block.layer}.{'pictures' if block.first else 'mlp'}.experts.{part}"
            return drawn(self.model.seed, name, shape, spread=spread)

        three = {part: draw(part, *shape, spread=gain / shape[-1] ** 0.5) for part, shape in shapes.items()}
        if self.model.mxfp4:
            three = {part: mxfp4.dequantised(*mxfp4.quantised(values)) for part, values in three.items()}
        biases = {
            f"{part}_bias": draw(f"{part}_bias", *shape[:2], spread=0.5)
            for part, shape in shapes.items()
            if block.has_biases
        }
        yield from laid_out(block, found, three | biases)


def laid_out(block: RoutedExperts, found: HasTensor, values: Mapping[str, F32]) -> Iterator[tuple[str, F32]]:
    """(name, values) of experts as a checkpoint has them, of stacks by part."""
    joined: Callable[[F32, F32], F32] = (
        (lambda gate, up: mxfp4.in_turn(gate, up, 1))
        if isinstance(block, BiasedExperts)
        else (lambda gate, up: np.concatenate([gate, up], 1))
    )
    for role, spec in block.tensors(found).items():
        part, _, expert = role.partition(".")
        if expert:
            yield spec.name, values[part][int(expert)]
            continue
        if part.startswith("gate_up"):
            suffix = part.removeprefix("gate_up")
            each = joined(values[f"gate{suffix}"], values[f"up{suffix}"])
        else:
            each = values[part]
        yield spec.name, each if each.shape == spec.shape else np.ascontiguousarray(each.swapaxes(1, 2))
