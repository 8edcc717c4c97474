"""`ModelConfig`: a model's configuration, independent of the file that it was read from (`config_json.py`).

Each family composes its blocks (`families/`). It holds no weights and no behaviour beyond derived figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal, cast, get_args

from twofold.api.errors import ModelLoadError
from twofold.blocks.block import Block, ExpertBlock, Pages, Record, RoutedShape, ShapeOf, in_layer
from twofold.blocks.head import Embedding, Head
from twofold.blocks.hyper_connection import HyperConnection
from twofold.blocks.mtp_input import MtpInput
from twofold.blocks.rope import RopeConfig

# Far above any real model; these keep a damaged config.json from requesting a plan of a billion tensors.
MAX_LAYERS: Final = 4096
MAX_EXPERTS: Final = 65_535

CacheDType = Literal["float32", "bfloat16", "q8", "fp8"]
WeightDType = Literal["float32", "bfloat16", "float16"]
WEIGHT_DTYPES: Final[tuple[WeightDType, ...]] = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommended sampling settings from generation_config.json; None if not given."""

    do_sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class MtpPart:
    """A layer after a model's last one that predicts the token after the next one (multi-token prediction)."""

    layer: tuple[Block, ...]
    """Its blocks; empty: it cannot be run."""
    left_out: tuple[str, ...]
    """Patterns of its tensors and of further such layers', ignored where it is not run."""
    unread: tuple[str, ...] = ()
    """Patterns of tensors that are ignored where it is run: its copies of embedding and head, further layers."""
    renamed: tuple[tuple[str, str], ...] = ()
    """As `ModelConfig.renamed`, of its tensors."""


