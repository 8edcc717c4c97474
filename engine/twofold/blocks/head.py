"""Where tokens come in and logits go out: the embedding, the last norm and the matrix of the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from twofold.blocks import ops
from twofold.blocks.block import F32, BlockWeights, Cost, ModelPart
from twofold.weights.tensor_spec import Found, TensorSpec
from twofold.weights.weight_format import WeightMatrix, source_row_bytes


@dataclass(frozen=True)
class Embedding(ModelPart):
    """[vocab_size, hidden_size]; a token's row is read from the mapped file."""

    kind: ClassVar[str] = "embedding"
    vocab_size: int
    hidden_size: int
    tied: bool
    """Whether the head is this matrix, too."""
    scale: float = 1.0
    """Of the rows as the first layer reads them."""

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        shape = (self.vocab_size, self.hidden_size)
        return {"table": TensorSpec("model.embed_tokens.weight", shape, "embedding", "token_embd.weight")}

    def host_bytes(self, weights: BlockWeights) -> int:
        """Pages of the file, none where the head has packed it; a copy where they are read in another format."""
        if weights.recoding is not None:
            return self.vocab_size * source_row_bytes(weights.recoding.format, self.hidden_size)
        return 0 if self.tied else weights.source.entry(weights.specs["table"].name).num_bytes

    def table(self, weights: BlockWeights) -> WeightMatrix:
        return weights.matrix("table")

    def scale_rows(self, rows: F32) -> None:
        """In place."""
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
    """Of the logits."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    zero_centred: bool = False
    """Whether checkpoints have the norm's values less 1."""

    def tensors(self, found: Found) -> dict[str, TensorSpec]:
        shape = (self.vocab_size, self.hidden_size)
        norms = [
            TensorSpec(
                "model.norm.weight", (self.hidden_size,), "exact", theirs, zero_centred=self.zero_centred
            )
            for theirs in ("output_norm.weight", "token_embd_norm.weight")
        ]
        return {
            "norm": next(filter(found, norms), norms[0]),
            "vocabulary": Embedding(self.vocab_size, self.hidden_size, True).tensors(found)["table"]
            if self.tied
            else TensorSpec("lm_head.weight", shape, "embedding", "output.weight"),
        }

    @property
    def ignored(self) -> tuple[str, ...]:
        """Tensors that are not read: a tied head may be written out all the same."""
        return ("lm_head.weight",) if self.tied else ()

    def device_bytes(self, weights: BlockWeights) -> int:
        shared = 2 * math.prod(weights.specs["vocabulary"].shape) if self.tied else 0
        return super().device_bytes(weights) - shared

    def cost(self, weights: BlockWeights, tokens: int = 1, behind: int = 0) -> Cost:
        """Of the matrix alone."""
        return Cost(weights.packed_bytes("vocabulary"), tokens * self._flops_per_token(weights))

    def norm(self, weights: BlockWeights) -> F32:
        """The last norm's weights, times `scale`."""
        return weights.vector("norm") * np.float32(self.scale)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.LmHead:
        """Pack the matrix and make the CPU's operator. Raises ModelLoadError."""
        vocabulary = weights.packed(pool, "head", "vocabulary")
        return ops.LmHead(pool, self.norm(weights), vocabulary, self.eps, self.softcap or 0.0)
