"""Model input and output: the embedding, the last norm and the LM head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block import Cost, ModelPart
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.rope import RopeConfig
from twofold.blocks.table_inputs import TableInputs
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import WeightMatrix, source_row_bytes

HEAD: Final = ("lm_head.weight", "output.weight")
"""Names of the head's matrix, in checkpoints and in GGUF files."""
CLASSIFIER: Final = ("score.weight", "cls.output.weight")
"""Names of a classifier's matrix, in checkpoints and in GGUF files."""


@dataclass(frozen=True)
class Embedding(ModelPart):
    """Token embedding [vocab_size, hidden_size]; a token's row is read from the mapped file."""

    kind: ClassVar[str] = "embedding"
    vocab_size: int
    hidden_size: int
    tied: bool
    """Whether the head uses the same matrix."""
    scale: float = 1.0
    """Factor applied to the rows before the first layer."""
    layer_inputs: TableInputs | None = None
    """Further inputs of layers, from tables; None: there are none."""
    learned_pairs: int = 0
    """Pairs of rotary embedding whose frequencies have learned factors; 0: checkpoints have none."""

    def problems(self) -> Iterator[str]:
        if self.layer_inputs is not None:
            yield from self.layer_inputs.problems(self.vocab_size)

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        shape = (self.vocab_size, self.hidden_size)
        table = TensorSpec("model.embed_tokens.weight", shape, "embedding", "token_embd.weight")
        head = TensorSpec(HEAD[0], shape, "embedding", HEAD[1])
        if self.tied and found(head) and not found(table):  # a tied pair may be stored under either name
            table = head
        further = {} if self.layer_inputs is None else self.layer_inputs.tensors(found)
        if self.learned_pairs:
            further["rope"] = TensorSpec("model.rotary_emb.alpha", (self.learned_pairs,), "exact", "")
        return {"table": table, **further}

    def check(self, weights: BlockWeights) -> None:
        super().check(weights)
        if self.layer_inputs is not None:
            self.layer_inputs.check(weights)

    def learned(self, weights: BlockWeights, rope: RopeConfig) -> RopeConfig:
        """The rotation with the checkpoint's factors of its frequencies, if it has any."""
        factors = weights.optional_vector("rope")
        return rope if factors is None else replace(rope, learned=tuple(factors.tolist()))

    def device_bytes(self, weights: BlockWeights) -> int:
        missing = 0 if self.layer_inputs is None else self.layer_inputs.missing_bytes(weights)
        return super().device_bytes(weights) - 4 * self.learned_pairs - missing

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes: pages of the file, 0 if the head has packed them; a copy if they are converted to another
        format."""
        further = 0 if self.layer_inputs is None else self.layer_inputs.host_bytes(weights)
        if weights.recoding is not None:
            return further + self.vocab_size * source_row_bytes(weights.recoding.format, self.hidden_size)
        return further + (0 if self.tied else weights.source.entry(weights.specs["table"].name).num_bytes)

    def table(self, weights: BlockWeights) -> WeightMatrix:
        return weights.matrix("table")

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Embedding:
        """Create the CPU operator; its rows stay in the file. Raises ModelLoadError for a NaN or an infinity."""
        # A tied table is packed as the head; panels of a file are checked with that file.
        read = self.table(weights) if self.tied or weights.is_mapped else weights.checked(pool, "table")
        return ops.Embedding(pool, read)

    def scale_rows(self, rows: F32) -> None:
        """Multiply the rows by `scale`, in place."""
        if self.scale != 1.0:
            rows *= np.float32(self.scale)


@dataclass(frozen=True)
class Head(ModelPart):
    kind: ClassVar[str] = "head"

    vocab_size: int
    hidden_size: int
    eps: float
    tied: bool
    scale: float = 1.0
    """Factor applied to the logits."""
    softcap: float | None = None
    """Soft cap: logits become softcap * tanh(logits / softcap)."""
    zero_centred: bool = False
    """Whether checkpoints store the norm minus 1."""
    normed: bool = True
    """Whether hidden states are normed; else the last layer's output is read as it is."""
    labels: int = 0
    """Labels of a classifier whose matrix takes the vocabulary's place; 0: the head is a vocabulary's."""

    @property
    def num_rows(self) -> int:
        """Logits of a hidden state."""
        return self.labels or self.vocab_size

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        shape = (self.num_rows, self.hidden_size)
        name, of_gguf = CLASSIFIER if self.labels else HEAD
        norms = [
            TensorSpec(
                "model.norm.weight", (self.hidden_size,), "exact", theirs, zero_centred=self.zero_centred
            )
            for theirs in ("output_norm.weight", "token_embd_norm.weight")
        ]
        norm = {"norm": next(filter(found, norms), norms[0])} if self.normed else {}
        return norm | {
            "vocabulary": Embedding(self.vocab_size, self.hidden_size, True).tensors(found)["table"]
            if self.tied
            else TensorSpec(name, shape, "embedding", of_gguf),
        }

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that are ignored: a copy of the embedding, or a head beside a classifier."""
        return HEAD if self.tied or self.labels else ()

    def device_bytes(self, weights: BlockWeights) -> int:
        shared = 2 * math.prod(weights.specs["vocabulary"].shape) if self.tied else 0
        return super().device_bytes(weights) - shared

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        """Cost of the matrix alone."""
        return Cost(weights.packed_bytes("vocabulary"), tokens * self._flops_per_token(weights))

    def norm(self, weights: BlockWeights) -> F32 | None:
        """The last norm's weights, times `scale`; None: there is no norm."""
        return weights.vector("norm") * np.float32(self.scale) if self.normed else None

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.LmHead:
        """Pack the matrix and create the CPU operator. Raises ModelLoadError."""
        vocabulary = weights.packed(pool, "head", "vocabulary")
        return ops.LmHead(pool, self.norm(weights), vocabulary, self.eps, softcap=self.softcap or 0.0)
