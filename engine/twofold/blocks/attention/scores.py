"""Attend: from products of queries and keys to the weights of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofold._core import ScoreRule
from twofold.blocks.attention.cpu_part import CpuPart
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block_weights import BlockWeights
from twofold.weights.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of keys, and the softmax over them."""

    scale: float | None = None
    """Factor of the products; None: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """Bound of the scores: products become softcap * tanh(product / softcap) (Gemma 2); 0: none."""
    sinks: bool = False
    """Whether each head has a logit that takes part in its softmax and has no value (gpt-oss)."""

    def of(self, head_dim: int) -> Scores:
        """The same with the scale of heads of `head_dim` elements, if it has none."""
        return self if self.scale is not None else Scores(**vars(self) | {"scale": float(head_dim**-0.5)})

    @property
    def native(self) -> ScoreRule:
        return ScoreRule(**{name: value for name, value in vars(self).items() if name != "sinks"})

    def tensors(self, names: LayerNames, num_heads: int) -> dict[str, TensorSpec]:
        return {"sinks": names.exact("sinks", "attn_sinks.weight", num_heads)} if self.sinks else {}

    def cpu(self, weights: BlockWeights) -> CpuPart:
        return {"rule": self.native, "sinks": weights.optional_vector("sinks")}

    def attended(
        self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, *, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention in torch: [Q, heads, elements of a value].

        Args:
            q: [Q, heads, elements of a key].
            keys: [positions, kv heads, elements]; `values` likewise, of another length perhaps.
            seen: bool [Q, positions], or [heads, Q, positions].
            sinks: f32 [heads].
        """
        import torch

        assert self.scale is not None
        if self.softcap > 0:
            return self._capped(q, keys, values, seen, sinks)
        if sinks is not None:
            q, keys, values, seen = _with_sinks(q, keys, values, seen, sinks / self.scale)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=self.scale,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        return out[0].transpose(0, 1)

    def _capped(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
        """`attended` with a bound, which torch's attention does not have."""
        import torch

        assert self.scale is not None
        keys, values = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = self.softcap * torch.tanh(
            torch.einsum("qhd,phd->hqp", q.float(), keys) * self.scale / self.softcap
        )
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], 2)
        weights = scores.softmax(2)[..., : len(keys)]
        weights = weights.masked_fill(~seen.any(-1)[..., None], 0)  # queries that attend to nothing
        return torch.einsum("hqp,phd->qhd", weights, values).to(q.dtype)


def _with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append one position that every query sees: its product with a head's query is that head's sink, and its value is
    zero. Queries carry their head's sink in an extra element (eight, to keep rows aligned), which is zero in all other
    keys; so one mask serves all heads.
    """
    import torch

    extra = q.new_zeros((*q.shape[:2], 8))
    extra[:, :, 0] = sinks
    sink_key = keys.new_zeros((1, keys.shape[1], keys.shape[2] + 8))
    sink_key[..., -8] = 1.0
    more = torch.cat([torch.nn.functional.pad(keys, (0, 8)), sink_key])
    values = torch.cat([values, torch.zeros_like(values[:1])])
    return torch.cat([q, extra], -1), more, values, torch.nn.functional.pad(seen, (0, 1), value=True)