@dataclass(frozen=True)
class ModelConfig:
    """Configuration common to decoder-only transformers, and the blocks of this one."""

    architecture: str
    """The class name in config.json, e.g. "Qwen3MoeForCausalLM"."""
    embedding: Embedding
    layers: tuple[tuple[Block, ...], ...]
    """The blocks of each layer, in execution order; MTP layers, if they are run, come last."""
    head: Head
    max_position_embeddings: int
    rope: RopeConfig
    rope_dim: int
    """Rotated elements of a head."""
    further_rotations: tuple[tuple[RopeConfig, int], ...] = ()
    """(rope, rope_dim) of layers with another rotation."""
    dtype: WeightDType = "float32"
    """Type of the weights that are not quantised; a KV cache of type "auto" follows it."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    renamed: tuple[tuple[str, str], ...] = ()
    """Replaced name prefixes of a checkpoint: (checkpoint's, ours); with * before both: replaced name parts."""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq", "rope_freqs.weight")
    """Patterns of ignored tensors: without information, or with values that the configuration has."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Unsupported parts of checkpoints: (description, pattern of their tensors)."""

    mtp: MtpPart | None = None
    """The layer that predicts the token after the next one; None: the model has none."""
    num_mtp_layers: int = 0
    """How many of `layers`, the last ones, predict the token after the next one."""

    has_head: bool = True
    """Whether the checkpoint has a head; without one the model gives embeddings, or a classifier's logits."""

    context_limit: int | None = None
    """Positions up to which the model is computed exactly, if fewer than it was made for."""
    context_limit_reason: str = ""
    """The limit of the context, for messages."""

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """(rope, rope_dim) pairs, indexed by a block's `rotation`."""
        return ((self.rope, self.rope_dim), *self.further_rotations)

    @property
    def hidden_size(self) -> int:
        return self.embedding.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_target_layers(self) -> int:
        """Layers that compute the next token, without MTP layers."""
        return len(self.layers) - self.num_mtp_layers

    @property
    def num_target_moe_layers(self) -> int:
        """How many of `moe_layers` are not MTP layers."""
        return sum(layer < self.num_target_layers for layer in self.moe_layers)

    @property
    def max_context(self) -> int:
        """Maximum tokens of a sequence (prompt and output together), at most `context_limit`."""
        own = _own_context(self.max_position_embeddings, self.rope)
        return own if self.context_limit is None else min(own, self.context_limit)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with routed experts, ascending."""
        layers = enumerate(self.layers)
        return tuple(i for i, layer in layers if any(isinstance(block, ExpertBlock) for block in layer))

    @property
    def routed(self) -> RoutedShape:
        """Shape of the experts, the same in every layer that has any; no experts: a dense model."""
        blocks = (block for layer in self.layers for block in layer)
        found = (block.routed for block in blocks if isinstance(block, ExpertBlock))
        return next(found, RoutedShape(0, 0, self.hidden_size, 0))

    def cache_dtype(self, setting: str) -> CacheDType:
        """KV cache type on the CPU for a value of --kv-cache-dtype."""
        if setting == "auto":
            return "bfloat16" if self.dtype == "bfloat16" else "float32"
        known = (each for each in get_args(CacheDType) if each == setting.removesuffix("_e4m3"))
        return cast(CacheDType, next(known))

    def cache_bytes_per_token(self, dtype: CacheDType) -> int:
        """Cache bytes per token, over all blocks."""
        return sum(
            kept.planes * cache_row_bytes(dtype, kept.elements)
            for layer in self.layers
            for kept in pages_of(layer)
        )

    def cache_planes(self, dtype: CacheDType) -> list[list[tuple[int, int, CacheDType]]]:
        """Cache layout for `ops.StateCache`: for each layer (planes, elements per token, type)."""
        return [[(kept.planes, kept.elements, dtype) for kept in pages_of(layer)] for layer in self.layers]

    @property
    def record_bytes(self) -> list[int]:
        """Bytes of each layer's per-sequence records; a layer without any counts 0."""
        return [
            sum(kept.num_bytes for block in layer for kept in block.state if isinstance(kept, Record))
            for layer in self.layers
        ]

    @property
    def state_layers(self) -> list[int]:
        """For each layer, the layer whose state it reads: usually itself."""
        return [min((block.state_layer for block in layer), default=n) for n, layer in enumerate(self.layers)]

    def predicting(
        self,
        where: str,
        count: int,
        layer: tuple[Block, ...] = (),
        *,
        own_norm: bool = True,
        renamed: Mapping[str, str] = MappingProxyType({}),
        pattern: str = "",
        apart: bool = False,
    ) -> ModelConfig:
        """The configuration of a model with `count` MTP layers after the last; the first one can be run.

        Args:
            where: the file that says so, for messages.
            layer: blocks of that layer after its input; empty: it cannot be run.
            own_norm: whether it has a norm before the head.
            renamed: parts of the layer ("" is the layer itself) by their prefixes in checkpoints that name them
                otherwise. pattern: of all these tensors. apart: see `MtpInput`.

        Raises:
            ModelLoadError: more layers than a model can have.
        """
        if count > MAX_LAYERS:
            raise ModelLoadError(
                f"{where}: {count} layers that predict further tokens were given; expected {MAX_LAYERS} at most; "
                "fix or replace this file"
            )
        if count == 0:
            return self
        numbers = range(self.num_layers, self.num_layers + count)
        whole = [f"{prefix}.{n}.*" for n in numbers for prefix in ("model.layers", "blk")]
        first, of_gguf = f"model.layers.{numbers[0]}", f"blk.{numbers[0]}.nextn"
        copies = [f"{first}.{name}.*" for name in ("embed_tokens", "shared_head.head")]
        copies += [f"{of_gguf}.{name}.*" for name in ("embed_tokens", "shared_head_head")]
        zero_centred = self.head.zero_centred
        begin = MtpInput(
            numbers[0],
            self.hidden_size,
            self.head.eps,
            own_norm,
            zero_centred,
            num_streams=num_residual_streams(self.layers),
            apart=apart,
        )
        blocks = (begin, *in_layer(layer, numbers[0])) if layer else ()
        prefixes = tuple((theirs, f"{first}.{ours}") for theirs, ours in renamed.items())
        left_out = (*whole, *([pattern] if pattern else []))
        found = MtpPart(blocks, left_out, unread=(*copies, *whole[2:]), renamed=prefixes)
        return replace(self, mtp=found)

    def with_mtp(self) -> ModelConfig:
        """The configuration with its MTP layer as the last of `layers`."""
        mtp = self.mtp
        assert mtp is not None, "a model without an MTP layer"
        return replace(
            self,
            layers=(*self.layers, mtp.layer),
            num_mtp_layers=1,
            renamed=(*mtp.renamed, *self.renamed),
            ignored=(*self.ignored, *mtp.unread),
            mtp=replace(mtp, left_out=()),
        )

    def as_stored(self, shape_of: ShapeOf) -> ModelConfig:
        """The configuration of blocks as a checkpoint with tensors of these shapes stores them."""
        layers = tuple(tuple(block.as_stored(shape_of) for block in layer) for layer in self.layers)
        return replace(self, layers=layers)

    def with_separate_head(self) -> ModelConfig:
        """The configuration of a model whose head has a matrix of its own."""
        embedding, head = replace(self.embedding, tied=False), replace(self.head, tied=False)
        return replace(self, embedding=embedding, head=head)

    def with_classifier(self, labels: int) -> ModelConfig:
        """The configuration with a classifier of so many labels instead of a head."""
        return replace(
            self,
            has_head=False,
            embedding=replace(self.embedding, tied=False),
            head=replace(self.head, tied=False, labels=labels, scale=1.0, softcap=None),
        )

    def validate(self, where: str) -> ModelConfig:
        """The configuration itself; raises ModelLoadError if fields contradict one another. `where` is the file to
        name."""
        parts = (self.embedding, *(block for layer in self.layers for block in layer))
        problems = [problem for part in parts for problem in part.problems()]
        if not any(map(pages_of, self.layers)):
            problems.append("no layer has full attention; at least one was expected")
        if any(rope.kind == "dynamic" and dim <= 2 for rope, dim in self.rotations):
            problems.append("dynamic RoPE scaling needs a head_dim of more than 2")
        if any(token >= self.vocab_size for token in self.eos_token_ids):
            problems.append(
                f"eos_token_id {list(self.eos_token_ids)} is outside the vocabulary of {self.vocab_size}"
            )
        for problem in problems:
            raise ModelLoadError(f"{where}: {problem}; fix or replace this file")
        return self


def _own_context(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Context length that a model was made for.

    Linear scaling changes max_position_embeddings itself. For dynamic NTK it is the length before scaling; YaRN keeps
    that in original_max_position_embeddings. Both extend it by `factor`.
    """
    if rope.kind == "dynamic":
        return int(max_position_embeddings * rope.factor)
    if rope.kind == "yarn":
        return max(max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
    return max_position_embeddings


def expert_limits(layers: Iterable[Iterable[Block]]) -> tuple[float, ...]:
    """`RoutedShape.limit` of each layer with routed experts; empty if none has one."""
    blocks = (block for layer in layers for block in layer)
    limits = tuple(block.routed.limit for block in blocks if isinstance(block, ExpertBlock))
    return limits if any(limits) else ()


def num_residual_streams(layers: Iterable[Iterable[Block]]) -> int:
    """Hidden states of a token that the residual stream consists of between layers."""
    blocks = (block for layer in layers for block in layer)
    return max((each.mix.num_streams for each in blocks if isinstance(each, HyperConnection)), default=1)


def has_bidirectional_pictures(layers: Iterable[Iterable[Block]]) -> bool:
    """Whether tokens of a picture attend to one another in some layer."""
    return any(block.bidirectional_pictures for layer in layers for block in layer)


def reads_pictures(layers: Iterable[Iterable[Block]]) -> bool:
    """Whether all blocks can compute tokens of pictures."""
    return all(block.reads_pictures for layer in layers for block in layer)


def cache_row_bytes(dtype: CacheDType, elements: int) -> int:
    """Bytes of a row of keys, values or latents: its elements, and with q8 the row's float32 scale."""
    element_bytes = {"float32": 4, "bfloat16": 2, "q8": 1, "fp8": 1}[dtype]
    return element_bytes * elements + (4 if dtype == "q8" else 0)


def pages_of(layer: tuple[Block, ...]) -> list[Pages]:
    """A layer's per-token state."""
    return [kept for block in layer for kept in block.state if isinstance(kept, Pages)]
